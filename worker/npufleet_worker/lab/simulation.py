"""A worker under load, without waiting for it: the real batcher, measured times, Poisson arrivals.

Batches are fed as the worker does it: a full one goes one ahead of the one that runs, a smaller
one when the device is free. Pure and seeded. One executor, requests of one row in one lane. Knows
nothing of Redis, decoding and replies, whose time comes on top.
"""

import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from npufleet_worker.backends import SLOTS
from npufleet_worker.batching import Batch, Batcher, BatchPolicy, Item, gear_for
from npufleet_worker.lab.profile import Profile

_SETTLING = 0.1
"""The part of the requests, from the first on, that does not count: the queue fills up."""

TIMER_S = 0.001
"""A worker looks again no sooner than this, when nothing happens."""

HELD_BATCHES = 4
"""A worker holds about so many batches; what else there is waits in Redis, in order."""


@dataclass(frozen=True, slots=True)
class Device:
    """What runs the batches: its times, and the sizes that it pads to (none: any size).

    `host_rows_per_s` is what the process that feeds it can do, whatever the device could.
    """

    profile: Profile
    gears: tuple[int, ...] = ()
    min_batch_size: int = 1
    host_rows_per_s: float = math.inf

    @property
    def best_rows_per_s(self) -> float:
        """The throughput that nothing beats: of the best gear, or of the host."""
        return min(self.profile.best_rows_per_s, self.host_rows_per_s)


@dataclass(frozen=True, slots=True)
class Load:
    """How much comes: rows per second, how many of them, and the seed of the dice."""

    rate: float
    requests: int
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Point:
    """What a rate (rows per second) led to. Without `sustained`, the queue grew beyond bounds."""

    rate: float
    p50_ms: float
    p99_ms: float
    mean_batch: float
    sustained: bool


OVERLOADED = math.inf


def simulate(policy: BatchPolicy, device: Device, load: Load, *, give_up_ms: float) -> Point:
    """The latencies from arrival to the end of the run, once the queue has settled.

    Ends early, not `sustained`, when a request has waited for `give_up_ms`.
    """
    return _Simulation(policy, device, load).run(give_up_ms / 1000)


@dataclass(slots=True)
class _Running:
    batch: Batch[int]
    run_s: float
    end_s: float = math.inf


@dataclass(slots=True)
class _Seen:
    latencies_s: list[float] = field(default_factory=list)
    batches: int = 0


class _Simulation:
    def __init__(self, policy: BatchPolicy, device: Device, load: Load) -> None:
        self._device, self._load = device, load
        self._dice = random.Random(load.seed)
        gaps = np.random.default_rng(load.seed).exponential(1 / load.rate, load.requests)
        self._arrivals: Sequence[float] = np.cumsum(gaps).tolist()
        self._batcher: Batcher[int] = primed(policy, device, load.rate)
        self._most_held = HELD_BATCHES * policy.max_batch_size
        self._waiting: deque[Item[int]] = deque()
        self._running: deque[_Running] = deque()
        self._timer_s = math.inf
        self._now_s = 0.0
        self._seen = _Seen()

    def run(self, give_up_s: float) -> Point:
        arrivals, coming = self._arrivals, 0
        counted = int(len(arrivals) * _SETTLING)
        while len(self._seen.latencies_s) < len(arrivals):
            arrival_s = arrivals[coming] if coming < len(arrivals) else math.inf
            end_s = self._running[0].end_s if self._running else math.inf
            self._now_s = min(arrival_s, end_s, self._timer_s)
            if end_s == self._now_s:
                self._finish()
                if self._seen.latencies_s[-1] > give_up_s:
                    return self._point(counted, sustained=False)
            elif arrival_s == self._now_s:
                self._waiting.append(Item(1, arrival_s, None, 1, None, coming))
                coming += 1
            take(self._waiting, self._batcher, self._most_held, now_s=self._now_s)
            self._pump()
        return self._point(counted, sustained=True)

    def _finish(self) -> None:
        done = self._running.popleft()
        self._begin()
        self._seen.batches += 1
        self._seen.latencies_s.extend(self._now_s - item.arrival_s for item in done.batch.items)
        self._batcher.observe(_gear(self._device, done.batch.rows), done.run_s * 1000)

    def _pump(self) -> None:
        """What the worker's runner does: all that is due goes, then it sets its timer."""
        while len(self._running) < SLOTS:
            batch = self._batcher.pull(self._now_s, device_free=not self._running)
            if batch is None:
                break
            gear = _gear(self._device, batch.rows)
            run_s = self._device.profile.draw_ms(gear, self._dice) / 1000
            self._running.append(_Running(batch, run_s))
            if len(self._running) == 1:
                self._begin()
        due_s = self._batcher.due_s(self._now_s)
        self._timer_s = math.inf if due_s is None else max(due_s, self._now_s + TIMER_S)

    def _begin(self) -> None:
        if self._running:
            self._running[0].end_s = self._now_s + self._running[0].run_s

    def _point(self, counted: int, *, sustained: bool) -> Point:
        latencies, batches = self._seen.latencies_s, self._seen.batches
        mean_batch = len(latencies) / batches
        return point(
            self._load.rate, latencies[counted:] or latencies, mean_batch, sustained=sustained
        )


def point(
    rate: float, latencies_s: Sequence[float], mean_batch: float, *, sustained: bool
) -> Point:
    """The figures of some latencies."""
    p50, p99 = np.percentile(latencies_s, (50, 99)) * 1000
    return Point(rate, float(p50), float(p99), mean_batch, sustained)


def primed(policy: BatchPolicy, device: Device, rate: float) -> Batcher[int]:
    """A batcher that knows the rate and the times already, as one that has served for a while."""
    batcher: Batcher[int] = Batcher(policy)
    for time in device.profile.times:
        batcher.observe(time.gear, time.mean_ms)
    left = math.ceil(rate)  # its measure is the rows of the last second
    most = policy.max_batch_size
    for rows in itertools.chain(itertools.repeat(most, left // most), (left % most,)):
        if rows:
            batcher.add(Item(rows, 0.0, None, 1, None, 0), 0.0)
            batcher.drop(lambda _item: True)
    return batcher


def take(waiting: deque[Item[int]], batcher: Batcher[int], most: int, *, now_s: float) -> None:
    """Fill the batcher with what has waited for longest, up to `most` rows."""
    while waiting and batcher.rows < most:
        batcher.add(waiting.popleft(), now_s)


def _gear(device: Device, rows: int) -> int:
    return gear_for(rows, device.gears, device.min_batch_size)
