"""The runner with an invented device and clock: whatever happens, each request ends once."""

import asyncio
import selectors
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npufleet import wire
from npufleet.errors import ModelFailed
from npufleet.tensors import Array
from npufleet_worker import runner as runner_module
from npufleet_worker.arena import Arena
from npufleet_worker.batching import GearChoice
from npufleet_worker.decoder import Request
from npufleet_worker.device import REGIONS, BatchResult, ExecutorDied, Placed
from npufleet_worker.held import Held
from npufleet_worker.intake import Work
from npufleet_worker.metrics import Metrics
from npufleet_worker.repository import Batching, ExecutorSpec, ModelConfig
from npufleet_worker.runner import RunLimits, Runner

BATCH, SLOTS = 8, 2
WINDOW_MS = 10.0
SLACK_S = 0.0011
"""The runner's timers go no finer than a millisecond."""

OK, FAIL, DIE = range(3)


class Leap(selectors.DefaultSelector):
    """Where a loop would wait, it leaps: time is what has been waited for."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is left to happen, and something is waited for"
        self.now_s += timeout
        return super().select(0)


@dataclass(frozen=True)
class Asked:
    """`after_ms` the one before it; `width` is the length of its rows."""

    after_ms: float
    rows: int
    lane: int
    width: int
    does: int
    timeout_ms: int | None
    cancelled_ms: float | None


@dataclass(frozen=True)
class Plan:
    asked: list[Asked]
    instances: int
    run_ms: float
    kills_ms: list[float]
    choice: GearChoice
    adaptive: bool


@dataclass
class World:
    """What the devices see and the runner says; requests by the number in all of their elements."""

    plan: Plan
    arena: Arena
    devices: list["Device"] = field(default_factory=list)
    works: dict[int, Work] = field(default_factory=dict)
    waiting: dict[int, float] = field(default_factory=dict)
    answers: dict[int, Array] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    faults: list[Any] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, number: int) -> None:
        assert number not in self.answers
        assert number not in self.errors
        self.waiting.pop(number, None)
        for block in self.works[number].request.placed.blocks:
            self.arena.free(block)
        if len(self.answers) + len(self.errors) + 1 == len(self.plan.asked):
            self.over.set()


class Device:
    """An executor that runs what its rows say, a batch after the other."""

    gears = ()
    inputs = outputs = ()

    def __init__(self, world: World) -> None:
        self._world, self._loop = world, asyncio.get_running_loop()
        self.execute_ms = {1: world.plan.run_ms / 2, BATCH: world.plan.run_ms}
        self.died: asyncio.Future[int] = self._loop.create_future()
        self._batches: deque[tuple[Any, asyncio.Future[Any]]] = deque()
        self._regions, self._idle_since_s = REGIONS, self._loop.time()
        world.devices.append(self)

    @property
    def room(self) -> int:
        return 0 if self.died.done() else min(SLOTS - len(self._batches), self._regions)

    @property
    def outstanding(self) -> int:
        return len(self._batches)

    def submit(self, requests: list[Placed], *, shapes: Any, gear: int) -> Any:
        assert self.room
        assert 1 <= sum(placed.rows for placed in requests) <= gear <= BATCH
        if not self._batches:
            self._check_patience()
        batch = requests, shapes[0], gear
        for rows in self._rows(batch):
            self._world.waiting.pop(int(rows[0, 0]), None)
        future = self._loop.create_future()
        self._batches.append((batch, future))
        self._regions -= 1
        if len(self._batches) == 1:
            self._begin()
        return future

    def kill(self) -> None:
        if self.died.done():
            return
        batches, self._batches = self._batches, deque()
        for at, (_, future) in enumerate(batches):
            future.set_exception(ExecutorDied("it ended", exit_code=-9, running=at == 0, said=""))
        self.died.set_result(-9)

    async def close(self, *, limit_s: float = 0.0) -> None:
        self.kill()

    def _rows(self, batch: Any) -> list[Array]:
        """What lies in the arena now: of requests that have not ended, each in its shape."""
        requests, (width,), _ = batch
        found = []
        for placed in requests:
            (block,) = placed.blocks
            assert block.nbytes == placed.rows * width * 4
            rows = self._world.arena.array(block, np.float32, (placed.rows, width)).copy()
            number = int(rows[0, 0])
            assert (rows[:, 0] == number).all()
            assert self._world.plan.asked[number].width == width
            assert number not in self._world.answers
            assert number not in self._world.errors
            found.append(rows)
        return found

    def _check_patience(self) -> None:
        """Nobody may have waited beyond the window while this device was free."""
        now_s = self._loop.time()
        for came_s in self._world.waiting.values():
            held_s = now_s - max(came_s, self._idle_since_s)
            assert held_s <= WINDOW_MS / 1000 + SLACK_S

    def _begin(self) -> None:
        batch, future = self._batches[0]
        self._loop.call_later(self._world.plan.run_ms / 1000, self._end, batch, future)

    def _end(self, batch: Any, future: "asyncio.Future[Any]") -> None:
        if future.done():
            return
        rows, gear = self._rows(batch), batch[2]
        does = {self._world.plan.asked[int(part[0, 0])].does for part in rows}
        if DIE in does:
            self.kill()
            return
        self._batches.popleft()
        self._idle_since_s = self._loop.time()
        if FAIL in does:
            self._free()
            future.set_exception(ModelFailed("no such luck"))
        else:
            y = 2 * np.concatenate(rows)
            future.set_result(
                BatchResult(
                    {"y": y}, execute_ms=self._world.plan.run_ms, gear=gear, free=self._free
                )
            )
        if self._batches:
            self._begin()

    def _free(self) -> None:
        self._regions += 1


class Notes:
    """Instead of `Answers`: the arrays themselves."""

    def success(self, held: Held, outputs: Any, *, decoded_s: float, ran: Any) -> Any:
        assert 0 <= ran.position < ran.batch_rows <= ran.gear
        return outputs["y"].copy()


def work_of(world: World, number: int, asked: Asked, now_s: float) -> Work:
    x = np.full((asked.rows, asked.width), number, np.float32)
    x[:, 1] = np.arange(asked.rows)
    block = world.arena.allocate(x.nbytes)
    assert block is not None
    np.copyto(world.arena.array(block, np.float32, x.shape), x)
    held = Held(asked.lane, f"{number}-0".encode(), 1, now_s, now_s)
    held.entry = wire.Entry(id=str(number), body=b"", timeout_ms=asked.timeout_ms)
    request = Request(wire.Body({}), Placed(asked.rows, (block,)), ((asked.width,),))
    return Work(held, request, now_s)


def config_of(plan: Plan) -> ModelConfig:
    batching = Batching(
        max_batch_size=BATCH,
        max_wait_ms=WINDOW_MS,
        gears=(1, 3, 4, 8),
        gear_choice=plan.choice,
        policy="adaptive" if plan.adaptive else "window",
    )
    return ModelConfig(
        "m", 1, Path("m"), batching=batching, executor=ExecutorSpec(instances=plan.instances)
    )


async def play(world: World, patch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    async def start(*_: Any) -> Device:
        return Device(world)

    def finish(work: Work, y: Any) -> None:
        world.end(int(work.held.wire_id))
        world.answers[int(work.held.wire_id)] = y

    def fail(work: Work, error: Any) -> None:
        world.end(int(work.held.wire_id))
        world.errors[int(work.held.wire_id)] = error.code

    patch.setattr(runner_module, "Executor", SimpleNamespace(start=start))
    patch.setattr(runner_module, "time", SimpleNamespace(monotonic=loop.time))
    runner = Runner(
        config_of(world.plan),
        world.arena,
        limits=RunLimits(batch_timeout_s=60, max_suspicions=3, max_deliveries=3),
        metrics=Metrics(),
        finish=finish,
        fail=fail,
    )
    await runner.start()
    notes: Any = Notes()
    runner.ready(notes)
    keeping = asyncio.create_task(runner.keep())
    for kill_ms in world.plan.kills_ms:
        loop.call_later(kill_ms / 1000, lambda: world.devices[-1].kill())
    for number, asked in enumerate(world.plan.asked):
        await asyncio.sleep(asked.after_ms / 1000)
        work = world.works[number] = work_of(world, number, asked, loop.time())
        world.waiting[number] = loop.time()
        if asked.cancelled_ms is not None:
            loop.call_later(asked.cancelled_ms / 1000, setattr, work.held, "cancelled", True)
        runner.add(work)
    await asyncio.wait_for(world.over.wait(), 3600)
    await runner.stop()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await runner.close()


ASKED = st.builds(
    Asked,
    after_ms=st.sampled_from([0.0, 0.0, 0.0, 0.4, 3.0, 25.0]),
    rows=st.sampled_from([1, 1, 1, 2, 3, 8, 9, 21]),
    lane=st.integers(1, 3),
    width=st.sampled_from([2, 3]),
    does=st.sampled_from([OK] * 12 + [FAIL, DIE]),
    timeout_ms=st.sampled_from([None, None, None, 5, 60]),
    cancelled_ms=st.sampled_from([None, None, None, None, 0.0, 4.0, 40.0]),
)
PLANS = st.builds(
    Plan,
    asked=st.lists(ASKED, min_size=1, max_size=40),
    instances=st.integers(1, 2),
    run_ms=st.sampled_from([0.1, 4.0, 30.0, 200.0]),
    kills_ms=st.lists(st.floats(0, 200), max_size=2),
    choice=st.sampled_from(["upper", "lower", "nearest"]),
    adaptive=st.booleans(),
)


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 20)
    yield arena
    arena.close()


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def played(plan: Plan, arena: Arena, patch: pytest.MonkeyPatch) -> World:
    """The world once all of the plan's requests have ended."""
    world, clock = World(plan, arena), Leap()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now_s  # type: ignore[method-assign]  # as its selector leaps
    loop.set_exception_handler(lambda _, context: world.faults.append(context))
    try:
        loop.run_until_complete(play(world, patch))
    finally:
        loop.close()
        assert not world.faults
    assert world.arena.free_bytes == world.arena.size_bytes
    return world


@pytest.mark.parametrize("guilty", range(BATCH))
def test_who_kills_its_executor_is_buried_alone_however_full_the_batch(
    arena: Arena, patch: pytest.MonkeyPatch, guilty: int
) -> None:
    """Nobody is buried for a death that another one may have caused."""
    asked = [
        Asked(0.0, 1, 2, 2, DIE if number == guilty else OK, None, None) for number in range(BATCH)
    ]
    world = played(Plan(asked, 1, 4.0, [], "upper", adaptive=True), arena, patch)
    assert world.errors == {guilty: "model_failed"}
    # Three deaths, and one that serves on, unless the third death has ended the last request.
    assert len(world.devices) in (3, 4)


@settings(max_examples=300)
@given(PLANS)
def test_each_request_ends_once_and_with_what_is_its_own(
    arena: Arena, patch: pytest.MonkeyPatch, plan: Plan
) -> None:
    """Under arrivals, cancels, deadlines, failures and deaths of any kind and order.

    None is lost or answered twice, none gets a neighbour's row or shares a batch with another
    shape, none pays for a neighbour, and none is held past its window while a device is free.
    """
    world = played(plan, arena, patch)
    for number, asked in enumerate(plan.asked):
        if number in world.answers:
            assert asked.does == OK
            wanted = np.full((asked.rows, asked.width), 2 * number, np.float32)
            wanted[:, 1] = 2 * np.arange(asked.rows)
            np.testing.assert_array_equal(world.answers[number], wanted)
            continue
        allowed = {
            "cancelled": asked.cancelled_ms is not None,
            "deadline_exceeded": asked.timeout_ms is not None,
            "model_failed": asked.does != OK
            or (bool(plan.kills_ms) and world.works[number].held.suspicions >= 3),
        }
        assert allowed[world.errors[number]], (asked, world.errors[number])
