"""Real executor processes: started, fed, failing, killed and closed."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import uvloop

from npufleet.errors import ConfigurationError, ModelFailed
from npufleet.tensors import Array
from npufleet_worker.budget import UNDER_WAY
from npufleet_worker.device import REGIONS, BatchResult, Executor, ExecutorDied
from npufleet_worker.repository import Batching
from tests.support.executors import Bench, bench, plain
from tests.support.plain_backends import DIE, FAIL, HOLD, MEMORY, SHORT, STALE
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def findable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors do not look into the working folder."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
async def device() -> AsyncIterator[Bench]:
    async with bench() as made:
        yield made


def row(first: float, second: float = 0.0) -> list[Array]:
    return [np.array([[first, second]], np.float32)]


async def answer(device: Bench, executor: Executor, *values: float) -> list[float]:
    """Runs one batch of one-row requests, and checks nothing: 2 * value is right."""
    future = device.submit(executor, *(row(value) for value in values))
    result = await asyncio.wait_for(future, LIMIT_S)
    got: list[float] = result.outputs["y"][:, 0].tolist()
    result.release()
    return got


async def held(device: Bench, executor: Executor, folder: Path) -> "asyncio.Future[BatchResult]":
    """A batch that is running for sure and does not end before `go`."""
    future = device.submit(executor, row(HOLD))
    started = folder / "started"
    await asyncio.to_thread(wait_until, started.exists, what="the batch to run", limit_s=LIMIT_S)
    return future


async def test_a_batch_comes_back_row_by_row(device: Bench, tmp_path: Path) -> None:
    """In the order of the requests, without padding, with its time and gear."""
    executor = await device.start(plain(tmp_path))
    future = device.submit(executor, row(1, 2), [np.array([[3, 4], [5, 6]], np.float32)], gear=8)
    result = await asyncio.wait_for(future, LIMIT_S)
    assert result.outputs["y"].tolist() == [[2, 4], [6, 8], [10, 12]]
    assert result.gear == 8
    assert result.execute_ms > 0
    with pytest.raises(ValueError, match="read-only"):
        result.outputs["y"][0] = 0
    assert sorted(executor.execute_ms) == [1, 8]


async def test_two_batches_are_taken_while_one_runs_and_not_another(
    device: Bench, tmp_path: Path
) -> None:
    """One to stage, one in the pipe: the device waits for nobody, and the queue has a bound."""
    executor = await device.start(plain(tmp_path))
    assert executor.room == UNDER_WAY == 3
    first = await held(device, executor, tmp_path)
    second, third = device.submit(executor, row(7)), device.submit(executor, row(8))
    assert executor.room == 0
    with pytest.raises(RuntimeError, match="no room"):
        device.submit(executor, row(9))
    assert not first.done()
    (tmp_path / "go").touch()
    results = await asyncio.wait_for(asyncio.gather(first, second, third), LIMIT_S)
    assert [r.outputs["y"][0, 0] for r in results] == [2 * HOLD, 14, 16]
    assert executor.room == 2, "the regions of three results are not released"


async def test_a_result_stays_right_until_it_is_released(device: Bench, tmp_path: Path) -> None:
    """Later batches get other memory; with all of it held there is no room."""
    executor = await device.start(plain(tmp_path))
    results = []
    for value in range(REGIONS):
        future = device.submit(executor, row(value))
        results.append(await asyncio.wait_for(future, LIMIT_S))
    assert [r.outputs["y"][0, 0] for r in results] == [2 * value for value in range(REGIONS)]
    assert executor.room == 0
    results[0].release()
    results[0].release()
    assert executor.room == 1


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (FAIL, "RuntimeError: no such luck"),
        (MEMORY, "MemoryError"),
        (SHORT, r"output 'y' has shape \[1, 2\] for a batch of 2 rows"),
    ],
)
async def test_a_failing_batch_fails_alone(
    device: Bench, tmp_path: Path, command: int, wanted: str
) -> None:
    """The batch ahead of it, the one after it and the process itself are well."""
    executor = await device.start(plain(tmp_path))
    bad = device.submit(executor, row(command), row(1))
    good = device.submit(executor, row(5))
    with pytest.raises(ModelFailed, match=wanted):
        await asyncio.wait_for(bad, LIMIT_S)
    assert (await asyncio.wait_for(good, LIMIT_S)).outputs["y"][0, 0] == 10
    assert await answer(device, executor, 1, 2) == [2, 4]
    assert not executor.died.done()


async def test_a_killed_executor_fails_its_batches_at_once(device: Bench, tmp_path: Path) -> None:
    """SIGKILL in the middle of a batch: both futures tell, and which of them was running."""
    executor = await device.start(plain(tmp_path))
    running = await held(device, executor, tmp_path)
    ahead = device.submit(executor, row(7))
    os.kill(executor.pid, signal.SIGKILL)
    with pytest.raises(ExecutorDied, match="was killed by SIGKILL") as first:
        await asyncio.wait_for(running, LIMIT_S)
    with pytest.raises(ExecutorDied) as second:
        await asyncio.wait_for(ahead, LIMIT_S)
    assert (first.value.running, second.value.running) == (True, False)
    assert first.value.exit_code == -signal.SIGKILL
    assert await executor.died == -signal.SIGKILL
    assert executor.room == 0


async def test_a_batch_that_kills_its_process_is_known_by_it(device: Bench, tmp_path: Path) -> None:
    """And what was answered before the death stays answered."""
    executor = await device.start(plain(tmp_path))
    good, deadly = device.submit(executor, row(3)), device.submit(executor, row(DIE))
    assert (await asyncio.wait_for(good, LIMIT_S)).outputs["y"][0, 0] == 6
    with pytest.raises(ExecutorDied) as caught:
        await asyncio.wait_for(deadly, LIMIT_S)
    assert caught.value.running


async def test_the_answer_to_a_batch_that_was_given_up_is_dropped(
    device: Bench, tmp_path: Path
) -> None:
    """It reaches no other batch, and its memory is free again."""
    executor = await device.start(plain(tmp_path))
    given_up = await held(device, executor, tmp_path)
    given_up.cancel()
    following = device.submit(executor, row(9))
    (tmp_path / "go").touch()
    result = await asyncio.wait_for(following, LIMIT_S)
    assert result.outputs["y"].tolist() == [[18, 0]]
    result.release()
    assert executor.room == UNDER_WAY


async def test_a_late_answer_of_an_older_generation_is_dropped(
    device: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch that is under way gets its own answer."""
    executor = await device.start(plain(tmp_path))
    assert await answer(device, executor, STALE, 4) == [2 * STALE, 8]
    assert "dropped the answer to a batch that is not under way" in caplog.text


async def test_a_model_that_cannot_be_loaded_says_why(device: Bench, tmp_path: Path) -> None:
    """With what the backend raised and what its driver printed."""
    with pytest.raises(ConfigurationError) as caught:
        await device.start(plain(tmp_path, "Refusing"))
    assert "model m/1: RuntimeError: no device" in caught.value.message
    assert "device 7 is on fire" in caught.value.message


async def test_a_process_that_dies_while_loading_is_an_error(device: Bench, tmp_path: Path) -> None:
    """Not a wait for the limit."""
    with pytest.raises(ConfigurationError) as caught:
        await device.start(plain(tmp_path, "Crashing"))
    assert "was killed by SIGSEGV" in caught.value.message
    assert "about to crash" in caught.value.message


async def test_loading_has_a_limit(device: Bench, tmp_path: Path) -> None:
    """And nothing of the process is left after it."""
    with pytest.raises(ConfigurationError, match=r"was not loaded within 3 s(.|\n)*still comp"):
        await device.start(plain(tmp_path, "Endless"), load_limit_s=3)
    assert not [c for c in psutil.Process().children() if "npufleet_worker.executor" in c.cmdline()]


async def test_closing_finishes_what_is_under_way(device: Bench, tmp_path: Path) -> None:
    """Then the process ends by itself with 0, and nothing more is taken."""
    executor = await device.start(plain(tmp_path))
    first = await held(device, executor, tmp_path)
    second = device.submit(executor, row(2))
    closing = asyncio.create_task(executor.close(limit_s=LIMIT_S))
    await asyncio.sleep(0)
    assert executor.room == 0
    (tmp_path / "go").touch()
    await closing
    assert first.done()
    # Its memory outlives the executor, as long as somebody looks at it.
    assert (await second).outputs["y"].tolist() == [[4, 0]]
    assert await executor.died == 0
    await executor.close()


async def test_a_process_that_does_not_end_is_killed(device: Bench, tmp_path: Path) -> None:
    """After the limit of `close`."""
    executor = await device.start(plain(tmp_path, "Stubborn"))
    await executor.close(limit_s=0.5)
    assert await executor.died == -signal.SIGKILL
    assert not psutil.pid_exists(executor.pid)


async def test_signals_to_the_group_do_not_end_an_executor(device: Bench, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal: the supervisor drains, then closes."""
    executor = await device.start(plain(tmp_path))
    os.kill(executor.pid, signal.SIGINT)
    os.kill(executor.pid, signal.SIGTERM)
    assert await answer(device, executor, 1) == [2]


async def test_rows_beyond_their_block_are_never_sent(device: Bench, tmp_path: Path) -> None:
    """What lies behind a block is somebody else's request."""
    executor = await device.start(plain(tmp_path, batching=Batching(max_batch_size=2)))
    placed = device.place(row(1))
    with pytest.raises(ValueError, match="do not fit"):
        executor.submit([placed], shapes=[(3,)], gear=1)
    with pytest.raises(ValueError, match="do not fit gear"):
        executor.submit([placed, placed], shapes=[(2,)], gear=1)
    assert executor.room == UNDER_WAY


def test_death_and_answers_are_seen_on_uvloop_too(tmp_path: Path) -> None:
    """The loop that workers run on; the other tests use Python's own."""

    async def scenario() -> None:
        async with bench() as device:
            executor = await device.start(plain(tmp_path))
            assert await answer(device, executor, 1, 2) == [2, 4]
            running = await held(device, executor, tmp_path)
            os.kill(executor.pid, signal.SIGKILL)
            with pytest.raises(ExecutorDied, match="was killed by SIGKILL"):
                await asyncio.wait_for(running, LIMIT_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def ended(pid: int) -> bool:
    """Also true for a process that nobody has collected yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


PARENT = """
import asyncio, pathlib, sys
from tests.support.executors import bench, plain
async def main():
    async with bench() as device:
        executor = await device.start(plain(pathlib.Path(sys.argv[1])))
        print(executor.pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


def test_an_executor_dies_with_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    """SIGKILL to the parent: nothing keeps the device."""
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        wait_until(lambda: ended(pid), what="the executor to end")
