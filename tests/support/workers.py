"""Real worker processes for the tests, and a producer that needs none of our client."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import redis

from npufleet import tensors, wire
from npufleet.keys import FleetKeys, ModelKeys
from npufleet.wire import Body, Reply
from tests.support.waiting import wait_until

READY_LIMIT_S = 60.0


@dataclass(frozen=True)
class RunningWorker:
    """A worker that has registered its models."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def executors(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def running_worker(
    redis_url: str, prefix: str, models: Path, *, name: str = "w", **settings: Any
) -> Iterator[RunningWorker]:
    """`npufleet worker` on every model of the folder, ready; killed at the end if need be."""
    environ = {f"NPUFLEET_{key.upper()}": str(value) for key, value in settings.items()}
    environ |= {
        "NPUFLEET_REDIS_URL": redis_url,
        "NPUFLEET_PREFIX": prefix,
        "NPUFLEET_MODELS": str(models),
        "NPUFLEET_WORKER_NAME": name,
        "NPUFLEET_WORKER_HTTP_PORT": "0",
    }
    with tempfile.NamedTemporaryFile("w+b", prefix="npufleet-worker-") as log:
        path = Path(log.name)
        process = subprocess.Popen(
            [sys.executable, "-m", "npufleet", "worker"],
            stdout=log,
            stderr=log,
            env={**os.environ, **environ},
        )
        try:
            wait_until(
                lambda: "worker serves" in path.read_text() or process.poll() is not None,
                what="the worker to be ready",
                limit_s=READY_LIMIT_S,
            )
            assert process.poll() is None, path.read_text()
            yield RunningWorker(process, path)
        finally:
            process.kill()
            process.wait(timeout=10)


class Producer:
    """Adds entries to the lanes of one model by hand, and pops their replies."""

    def __init__(self, client: redis.Redis, prefix: str, model: str) -> None:
        self.client = client
        self.keys: ModelKeys = FleetKeys(prefix).model(model)

    def add(self, fields: Mapping[Any, Any], lane: str = "normal") -> str:
        """The stream id of a raw entry."""
        entry: Any = self.client.xadd(self.keys.lane(lane), dict(fields))
        return str(entry, "ascii")

    def ask(self, inputs: Mapping[str, Any], lane: str = "normal", **fields: Any) -> str:
        """Adds a well-formed request with these arrays (or `{"image": …}`), and gives its id."""
        wire_id = wire.new_id()
        body = wire.pack_body(
            Body(
                {
                    name: tensors.encode(value) if isinstance(value, np.ndarray) else value
                    for name, value in inputs.items()
                }
            )
        )
        self.add({"v": 1, "id": wire_id, "body": body, **fields}, lane)
        return wire_id

    def reply(self, wire_id: str, limit_s: float = 8.0) -> Reply:
        """The reply, popped: a second one would be seen as a leftover."""
        found: Any = self.client.blpop([self.keys.reply(wire_id)], timeout=limit_s)
        # below the socket's own limit
        assert found is not None, f"no reply to {wire_id} within {limit_s} s"
        return wire.unpack_reply(found[1])
