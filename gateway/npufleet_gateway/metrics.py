"""What Prometheus sees of the gateway; of all processes on one port where there are several.

Several processes share a folder of memory-mapped values, named by PROMETHEUS_MULTIPROC_DIR before
prometheus-client is imported. Knows nothing of HTTP or of where the numbers come from.
"""

import os
from functools import cache
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The gateway's counters. `model` is a label only for models that exist: "" otherwise."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "npufleet_gateway_requests",
            "Requests answered, by model and error code (ok: answered right).",
            ["model", "code"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "npufleet_gateway_request_seconds",
            "Time from the head of a request to the end of its answer.",
            ["model"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._in_flight = Gauge(
            "npufleet_gateway_in_flight",
            "Requests taken and not yet answered.",
            multiprocess_mode="livesum",
            registry=self._registry,
        )
        self._bytes = Counter(
            "npufleet_gateway_body_bytes",
            "Bytes of the bodies that were queued.",
            ["model"],
            registry=self._registry,
        )

        # `labels` looks up and checks at every call; these are called for every request.
        self._requests_of = cache(self._requests.labels)
        self._seconds_of = cache(self._seconds.labels)
        self._bytes_of = cache(self._bytes.labels)

    def answered(self, *, model: str, code: str, seconds: float) -> None:
        self._requests_of(model, code).inc()
        self._seconds_of(model).observe(seconds)

    def queued(self, *, model: str, size_bytes: int) -> None:
        self._bytes_of(model).inc(size_bytes)

    def in_flight(self, count: int) -> None:
        self._in_flight.set(count)

    def exposition(self) -> bytes:
        """Prometheus' text format; reads files where several processes share a port."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None:
            return generate_latest(self._registry)
        _forget_dead(Path(folder))
        together = CollectorRegistry()
        MultiProcessCollector(together, folder)  # type: ignore[no-untyped-call]  # the library's own
        return generate_latest(together)


def _forget_dead(folder: Path) -> None:
    """A process that was killed no longer has anything in flight."""
    for file in folder.glob("gauge_livesum_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        if not Path(f"/proc/{pid}").exists():
            mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]  # the library's own
