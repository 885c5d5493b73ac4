"""When a batch goes and what is in it. Pure: the clock (monotonic seconds) is always passed in.

A full batch is due at once. A smaller one stays open, growing, until the device is free, and is due
then when its oldest row has waited `max_wait_ms` since it arrived, when a deadline would otherwise
be missed, or, under an adaptive policy, when waiting for the next row does not pay.

Waiting pays while what it costs is less than what it saves: going now makes the next row wait for
a whole run, staying makes all rows that are here, and that one, wait until it comes. So a batch of
n rows stays open while (n + 1) * expected wait < run time (with the overhead of a batch, which for
small models is the larger part), and no longer than twice that wait after the last sign of life.
The expected wait is measured: from the rate of arrivals, or from the rows in decode and how long
decoding takes.

Callers that ask again as soon as they are answered would split into halves that take turns, each
paying for a whole batch. So where most rows of a batch are known to be followed by new ones at
once, the next batch waits for those: for a quarter of what a batch costs whatever its rows, within
`max_wait_ms` like everything. Knows nothing of requests, tensors, devices or Redis.
"""

import bisect
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, Literal, TypeVar

from npufleet_worker.forecast import ECHO_PART, SMOOTHING, Arrivals, Echo, RunTimes

Payload = TypeVar("Payload")

LANES = 3

GearChoice = Literal["upper", "lower", "nearest"]

SHARE = 0.05
"""Of the rows that go, the part that each lane below the highest gets when it has rows waiting."""

_LAUNCH_S = 0.002
"""The least that handing over and answering take on top of the run, when a deadline is near."""
_EPSILON_S = 1e-6
"""Timers fire this much early, and must still find the batch due."""

_by_arrival = attrgetter("arrival_s")


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Sizes in rows. Without `adaptive`, a batch that is not full always waits its time.

    The ascending `gears` of at least `min_batch_size` matter where `gear_choice` is not "upper".
    """

    max_batch_size: int
    max_wait_ms: float
    adaptive: bool = True
    gears: tuple[int, ...] = ()
    min_batch_size: int = 1
    gear_choice: GearChoice = "upper"


@dataclass(frozen=True, slots=True, eq=False)
class Item(Generic[Payload]):
    """One request: `rows` of at most max_batch_size, `lane` 0 (high) to 2 (low).

    Times are monotonic seconds; the arrival may be long past. Only items of equal `key` (version,
    inputs, dtypes, row shapes) share a batch.
    """

    rows: int
    arrival_s: float
    deadline_s: float | None
    lane: int
    key: Hashable
    payload: Payload


@dataclass(frozen=True, slots=True)
class Batch(Generic[Payload]):
    """Items of one key, in the order of their rows."""

    items: tuple[Item[Payload], ...]
    rows: int
    key: Hashable


def gear_for(rows: int, gears: Sequence[int], min_batch_size: int = 1) -> int:
    """The rows to run: the smallest of the ascending gears that holds both, or their maximum."""
    wanted = max(rows, min_batch_size)
    return next((gear for gear in gears if gear >= wanted), wanted)


def rows_to_take(
    waiting: int, gears: Sequence[int], choice: GearChoice, min_batch_size: int = 1
) -> int:
    """How many of the rows that wait should go now, the others being for the next batch.

    All of them, padded, under "upper"; as many as fill the largest gear that they can under
    "lower"; under "nearest" that where fewer rows stay behind than there would be padding. All of
    them where they fill no gear.
    """
    lower = max((gear for gear in gears if min_batch_size <= gear <= waiting), default=waiting)
    padding = gear_for(waiting, gears, min_batch_size) - waiting
    if choice == "upper" or (choice == "nearest" and padding <= waiting - lower):
        return waiting
    return lower


class Batcher(Generic[Payload]):
    """The requests that wait for a batch, of one model."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._groups: dict[Hashable, _Group[Payload]] = {}
        self._arrivals = Arrivals()
        self._runs = RunTimes()
        self._echo = Echo()
        self._overhead_s = 0.0
        self._owed = [0.0] * LANES
        self.rows = 0

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def add(self, item: Item[Payload], now_s: float) -> None:
        """Take an item; ValueError for one that no batch can hold."""
        if not 1 <= item.rows <= self._policy.max_batch_size:
            raise ValueError(f"{item.rows} rows never fit {self._policy}")
        self._groups.setdefault(item.key, _Group(item.key)).add(item)
        self.rows += item.rows
        self._arrivals.came(item.rows, now_s)
        self._echo.came(item.rows, now_s)

    def answered(self, rows: int, now_s: float) -> None:
        """The callers of that many rows are being answered, and may come again."""
        within_s = ECHO_PART * (self._runs.fixed_s() + self._overhead_s)
        self._echo.answered(rows, now_s, within_s=within_s)

    def expect(self, now_s: float) -> None:
        """A request is being decoded: it counts as about to come."""
        self._arrivals.expect(now_s)

    def unexpect(self, now_s: float) -> None:
        """One that was expected has been added, or will not come."""
        self._arrivals.unexpect(now_s)

    def observe(self, rows: int, execute_ms: float, *, overhead_ms: float | None = None) -> None:
        """A batch of that many rows (padding included) ran for so long.

        `overhead_ms` is what handing it over and hearing of its end took on top; None where the
        executor was not idle, so that waiting for it would count as well.
        """
        self._runs.observe(rows, execute_ms / 1000)
        if overhead_ms is not None:
            self._overhead_s += SMOOTHING * (max(overhead_ms, 0.0) / 1000 - self._overhead_s)

    def pull(self, now_s: float, *, device_free: bool) -> Batch[Payload] | None:
        """The batch to hand over now, if any: a full one, or one that is due on a free device.

        Call it again until it gives None.
        """
        due = [
            group
            for group in self._groups.values()
            if self._full(group) or (device_free and self._due_s(group) <= now_s + _EPSILON_S)
        ]
        if not due:
            return None
        first = self._first_lanes(due)
        group = min(due, key=lambda group: group.urgency(first))
        return self._take(group, first)

    def due_s(self, now_s: float) -> float | None:
        """When, in the future, a batch becomes due on a free device, if nothing else happens.

        Ask it for the very `now_s` for which `pull` gave None: for a later one, what became due in
        between is neither pulled nor announced.

        None where there is nothing to wait for but events: an arrival, or a device for what is
        due already.
        """
        times = [self._due_s(group) for group in self._groups.values() if not self._full(group)]
        return min((time for time in times if time > now_s + _EPSILON_S), default=None)

    def drop(self, predicate: Callable[[Item[Payload]], bool]) -> list[Item[Payload]]:
        """Take out the items for which the predicate holds (expired, cancelled)."""
        dropped = [item for group in self._groups.values() for item in group if predicate(item)]
        gone = set(map(id, dropped))
        for group in list(self._groups.values()):
            self._remove(group, gone)
        self.rows -= sum(item.rows for item in dropped)
        return dropped

    def _full(self, group: "_Group[Payload]") -> bool:
        return group.rows >= self._policy.max_batch_size

    def _due_s(self, group: "_Group[Payload]") -> float:
        """When a batch that is not full should go."""
        due_s = group.oldest_s + self._policy.max_wait_ms / 1000
        run_s = self._runs.expected_s(group.rows)
        due_s = min(due_s, group.deadline_s - run_s - max(_LAUNCH_S, self._overhead_s))
        if self._policy.adaptive:
            # What a row misses that does not come along is a whole batch, overhead and all.
            cost_s = run_s + self._overhead_s
            worth_s = max(
                self._arrivals.worth_waiting_until_s(group.rows, cost_s),
                self._echo.worth_waiting_until_s(),
            )
            due_s = min(due_s, worth_s)
        return due_s

    def _first_lanes(self, due: Sequence["_Group[Payload]"]) -> tuple[int, ...]:
        """The lanes in the order of service: those that are owed rows come first."""
        waiting = {lane for group in due for lane in range(LANES) if group.lanes[lane]}
        owed = [lane for lane in range(1, LANES) if lane in waiting and self._owed[lane] >= 1]
        return (*owed, *(lane for lane in range(LANES) if lane not in owed))

    def _take(self, group: "_Group[Payload]", lanes: Sequence[int]) -> Batch[Payload]:
        taken: list[Item[Payload]] = []
        # An owed lane gets its first item in, and then waits for its turn like the others.
        heads = [
            group.lanes[lane][0] for lane in lanes if self._owed[lane] >= 1 and group.lanes[lane]
        ]
        order = (*heads, *group)
        most = room = max(self._wanted(group), order[0].rows)  # whose turn it is goes in any case
        seen: set[int] = set()
        for item in order:
            if item.rows <= room and id(item) not in seen:
                seen.add(id(item))
                taken.append(item)
                room -= item.rows
            if not room:
                break
        self._remove(group, seen)
        rows = most - room
        self.rows -= rows
        self._account(taken)
        return Batch(tuple(taken), rows, group.key)

    def _wanted(self, group: "_Group[Payload]") -> int:
        policy = self._policy
        most = min(group.rows, policy.max_batch_size)
        return rows_to_take(most, policy.gears, policy.gear_choice, policy.min_batch_size)

    def _remove(self, group: "_Group[Payload]", gone: set[int]) -> None:
        group.remove(gone)
        if not group:
            del self._groups[group.key]

    def _account(self, taken: Sequence[Item[Payload]]) -> None:
        """Each lower lane that still waits is owed its share of what went before it."""
        for lane in range(1, LANES):
            if not any(group.lanes[lane] for group in self._groups.values()):
                self._owed[lane] = 0.0
                continue
            before = sum(item.rows for item in taken if item.lane < lane)
            served = sum(item.rows for item in taken if item.lane == lane)
            self._owed[lane] += SHARE * before - served
            self._owed[lane] = max(self._owed[lane], -float(self._policy.max_batch_size))


class _Group(Generic[Payload]):
    """The items of one key, per lane in the order of arrival."""

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.lanes: tuple[list[Item[Payload]], ...] = tuple([] for _ in range(LANES))
        self.rows = 0
        self.oldest_s = math.inf
        self.deadline_s = math.inf

    def __len__(self) -> int:
        return sum(map(len, self.lanes))

    def __iter__(self) -> Iterator[Item[Payload]]:
        return (item for lane in self.lanes for item in lane)

    def add(self, item: Item[Payload]) -> None:
        bisect.insort(self.lanes[item.lane], item, key=_by_arrival)
        self._count(item)

    def remove(self, gone: set[int]) -> None:
        """Take out the items of these identities."""
        for lane in self.lanes:
            lane[:] = [item for item in lane if id(item) not in gone]
        self.rows, self.oldest_s, self.deadline_s = 0, math.inf, math.inf
        for item in self:
            self._count(item)

    def urgency(self, lanes: Sequence[int]) -> tuple[int, float]:
        """Sorts first what is in the first of these lanes, and of that the oldest."""
        return min(
            (place, self.lanes[lane][0].arrival_s)
            for place, lane in enumerate(lanes)
            if self.lanes[lane]
        )

    def _count(self, item: Item[Payload]) -> None:
        self.rows += item.rows
        self.oldest_s = min(self.oldest_s, item.arrival_s)
        if item.deadline_s is not None:
            self.deadline_s = min(self.deadline_s, item.deadline_s)
