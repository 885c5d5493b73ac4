"""Which batching settings serve the most rows within a latency bound. Pure; runs simulations.

The rates that are tried are steps of the best throughput, so that settings can be compared. Knows
nothing of files, processes or tables.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from npufleet_worker.batching import BatchPolicy
from npufleet_worker.lab.simulation import OVERLOADED, Device, Load, Point, simulate

STEPS = 20
"""Rates are tried at 1/20, 2/20, … of the best throughput, the last below all of it."""

WAITS_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)

_FULL = 0.98
"""A device that should be busy for more of its time is overloaded: the queue would never end."""
_GIVE_UP = 4
_AS_GOOD = 1.05


@dataclass(frozen=True, slots=True)
class Goal:
    """p99 from arrival to the end of the run, in milliseconds, and the size of a simulation."""

    p99_ms: float
    requests: int = 4000
    seed: int = 1

    def met(self, point: Point) -> bool:
        return point.sustained and point.p99_ms <= self.p99_ms


@dataclass(frozen=True, slots=True)
class Verdict:
    """A setting and the rates that were tried, ascending.

    `best` is the largest rate up to which the goal was met, None where it was not at the lowest;
    `capacity` the rows per second of a device that is always busy.
    """

    policy: BatchPolicy
    points: tuple[Point, ...]
    best: Point | None
    capacity: float


@dataclass(frozen=True, slots=True)
class Choice:
    """All settings that were tried, and the one to take: None where none meets the goal."""

    verdicts: tuple[Verdict, ...]
    chosen: Verdict | None

    @property
    def nearest(self) -> Verdict:
        """The setting with the smallest p99 at the lowest rate: what is within reach at best."""
        return min(self.verdicts, key=lambda verdict: verdict.points[0].p99_ms)

    def best_of_sizes(self) -> list[Verdict]:
        """Of each max_batch_size the best setting, smallest first."""
        sizes = sorted({verdict.policy.max_batch_size for verdict in self.verdicts})
        return [
            preferred([v for v in self.verdicts if v.policy.max_batch_size == size])
            or next(v for v in self.verdicts if v.policy.max_batch_size == size)
            for size in sizes
        ]


def candidates(sizes: Sequence[int], goal: Goal, *, adaptive: bool) -> list[BatchPolicy]:
    """Every size with every wait that leaves room within the goal."""
    waits = [wait for wait in WAITS_MS if wait < goal.p99_ms]
    return [BatchPolicy(size, wait, adaptive=adaptive) for size in sizes for wait in waits]


def sweep(
    device: Device,
    policies: Sequence[BatchPolicy],
    goal: Goal,
    *,
    advance: Callable[[str], None] = lambda _text: None,
) -> Choice:
    """Every policy at the rates that it takes to find its best one; `advance` after each."""
    verdicts = []
    for policy in policies:
        verdicts.append(_judge(device, policy, goal))
        advance(f"max_batch_size {policy.max_batch_size}, max_wait_ms {policy.max_wait_ms:g}")
    return Choice(tuple(verdicts), preferred(verdicts))


def curve(device: Device, policy: BatchPolicy, goal: Goal) -> Iterator[Point]:
    """One setting at every rate up to the first that it cannot sustain."""
    for step in range(1, STEPS):
        tried = _try(device, policy, goal, step)
        if not tried.sustained:
            return
        yield tried


def preferred(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The one with the largest rate.

    Of equals that are about as quick, the one with the most throughput for the hour in which the
    bound is broken anyway; then the smallest settings.
    """
    good = [(verdict, verdict.best) for verdict in verdicts if verdict.best is not None]
    if not good:
        return None
    rate = max(best.rate for _, best in good)
    equal = [(verdict, best) for verdict, best in good if best.rate == rate]
    quickest_ms = min(best.p99_ms for _, best in equal)
    as_good = [verdict for verdict, best in equal if best.p99_ms <= quickest_ms * _AS_GOOD]
    return min(as_good, key=lambda v: (-v.capacity, v.policy.max_batch_size, v.policy.max_wait_ms))


def _judge(device: Device, policy: BatchPolicy, goal: Goal) -> Verdict:
    """Halves the rates: p99 grows with the rate, but where a row alone waits out its time.

    So the lowest rate comes first: a goal that is missed there is missed in quiet hours.
    """
    tried = {1: _try(device, policy, goal, 1)}
    good, bad = 1, STEPS
    while goal.met(tried[1]) and bad - good > 1:
        middle = (good + bad) // 2
        tried[middle] = _try(device, policy, goal, middle)
        if goal.met(tried[middle]):
            good = middle
        else:
            bad = middle
    best = tried[good] if goal.met(tried[good]) else None
    points = tuple(tried[step] for step in sorted(tried))
    return Verdict(policy, points, best, device.profile.capacity(policy.max_batch_size))


def _try(device: Device, policy: BatchPolicy, goal: Goal, step: int) -> Point:
    profile = device.profile
    rate = device.best_rows_per_s * step / STEPS
    if rate > _FULL * profile.capacity(policy.max_batch_size):
        return Point(rate, OVERLOADED, OVERLOADED, float(policy.max_batch_size), sustained=False)
    load = Load(rate, goal.requests, goal.seed)
    # What waits for far longer than allowed will not be helped by more of it.
    longest_ms = max(goal.p99_ms, profile.mean_ms(policy.max_batch_size))
    return simulate(policy, device, load, give_up_ms=_GIVE_UP * longest_ms)
