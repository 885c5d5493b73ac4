"""Takes entries off the lanes of one model, and keeps the group that this needs.

`take` never blocks; `wait` blocks on a connection of its own, and is for when the lanes were found
empty. Knows nothing of what the entries say.
"""

import contextlib
import logging
import time
from collections.abc import Sequence

from npufleet import wire
from npufleet.connection import Connection, Link, ReplyError
from npufleet.endpoint import Endpoint
from npufleet.errors import NpufleetError
from npufleet.keys import GROUP, LANES, RETURNED, ModelKeys
from npufleet.scripts import CLAIM, TAKE
from npufleet_worker.clock import ServerClock
from npufleet_worker.held import Arrival

log = logging.getLogger(__name__)

LOW_SHARE = 0.05
"""What low is guaranteed of everything taken, so that it never starves."""

_BLOCK_S = 2.0
_LOW = 3
_CLAIM_MOST = 32
_FRESH_S = 0.1
"""An entry read sooner than this after it was added has not been cancelled in between."""


class LowShare:
    """Decides in which order the lanes are asked: low comes first for its guaranteed share."""

    def __init__(self, share: float = LOW_SHARE) -> None:
        self._share = share
        self._credit = 0.0

    def order(self, room: int) -> list[int]:
        """Pairs (lane, cap), flat, as the take script wants them."""
        due = min(int(self._credit), room)
        first = [_LOW, due] if due else []
        return [*first, 1, room, 2, room, _LOW, room]

    def took(self, lanes: Sequence[int]) -> None:
        """Take note of the lanes that the entries came from."""
        low = sum(1 for lane in lanes if lane == _LOW)
        earned = self._share * len(lanes)
        self._credit = max(0.0, min(self._credit + earned - low, 8.0))


class Lanes:
    """The lanes of one model, for one consumer."""

    def __init__(
        self, link: Link, endpoint: Endpoint, keys: ModelKeys, consumer: str, clock: ServerClock
    ) -> None:
        self._link = link
        self._keys = keys
        self._consumer = consumer
        self._clock = clock
        self._share = LowShare()
        self._cursors = dict.fromkeys(keys.lanes, "-")
        self._client_id: int | None = None
        self._blocking = Link(
            endpoint,
            name=f"{consumer}-{keys.model}",
            timeout_s=_BLOCK_S + 8,
            on_connect=self._note_client_id,
        )

    async def start(self) -> None:
        await self.ensure_group()
        await self._blocking.start()

    async def close(self) -> None:
        await self._blocking.close()

    async def ensure_group(self) -> None:
        """Creates the group where it is missing, from the very first entry on."""
        answers = await self._link.execute(
            [("XGROUP", "CREATE", lane, GROUP, "0", "MKSTREAM") for lane in self._keys.lanes]
        )
        for answer in answers:
            if isinstance(answer, ReplyError) and not str(answer).startswith("BUSYGROUP"):
                raise answer

    async def take(self, room: int) -> list[Arrival]:
        """Up to `room` entries that are there now: high, normal, low, and low's share first."""
        answer = await self._link.run(
            TAKE,
            [*self._keys.lanes, self._keys.cancelled],
            [GROUP, self._consumer, RETURNED, room, *self._share.order(room)],
        )
        server_ms, missing, rows = answer
        self._clock.observe(server_ms, now_s=time.monotonic())
        if missing:
            await self._restore([LANES[lane - 1] for lane in missing])
        self._share.took([row[0] for row in rows])
        return [Arrival(row[0], row[1], row[2], bool(row[3]), row[4]) for row in rows]

    async def wait(self, most: int) -> list[Arrival]:
        """What comes first, up to `most` entries a lane, or nothing after two seconds."""
        try:
            found = await self._blocking.call(
                *("XREADGROUP", "GROUP", GROUP, self._consumer, "COUNT", most),
                *("BLOCK", int(_BLOCK_S * 1000)),
                *("STREAMS", *self._keys.lanes, ">", ">", ">"),
            )
        except ReplyError as error:
            if str(error).startswith("UNBLOCKED"):
                return []
            if not str(error).startswith("NOGROUP"):
                raise
            await self._group_lost(list(LANES))
            return []
        lanes = {lane.encode(): at for at, lane in enumerate(self._keys.lanes, 1)}
        arrivals = [
            Arrival(lanes[stream], entry_id, 1, False, fields)
            for stream, entries in found or []
            for entry_id, fields in entries
        ]
        now_s = time.monotonic()
        waited = [
            a for a in arrivals if now_s - self._clock.arrival_s(a.entry_id, now_s=now_s) > _FRESH_S
        ]
        await self._mark(waited)
        return arrivals

    async def wait_connected(self) -> None:
        """Returns when both connections are there; the caller sets the limit."""
        await self._link.wait_connected()
        await self._blocking.wait_connected()

    async def wake(self) -> None:
        """Ends a `wait` that is under way, without losing an entry to it."""
        if self._client_id is None:
            return
        try:
            await self._link.call("CLIENT", "UNBLOCK", self._client_id)
        except (NpufleetError, ReplyError):
            log.debug("cannot unblock the reader; it ends by itself")

    async def claim(self, lease_s: float) -> list[Arrival]:
        """Entries whose lease is over: of workers that are gone, and own ones never answered.

        Some of each lane at a time; nothing where there are no more.
        """
        claimed: list[Arrival] = []
        for at, lane in enumerate(self._keys.lanes, 1):
            cursor, rows = await self._link.run(
                CLAIM,
                [lane, self._keys.workers],
                [
                    *(GROUP, self._consumer, RETURNED),
                    *(int(lease_s * 1000), _CLAIM_MOST, self._cursors[lane]),
                ],
            )
            self._cursors[lane] = cursor.decode()
            claimed += [Arrival(at, row[0], row[1], False, row[2]) for row in rows]
        await self._mark(claimed)
        return claimed

    async def _mark(self, arrivals: Sequence[Arrival]) -> None:
        """Finds out which were cancelled, as the take script does for those that it takes."""
        if not arrivals:
            return
        with contextlib.suppress(NpufleetError):  # they are ours now, marked or not
            marks = await self._link.execute(
                [("ZSCORE", self._keys.cancelled, wire.usable_id(a.fields) or "") for a in arrivals]
            )
            for arrival, mark in zip(arrivals, marks, strict=True):
                arrival.cancelled = isinstance(mark, bytes)

    async def _restore(self, lanes: list[str]) -> None:
        """As `_group_lost`, where entries of other lanes are in hand already: they go on."""
        try:
            await self._group_lost(lanes)
        except (NpufleetError, ReplyError) as error:
            log.warning("cannot create it yet: %s", error)  # the next take finds it missing again

    async def _group_lost(self, lanes: list[str]) -> None:
        log.warning("consumer group is gone; creating it again", extra={"lanes": ",".join(lanes)})
        await self.ensure_group()

    async def _note_client_id(self, connection: Connection) -> None:
        (answer,) = await connection.execute([("CLIENT", "ID")])
        self._client_id = answer if isinstance(answer, int) else None
