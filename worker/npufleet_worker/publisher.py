"""Publishes outcomes: one finish call for all that are ready, until the server has them.

A call whose answer was lost is sent again: the server's acknowledgement decides who replies, so
that a second call changes nothing. Knows nothing of models or devices.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from npufleet import wire
from npufleet.connection import Link, ReplyError
from npufleet.errors import (
    Cancelled,
    DeadlineExceeded,
    NpufleetError,
    RequestError,
)
from npufleet.keys import GROUP, FleetKeys, ModelKeys
from npufleet.scripts import FINISH
from npufleet.wire import Reply
from npufleet_worker.held import Held

log = logging.getLogger(__name__)

INLINE_REPLY_BYTES = 16 << 10
"""The largest reply that travels inside a hint."""

_CHUNK_BYTES = 4 << 20
_CHUNK_ITEMS = 256
_DEAD_BODY_MS = 7 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one entry: its packed reply, and the error where there is one."""

    held: Held
    reply: bytes
    error: NpufleetError | None = None

    @property
    def kind(self) -> str:
        """How the finish script treats it: ok, error or dead."""
        if self.error is None:
            return "ok"
        return "dead" if is_dead(self.held, self.error) else "error"


def is_dead(held: Held, error: NpufleetError) -> bool:
    """Whether an error also makes a dead letter: all that is not its caller's own doing.

    An entry that cannot be read counts: its error reply may have nobody who knows its key.
    """
    if held.fault is not None:
        return True
    return not isinstance(error, RequestError | DeadlineExceeded | Cancelled)


@dataclass(frozen=True, slots=True)
class ReplyLife:
    """How long replies live, in seconds: by default, and at the most."""

    default_s: int
    most_s: int


class Publisher:
    """The outcomes of one model. `done` is called with what the server has, and its word."""

    def __init__(
        self,
        link: Link,
        keys: ModelKeys,
        consumer: str,
        *,
        life: ReplyLife,
        max_dead: int,
        done: Callable[[Outcome, str], None],
    ) -> None:
        self._link = link
        self._keys = keys
        self._fleet = FleetKeys(keys.prefix)
        self._consumer = consumer
        self._life = life
        self._max_dead = max_dead
        self._done = done
        self._waiting: deque[Outcome] = deque()
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Has the outcomes published, in this order."""
        if outcomes:
            self._waiting.extend(outcomes)
            self._idle.clear()
            self._ready.set()

    async def drained(self) -> None:
        """Returns when nothing is left to publish; the caller sets the limit."""
        await self._idle.wait()

    async def run(self) -> None:
        """Publishes for ever."""
        while True:
            await self._ready.wait()
            chunk = self._next_chunk()
            if not chunk:
                self._ready.clear()
                self._idle.set()
                continue
            words = await self._finish(chunk)
            for outcome, word in zip(chunk, words, strict=True):
                self._done(outcome, word)

    def _next_chunk(self) -> list[Outcome]:
        chunk: list[Outcome] = []
        size = 0
        while self._waiting and len(chunk) < _CHUNK_ITEMS:
            size += len(self._waiting[0].reply)
            if chunk and size > _CHUNK_BYTES:
                break
            chunk.append(self._waiting.popleft())
        return chunk

    async def _finish(self, chunk: list[Outcome]) -> list[str]:
        keys, args = self._call(chunk)
        delay_s, told = 0.05, ""
        while True:
            try:
                answer = await self._link.run(FINISH, keys, args)
                return [word.decode() for word in answer]
            except ReplyError as error:
                if str(error) != told:
                    log.error("redis refuses replies: %s", error, extra={"model": self._keys.model})
                told = str(error)
            except NpufleetError:
                log.debug("replies wait for redis", extra={"model": self._keys.model})
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
            delay_s = min(delay_s * 2, 2.0)

    def _call(self, chunk: list[Outcome]) -> tuple[list[str], list[str | bytes | int]]:
        """KEYS and ARGV of the finish script."""
        keys = [*self._keys.lanes, self._keys.dead, self._keys.cancelled]
        args: list[str | bytes | int] = [GROUP, self._consumer, INLINE_REPLY_BYTES]
        args += (self._max_dead, _DEAD_BODY_MS, len(chunk))

        def index_of(key: str) -> int:
            keys.append(key)
            return len(keys)

        for outcome in chunk:
            held, entry, error = outcome.held, outcome.held.entry, outcome.error
            channel = self._fleet.notify(entry.notify) if entry and entry.notify else ""
            args += (outcome.kind, held.lane, held.entry_id, held.wire_id)
            args += (index_of(self._keys.reply(held.wire_id)), self._ttl_ms(held))
            args.append(index_of(self._keys.seen(entry.id)) if entry and entry.brought else 0)
            args.append(index_of(entry.body_key) if entry and entry.body_key else 0)
            args += (channel, outcome.reply)
            args += (error.code, error.message) if error else ("", "")
        return keys, args

    def _ttl_ms(self, held: Held) -> int:
        asked = held.entry.reply_ttl_s if held.entry else None
        return 1000 * min(asked or self._life.default_s, self._life.most_s)


def failure(held: Held, error: NpufleetError, *, model: str, worker: str) -> Outcome:
    """The outcome of an entry that ends in an error."""
    reply = Reply(id=held.wire_id, model=model, worker=worker, attempt=held.deliveries, error=error)
    return Outcome(held, wire.pack_reply(reply), error)
