"""A child process that is kept alive."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from npufleet.child import Child, Program
from npufleet.errors import NpufleetError
from tests.support.processes import is_alive, wait_gone
from tests.support.waiting import wait_until_async

Lines = list[tuple[str, str]]

SAY_PID = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
IGNORE_TERM = (
    "import os, signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print(os.getpid(), subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
)


@asynccontextmanager
async def _kept(code: str) -> AsyncIterator[tuple[Child, "asyncio.Task[None]", Lines]]:
    lines: Lines = []
    program = Program(name="it", command=(sys.executable, "-c", code), environ=dict(os.environ))
    child = Child(program, lambda name, line: lines.append((name, line)))
    keeper = asyncio.create_task(child.keep())
    try:
        yield child, keeper, lines
    finally:
        child.kill()
        await asyncio.wait([keeper], timeout=10)


async def _line(lines: Lines, number: int) -> str:
    async def there() -> bool:
        return len(lines) > number

    await wait_until_async(there, what=f"line {number}")
    return lines[number][1]


async def test_a_killed_child_is_started_again() -> None:
    """A new process takes over, and its lines arrive under the same name."""
    async with _kept(SAY_PID) as (_, keeper, lines):
        first = int(await _line(lines, 0))

        os.kill(first, signal.SIGKILL)

        second = int(await _line(lines, 1))
        assert second != first
        assert is_alive(second)
        assert {name for name, _ in lines} == {"it"}
        assert not keeper.done()


async def test_a_child_that_keeps_failing_is_given_up_with_its_reason() -> None:
    """The error has the exit code and the last lines of the last attempt."""
    async with _kept("import sys; print('no such device', file=sys.stderr); sys.exit(3)") as kept:
        _, keeper, lines = kept

        with pytest.raises(
            NpufleetError, match=r"(?s)it keeps failing \(exit code 3\).*no such device"
        ):
            await asyncio.wait_for(keeper, 20)

        assert len(lines) == 3


async def test_stop_ends_it_for_good() -> None:
    """SIGTERM, and no new start."""
    async with _kept(SAY_PID) as (child, keeper, lines):
        pid = int(await _line(lines, 0))

        child.stop()
        await asyncio.wait_for(keeper, 10)

        assert not is_alive(pid)
        assert len(lines) == 1


async def test_stop_does_not_wait_for_the_next_attempt() -> None:
    """A child that is waiting to be started again stops at once."""
    async with _kept("print('x')") as (child, keeper, lines):
        await _line(lines, 0)

        child.stop()

        await asyncio.wait_for(keeper, 5)


async def test_kill_ends_the_whole_family() -> None:
    """A child that ignores SIGTERM, and the processes it started, end by SIGKILL."""
    async with _kept(IGNORE_TERM) as (child, keeper, lines):
        own, grandchild = map(int, (await _line(lines, 0)).split())
        child.stop()
        assert is_alive(own)

        child.kill()
        await asyncio.wait_for(keeper, 10)

        wait_gone(own)
        wait_gone(grandchild)


async def test_a_line_without_end_does_not_block_it() -> None:
    """Output beyond the limit is dropped, and what follows arrives."""
    async with _kept("print('x' * 2_000_000); print('after', flush=True); input()") as kept:
        _, _, lines = kept

        async def arrived() -> bool:
            return ("it", "after") in lines

        await wait_until_async(arrived, what="the line after the endless one")
