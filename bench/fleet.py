"""A whole fleet as a user starts it: `npufleet up`, with the defaults that users get.

The embedded server with its journal, on a state folder of its own, and any free port. Knows nothing
of loads.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.machine import by_role

READY_LIMIT_S = 120.0
_STOP_LIMIT_S = 40.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """A fleet that said it is ready: its HTTP base URL and its queue."""

    pid: int
    url: str
    redis_url: str

    def infer_url(self, model: str) -> str:
        return f"{self.url}/v1/models/{model}/infer"

    def roles(self) -> dict[str, list[int]]:
        """Its processes by what they do."""
        return by_role(self.pid, role_of)


def role_of(command: list[str]) -> str:
    """What a process of a fleet does, by its command line."""
    line = " ".join(command)
    if "valkey" in line or "redis-server" in line:
        return "server"
    if "npufleet_worker.executor" in line:
        return "executor"
    if re.search(r"npufleet_gateway|npufleet gateway\b", line):
        return "gateway"
    return "supervisor" if re.search(r"npufleet worker\b", line) else "launcher"


@contextmanager
def fleet(
    models: Path, *, log: Path, workers: int = 1, gateways: int = 1
) -> Iterator[RunningFleet]:
    """A fleet that serves the repository `models`, ready; stopped at the end. It logs to `log`."""
    with tempfile.TemporaryDirectory(prefix="npufleet-bench-") as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "npufleet", "up", "--models", str(models.resolve())]
        command += ["--state", f"{folder}/state", "--port", "0"]
        command += ["--workers", str(workers), "--gateways", str(gateways)]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("NPUFLEET_")}
        with out.open("wb") as told, log.open("ab") as said:
            process = subprocess.Popen(
                command, stdout=told, stderr=said, cwd=folder, env=environ, start_new_session=True
            )
        try:
            yield _ready(process, out, log)
        finally:
            _stop(process)


def _ready(process: "subprocess.Popen[bytes]", out: Path, log: Path) -> RunningFleet:
    end_s = time.monotonic() + READY_LIMIT_S
    while "Ctrl-C" not in (text := out.read_text()):
        if process.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(f"the fleet did not become ready; see {log}")
        time.sleep(_POLL_S)
    url, queue = re.search(r" on (http://\S+)", text), re.search(r"  queue +(\S+)", text)
    assert url is not None, text
    assert queue is not None, text
    return RunningFleet(process.pid, url[1], queue[1])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its children are tied to it by the kernel
        process.wait(_STOP_LIMIT_S)
