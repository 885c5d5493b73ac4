"""A child process that is kept alive: started again when it dies, until it keeps failing.

`Restarts` decides, without a clock of its own; `Child` runs. A child is tied to this process, so
it never outlives it. Knows nothing of what the child does.
"""

import asyncio
import collections
import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from npufleet.errors import NpufleetError
from npufleet.tether import tethered

logger = logging.getLogger(__name__)

_LINE_LIMIT_BYTES = 256 * 1024


@dataclass(frozen=True)
class Program:
    """A child to keep running: its name in logs, its command line and its environment."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]


class Restarts:
    """Decides how long to wait before a child is started again, and when to give up.

    A child that lived for `stable_s` starts with a clean slate.
    """

    def __init__(self, *, most: int = 3, stable_s: float = 10.0, longest_s: float = 10.0) -> None:
        self._most = most
        self._stable_s = stable_s
        self._longest_s = longest_s
        self._early_deaths = 0

    def after(self, lived_s: float) -> float | None:
        """Seconds to wait after a death at the age of `lived_s`; None: it keeps failing."""
        self._early_deaths = 1 if lived_s >= self._stable_s else self._early_deaths + 1
        if self._early_deaths >= self._most:
            return None
        return min(0.25 * 2.0**self._early_deaths, self._longest_s)


class Child:
    """One program kept alive. `on_line` gets its name and each line that it prints."""

    def __init__(self, program: Program, on_line: Callable[[str, str], None]) -> None:
        self.program = program
        self._on_line = on_line
        self._tail: collections.deque[str] = collections.deque(maxlen=15)
        self._process: asyncio.subprocess.Process | None = None
        self._stop = asyncio.Event()

    async def keep(self) -> None:
        """Run until `stop`; raises NpufleetError with its last lines when it keeps failing."""
        restarts = Restarts()
        while not self._stop.is_set():
            born = time.monotonic()
            code = await self._run()
            if self._stop.is_set():
                return
            wait_s = restarts.after(time.monotonic() - born)
            if wait_s is None:
                raise NpufleetError(self._why(code))
            fields = {"child": self.program.name, "exit": code, "again_in_s": wait_s}
            logger.warning("a child died", extra=fields)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait_s * random.uniform(0.8, 1.2))

    def stop(self) -> None:
        """Ask it to end and not to come back; `keep` returns once it has."""
        self._stop.set()
        if self._process and self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to it and to whatever it started."""
        self._stop.set()
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _run(self) -> int:
        self._tail.clear()
        self._process = process = await asyncio.create_subprocess_exec(
            *tethered(*self.program.command),
            env=self.program.environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us, who stop things in order
            limit=_LINE_LIMIT_BYTES,
        )
        logger.info("started a child", extra={"child": self.program.name, "pid": process.pid})
        if self._stop.is_set():  # asked while it was being started
            process.terminate()
        reader = asyncio.create_task(self._read(process))
        try:
            return await process.wait()
        finally:
            # A grandchild may hold the pipe open: what is not there by then is not waited for.
            await asyncio.wait([reader], timeout=1.0)
            reader.cancel()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line beyond the limit: what was read of it is dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            self._on_line(self.program.name, text)

    def _why(self, code: int) -> str:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = "".join(f"\n  {line}" for line in self._tail) or " (it printed nothing)"
        return f"{self.program.name} keeps failing ({how}); its last lines:{lines}"
