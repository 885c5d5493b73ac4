"""Keeps this worker alive in the eyes of the others, and its entries its own.

One round every third of a lease: heartbeat, registration, renewal of all that is held. One claim a
lease: entries of workers that are gone. Knows nothing of what the entries say.
"""

import logging
import math
import time
from collections.abc import Iterable

from npufleet.connection import Link
from npufleet.keys import GROUP, RATE_FIELD, RETURNED, FleetKeys, ModelKeys
from npufleet.scripts import BEAT, GIVE_BACK, REAP, RENEW
from npufleet.signature import Signature
from npufleet_worker.clock import ServerClock
from npufleet_worker.held import Held

log = logging.getLogger(__name__)

_RENEW_MOST = 200
_GIVE_BACK_MOST = 1000
_REAP_AFTER_MS = 24 * 3600 * 1000


class Leases:
    """The leases and the registration of one consumer for one model."""

    def __init__(self, link: Link, keys: ModelKeys, consumer: str) -> None:
        self._link = link
        self._keys = keys
        self._consumer = consumer
        self._rate_field = RATE_FIELD + consumer
        self._beat_s = self._steady_since_s = -math.inf

    async def register(self, signature: Signature, *, rate_per_s: float = 0.0) -> None:
        """Publishes the model, and how many requests a second this worker can end (0: unknown).

        Done again at every beat, since Redis may have been emptied.
        """
        text = signature.to_json()
        await self._link.execute(
            [
                ("SADD", FleetKeys(self._keys.prefix).models, self._keys.model),
                (
                    *("HSET", self._keys.signature, "signature", text),
                    *("version", signature.version, self._rate_field, round(rate_per_s, 3)),
                ),
            ]
        )

    async def beat(self, clock: ServerClock, *, lease_s: float) -> None:
        """Says that this worker lives."""
        server_ms = await self._link.run(BEAT, [self._keys.workers], [self._consumer])
        now_s = time.monotonic()  # after the answer, as the clock wants it
        clock.observe(server_ms, now_s=now_s)
        if now_s - self._beat_s > lease_s:
            self._steady_since_s = now_s
        self._beat_s = now_s

    def may_claim(self, lease_s: float) -> bool:
        """Whether this worker has been heard for a whole lease without a gap of one.

        After a stall of Redis, or of this worker, others look gone that only could not be heard.
        """
        now_s = time.monotonic()
        return now_s - self._beat_s <= lease_s <= now_s - self._steady_since_s

    async def renew(self, held: Iterable[Held]) -> list[Held]:
        """Renews what is still owned; gives what is not."""
        entries = {entry.key: entry for entry in held}
        lost: list[tuple[int, bytes]] = []
        keys = list(entries)
        for start in range(0, len(keys), _RENEW_MOST):
            args: list[str | bytes | int] = [GROUP, self._consumer]
            for key in keys[start : start + _RENEW_MOST]:
                args += key
            answer = await self._link.run(RENEW, list(self._keys.lanes), args)
            lost += zip(answer[::2], answer[1::2], strict=True)
        return [entries[key] for key in lost]

    async def reap(self) -> None:
        """Forgets consumers that have been gone for a day and hold nothing."""
        await self._link.run(
            REAP,
            [*self._keys.lanes, self._keys.workers, self._keys.signature],
            [GROUP, RETURNED, _REAP_AFTER_MS, RATE_FIELD],
        )

    async def leave(self) -> int:
        """Gives back everything that is held and signs off; how many were given back."""
        count = 0
        while True:
            given: int = await self._link.run(
                GIVE_BACK,
                list(self._keys.lanes),
                [GROUP, self._consumer, RETURNED, self._keys.control, _GIVE_BACK_MOST],
            )
            count += given
            if given < _GIVE_BACK_MOST:
                break
        await self._link.call("ZREM", self._keys.workers, self._consumer)
        await self._link.call("HDEL", self._keys.signature, self._rate_field)
        return count
