"""Entries that this worker holds, from the moment they are taken until their reply is stored.

Knows nothing of Redis calls, batches or devices.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from npufleet import wire
from npufleet.errors import NpufleetError
from npufleet.wire import Entry


@dataclass(slots=True, eq=False)
class Held:
    """One entry. `lane` is 1, 2 or 3 for high, normal, low; times are monotonic seconds.

    `entry` is None for one that cannot be read: `fault` says why, and it is answered under
    `usable_id`, or under its stream id if it has none. `suspicions` counts the executors that died
    while they ran it.
    """

    lane: int
    entry_id: bytes
    deliveries: int
    arrival_s: float
    taken_s: float
    cancelled: bool = False
    entry: Entry | None = None
    fault: NpufleetError | None = None
    usable_id: str | None = None
    suspicions: int = 0
    lost: bool = field(default=False)

    @property
    def key(self) -> tuple[int, bytes]:
        """What tells it apart here: two lanes may have given the same id in one millisecond."""
        return self.lane, self.entry_id

    @property
    def wire_id(self) -> str:
        """What the reply key is named after."""
        return self.entry.id if self.entry else self.usable_id or self.entry_id.decode()

    @property
    def deadline_s(self) -> float | None:
        if self.entry is None or self.entry.timeout_ms is None:
            return None
        return self.arrival_s + self.entry.timeout_ms / 1000


@dataclass(slots=True)
class Arrival:
    """An entry as the server gave it: flat field-value list, delivery count, cancel mark."""

    lane: int
    entry_id: bytes
    deliveries: int
    cancelled: bool
    fields: Sequence[bytes]


def hold(arrival: Arrival, *, body_prefix: str, arrival_s: float, now_s: float) -> Held:
    """The held entry, read as far as it can be; an unreadable one carries its fault."""
    held = Held(
        lane=arrival.lane,
        entry_id=arrival.entry_id,
        deliveries=arrival.deliveries,
        arrival_s=arrival_s,
        taken_s=now_s,
        cancelled=arrival.cancelled,
    )
    try:
        held.entry = wire.parse_entry(arrival.fields, body_prefix=body_prefix)
    except NpufleetError as fault:
        held.fault = fault
        held.usable_id = wire.usable_id(arrival.fields)
    return held


class Ledger:
    """All that is held, counted in rows: an entry counts as one until its rows are known.

    `room` is set whenever something has left.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, bytes], int] = {}
        self._held: dict[tuple[int, bytes], Held] = {}
        self.rows = 0
        self.room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def find(self, key: tuple[int, bytes]) -> Held | None:
        return self._held.get(key)

    def all(self) -> list[Held]:
        return list(self._held.values())

    def add(self, held: Held) -> None:
        self._held[held.key] = held
        self._count(held, 1)

    def resize(self, held: Held, rows: int) -> None:
        """The entry's rows are known now."""
        self._count(held, rows)

    def settle(self, held: Held) -> None:
        """Its outcome is known: it takes no more room, but is held until that is published."""
        self._count(held, 0)
        self.room.set()

    def remove(self, held: Held) -> None:
        """Nothing of it is left to do."""
        self._count(held, 0)
        self._rows.pop(held.key, None)
        self._held.pop(held.key, None)
        self.room.set()

    def _count(self, held: Held, rows: int) -> None:
        self.rows += rows - self._rows.get(held.key, 0)
        self._rows[held.key] = rows
