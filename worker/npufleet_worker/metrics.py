"""What a worker counts and measures, for Prometheus. Knows nothing of how it comes about."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one worker process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.batch_size = Histogram(
            "npufleet_batch_size",
            "Rows of each batch that was run, without padding.",
            ["model"],
            buckets=_SIZES,
            registry=registry,
        )
        self.padding = Counter(
            "npufleet_padding_rows",
            "Rows that only filled a batch up.",
            ["model"],
            registry=registry,
        )
        self.outcomes = Counter(
            "npufleet_worker_outcomes",
            "Requests that this worker ended, by the code of their reply (ok for a right one).",
            ["model", "code"],
            registry=registry,
        )
        self.held = Gauge(
            "npufleet_held_requests",
            "Requests taken and not yet ended.",
            ["model"],
            registry=registry,
        )
        self.restarts = Counter(
            "npufleet_executor_restarts",
            "Executors that died and were started again.",
            ["model"],
            registry=registry,
        )

    def page(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)
