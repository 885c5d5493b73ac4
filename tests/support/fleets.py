"""A real `npufleet up` for the tests: what it printed, its processes, and its end."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
READY_LIMIT_S = 60.0


@dataclass(frozen=True)
class RunningFleet:
    """A fleet that said it is ready."""

    process: "subprocess.Popen[bytes]"
    output: Path
    log: Path

    @property
    def url(self) -> str:
        """Where it serves HTTP."""
        return self._told(r" on (http://\S+)")

    @property
    def redis_url(self) -> str:
        """Its queue."""
        return self._told(r"  queue +(\S+)")

    @property
    def curl(self) -> list[str]:
        """The line that it offers for pasting, as words."""
        return shlex.split(self._told(r"  (curl .*)"))

    def family(self) -> list[psutil.Process]:
        """Every process that it started, and theirs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def _told(self, pattern: str) -> str:
        match = re.search(pattern, self.output.read_text())
        assert match, self.output.read_text()
        return match[1]


@contextmanager
def running_fleet(
    state: Path, *options: str, environ: dict[str, str] | None = None
) -> Iterator[RunningFleet]:
    """`npufleet up` on a free port and the folder `state`, ready; killed at the end if need be."""
    with tempfile.TemporaryDirectory(prefix="npufleet-test-") as folder:
        output, log = Path(folder) / "output", Path(folder) / "log"
        command = [sys.executable, "-m", "npufleet", "up", "--state", str(state), "--port", "0"]
        with output.open("wb") as out, log.open("wb") as err:
            process = subprocess.Popen(
                [*command, *options],
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env={**os.environ, **(environ or {})},
            )
        try:
            wait_until(
                lambda: "Ctrl-C" in output.read_text() or process.poll() is not None,
                what="the fleet to be ready",
                limit_s=READY_LIMIT_S,
            )
            assert process.poll() is None, log.read_text()
            yield RunningFleet(process, output, log)
        finally:
            process.kill()
            process.wait(timeout=10)
