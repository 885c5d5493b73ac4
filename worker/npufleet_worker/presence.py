"""What a worker shows of itself in Redis, for people and for `status`: a hash that expires.

Knows nothing of models or leases: what lives and what does not is decided by heartbeats alone.
"""

import asyncio
import contextlib
from collections.abc import Mapping

from npufleet.connection import Link
from npufleet.errors import NpufleetError


class Presence:
    """One worker's hash under `key`, written again every third of `life_s`."""

    def __init__(self, link: Link, key: str, facts: Mapping[str, str | int], life_s: float) -> None:
        self._link = link
        self._key = key
        self._facts = [part for pair in facts.items() for part in pair]
        self._life_s = life_s

    async def keep(self) -> None:
        """For ever; a Redis that is away gets it when it is back."""
        while True:
            with contextlib.suppress(NpufleetError):  # the link says so in the log
                await self._link.execute(
                    [
                        ("HSET", self._key, *self._facts),
                        ("PEXPIRE", self._key, int(self._life_s * 1000)),
                    ]
                )
            await asyncio.sleep(self._life_s / 3)

    async def leave(self) -> None:
        """Takes the hash away."""
        await self._link.execute([("UNLINK", self._key)])
