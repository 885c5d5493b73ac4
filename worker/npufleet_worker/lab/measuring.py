"""Measures a model on its device: times by gear, and latencies under load in real time.

Knows nothing of which setting is the best one.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from npufleet_worker.backends import SLOTS
from npufleet_worker.batching import Batch, BatchPolicy, Item, gear_for
from npufleet_worker.decoder import Request
from npufleet_worker.device import BatchResult
from npufleet_worker.lab.profile import GearTime, Windows
from npufleet_worker.lab.simulation import (
    HELD_BATCHES,
    TIMER_S,
    Device,
    Load,
    Point,
    point,
    primed,
    take,
)
from npufleet_worker.lab.trial import Trial

_WARM_BATCHES = 4
_LEAST_BATCHES = 5
_LEAST_MS = 1e-4


@dataclass(frozen=True, slots=True)
class Care:
    """How carefully to measure: a window's length, agreement of three, limit per gear."""

    window_s: float = 0.5
    agreement: float = 0.1
    limit_s: float = 15.0


@dataclass(frozen=True, slots=True)
class _Period:
    """From one end to the next, and the executor's part of it."""

    whole_ms: float
    execute_ms: float


async def measure(
    trial: Trial,
    rows: Sequence[Request],
    *,
    care: Care,
    advance: Callable[[str], None] = lambda _text: None,
) -> list[GearTime]:
    """The time of every gear of the trial, warm, with one batch ahead of the one that runs."""
    times = []
    for gear in trial.gears:
        batch = [rows[at % len(rows)] for at in range(gear)]
        times.append(await _measure_gear(trial, batch, care))
        advance(f"batches of {gear}")
    return times


async def _measure_gear(trial: Trial, batch: Sequence[Request], care: Care) -> GearTime:
    windows, settled = Windows(care.agreement), False
    end_s = time.monotonic() + care.limit_s
    async with aclosing(_periods(trial, batch)) as periods:
        for _ in range(_WARM_BATCHES):
            await anext(periods)
        while not settled:
            settled = windows.add(await _window(periods, care.window_s))
            if time.monotonic() > end_s:
                break
    return windows.time(len(batch), settled=settled)


async def _window(periods: AsyncGenerator[_Period, None], window_s: float) -> list[float]:
    """The times of the batches of so many seconds, but never of too few batches.

    A period varies with this process, too, which notices an end late and the next one in time:
    that is no work of the device. So the times vary as the executor saw them, and their mean is
    that of the periods.
    """
    seen: list[_Period] = []
    while sum(one.whole_ms for one in seen) < window_s * 1000 or len(seen) < _LEAST_BATCHES:
        seen.append(await anext(periods))
    around_ms = sum(one.whole_ms - one.execute_ms for one in seen) / len(seen)
    return [max(one.execute_ms + around_ms, _LEAST_MS) for one in seen]


async def _periods(trial: Trial, batch: Sequence[Request]) -> AsyncGenerator[_Period, None]:
    """From the end of one batch to the end of the next, for ever."""
    under_way: deque[asyncio.Future[BatchResult]] = deque()
    last_s: float | None = None
    try:
        while True:
            while trial.room:
                under_way.append(trial.submit(batch, len(batch)))
            result = await trial.answer(under_way.popleft())
            now_s = time.monotonic()
            result.release()
            if last_s is not None:
                yield _Period((now_s - last_s) * 1000, result.execute_ms)
            last_s = now_s
    finally:
        for left in under_way:
            (await trial.answer(left)).release()


async def rehearse(
    trial: Trial, rows: Sequence[Request], policy: BatchPolicy, device: Device, load: Load
) -> Point:
    """One setting in earnest: real time, the batcher, and the executor's process.

    Latency counts from when a request should have come, so that a generator that is late hides
    nothing. The rate is that of the answers. Not `sustained` where the last of them took longer
    than all the arrivals together.
    """
    return await _Rehearsal(trial, rows, policy, device).run(load)


class _Rehearsal:
    """The worker's loop around batcher and executor, for rows that are ready."""

    def __init__(
        self, trial: Trial, rows: Sequence[Request], policy: BatchPolicy, device: Device
    ) -> None:
        self._trial, self._rows, self._policy, self._device = trial, rows, policy, device
        self._waiting: deque[Item[int]] = deque()
        self._under_way = 0
        self._timer: asyncio.TimerHandle | None = None
        self._latencies_s: list[float] = []
        self._ends: list[tuple[float, int]] = []
        self._error: BaseException | None = None
        self._moved = asyncio.Event()

    async def run(self, load: Load) -> Point:
        self._batcher = primed(self._policy, self._device, load.rate)
        gaps = np.random.default_rng(load.seed).exponential(1 / load.rate, load.requests)
        begun_s = time.monotonic()
        arrivals = (begun_s + np.cumsum(gaps)).tolist()
        give_up_s = 2 * arrivals[-1] - begun_s
        coming = 0
        try:
            while coming < len(arrivals):
                now_s = time.monotonic()
                while coming < len(arrivals) and arrivals[coming] <= now_s:
                    self._waiting.append(Item(1, arrivals[coming], None, 1, None, coming))
                    coming += 1
                self._pump()
                self._raise()
                if coming < len(arrivals):
                    await asyncio.sleep(max(0.0, arrivals[coming] - time.monotonic()))
            sustained = await self._drain(len(arrivals), give_up_s)
        finally:
            self._stop_timer()
        latencies_s = self._latencies_s or [time.monotonic() - begun_s]
        mean_batch = len(latencies_s) / max(1, len(self._ends))
        return point(self._rate(), latencies_s, mean_batch, sustained=sustained)

    def _rate(self) -> float:
        """Answers per second between the first batch and the last: without filling and emptying."""
        if len(self._ends) < 2:
            return 0.0
        (first_s, first_rows), (last_s, _) = self._ends[0], self._ends[-1]
        return (len(self._latencies_s) - first_rows) / max(last_s - first_s, 1e-9)

    async def _drain(self, wanted: int, give_up_s: float) -> bool:
        """Wait for the rest, or until it is too late; whether all have come."""
        while len(self._latencies_s) < wanted:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0:
                return False
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), left_s)
            except TimeoutError:
                return False
            self._raise()
        return True

    def _pump(self) -> None:
        self._stop_timer()
        most = HELD_BATCHES * self._policy.max_batch_size
        now_s = time.monotonic()
        take(self._waiting, self._batcher, most, now_s=now_s)
        while self._under_way < SLOTS and self._trial.room:
            batch = self._batcher.pull(now_s, device_free=not self._under_way)
            if batch is None:
                break
            self._launch(batch)
        due_s = self._batcher.due_s(now_s)
        if due_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(due_s - now_s, TIMER_S), self._pump)

    def _launch(self, batch: Batch[int]) -> None:
        gear = gear_for(batch.rows, self._device.gears, self._device.min_batch_size)
        rows = [self._rows[item.payload % len(self._rows)] for item in batch.items]
        self._under_way += 1
        future = self._trial.submit(rows, gear)
        future.add_done_callback(lambda done: self._done(batch, done))

    def _done(self, batch: Batch[int], future: "asyncio.Future[BatchResult]") -> None:
        now_s = time.monotonic()
        self._under_way -= 1
        self._moved.set()
        error = future.exception()
        if error is not None:
            self._error = error
            return
        result = future.result()
        self._batcher.observe(result.gear, result.execute_ms)
        result.release()
        self._pump()
        self._ends.append((now_s, batch.rows))
        self._latencies_s.extend(now_s - item.arrival_s for item in batch.items)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
