"""Waits for replies: hints bring small ones at once, the reply keys are the truth.

One subscriber connection hears the hints of `notify:<name>`. A sweep looks at the keys of waiters
on every (re)subscribe, of those whose hint carried only the id, and of those that have waited
longer than expected, so that a lost hint costs time but never an answer. Reads, never pops.
"""

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import msgpack

from npufleet import wire
from npufleet.connection import Connection, Link, ReplyError
from npufleet.endpoint import Endpoint
from npufleet.errors import DeadlineExceeded, NpufleetError, Unavailable
from npufleet.keys import FleetKeys
from npufleet.wire import Reply

log = logging.getLogger(__name__)

_SWEEP_S = 0.5
_FIRST_LOOK_S = 1.0
_LOOK_CAP_S = 8.0
_CHUNK = 64
_ABANDONED_MOST = 10_000
_PING_S = 15.0
_LAST_LOOK_S = 1.0


class Waiter:
    """One caller that waits for one reply; its future gets None when the time is up.

    `look_at` is when the sweep next looks at the key. `lost` is what to raise then, where it is
    not known whether the request was added at all.
    """

    __slots__ = ("_timer", "future", "id", "look_at", "lost", "model", "spacing_s")

    def __init__(self, model: str, wire_id: str, now_s: float) -> None:
        self.model = model
        self.id = wire_id
        self.future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self.spacing_s = _FIRST_LOOK_S
        self.look_at = now_s + _FIRST_LOOK_S
        self.lost: NpufleetError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def fail(self, error: NpufleetError) -> None:
        """There will be no reply."""
        if not self.future.done():
            self.future.set_exception(error)

    def expire_in(self, timeout_s: float) -> None:
        """Ends the wait then, unless it was to end sooner anyway."""
        loop = asyncio.get_running_loop()
        if self._timer is None or loop.time() + timeout_s < self._timer.when():
            self.stop()
            self._timer = loop.call_later(timeout_s, self._expire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Replies:
    """All waiters of one process. `link` reads the keys; a link of its own hears the hints."""

    def __init__(
        self,
        endpoint: Endpoint,
        link: Link,
        keys: FleetKeys,
        *,
        name: str,
        delete_reply: Callable[[str, str], None],
    ) -> None:
        self._link = link
        self._keys = keys
        self._channel = keys.notify(name)
        self._delete_reply = delete_reply
        self._waiters: dict[str, list[Waiter]] = defaultdict(list)
        self._abandoned: OrderedDict[str, str] = OrderedDict()
        self._kick = asyncio.Event()
        self._dozing = False
        self._last_push_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._subscriber = Link(
            endpoint, name=f"{name}-replies", on_connect=self._subscribe, on_push=self._heard
        )

    @property
    def connected(self) -> bool:
        return self._subscriber.connected

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values()))

    async def start(self) -> None:
        await self._subscriber.start()
        self._task = asyncio.create_task(self._sweep(), name="replies sweep")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._subscriber.close()
        closed = Unavailable("the connection was closed while the answer was awaited")
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.fail(closed)

    def expect(self, model: str, wire_id: str, *, look_now: bool = False) -> Waiter:
        """A waiter, from now on. `look_now`: the reply may be there already."""
        waiter = Waiter(model, wire_id, asyncio.get_running_loop().time())
        self._waiters[wire_id].append(waiter)
        if self._dozing:
            self._dozing = False
            self._kick.set()
        if look_now:
            self.look_now(waiter)
        return waiter

    def look_now(self, waiter: Waiter) -> None:
        """Has the sweep look at the waiter's key at once."""
        self._look_soon([waiter])

    def dismiss(self, waiter: Waiter) -> None:
        """Forgets a waiter, answered or not."""
        waiters = self._waiters.get(waiter.id)
        if waiters is None or waiter not in waiters:
            return
        waiters.remove(waiter)
        waiter.stop()
        if not waiters:
            del self._waiters[waiter.id]

    def abandon(self, model: str, wire_id: str) -> None:
        """Has the reply of a fresh id deleted when it comes: nobody will ask for it."""
        self._abandoned[wire_id] = model
        if len(self._abandoned) > _ABANDONED_MOST:
            self._abandoned.popitem(last=False)

    async def wait(self, waiter: Waiter, *, timeout_s: float) -> Reply:
        """The reply; after `timeout_s` and one last look at the key, DeadlineExceeded.

        Where `waiter.fail` was called, what it was given.
        """
        waiter.expire_in(timeout_s)
        try:
            reply = await waiter.future
            if reply is None:
                reply = await self._last_look(waiter)
            if reply is None:
                raise waiter.lost or DeadlineExceeded(f"no answer within {timeout_s * 1000:.0f} ms")
            return reply
        finally:
            self.dismiss(waiter)

    async def _last_look(self, waiter: Waiter) -> Reply | None:
        last = Waiter(waiter.model, waiter.id, 0.0)
        with contextlib.suppress(NpufleetError, TimeoutError):
            async with asyncio.timeout(_LAST_LOOK_S):
                await self._look([last])
        return last.future.result() if last.future.done() else None

    async def _subscribe(self, connection: Connection) -> None:
        connection.push(("SUBSCRIBE", self._channel))
        self._last_push_s = asyncio.get_running_loop().time()
        self._look_soon(waiter for waiters in self._waiters.values() for waiter in waiters)

    def _look_soon(self, waiters: Iterable[Waiter]) -> None:
        for waiter in waiters:
            waiter.look_at = 0.0
        self._kick.set()

    def _heard(self, push: Any) -> None:
        self._last_push_s = asyncio.get_running_loop().time()
        if not isinstance(push, list) or len(push) != 3 or push[0] != b"message":
            return
        unpacker = msgpack.Unpacker(strict_map_key=True, max_buffer_size=0)
        unpacker.feed(push[2])
        try:
            for item in unpacker:
                self._hint(item)
        except (NpufleetError, ValueError, KeyError, TypeError, msgpack.UnpackException):
            # anybody may publish; the keys are the truth
            log.warning("unreadable hint", extra={"bytes": len(push[2])})

    def _hint(self, item: Any) -> None:
        wire_id = item if isinstance(item, str) else item["id"]
        waiters = self._waiters.get(wire_id)
        if waiters is None:
            model = self._abandoned.pop(wire_id, None)
            if model is not None:
                self._delete_reply(model, wire_id)
            return
        if isinstance(item, str):
            self._look_soon(waiters)
            return
        reply = wire.reply_from(item)
        for waiter in waiters:
            if waiter.model == reply.model and not waiter.future.done():
                waiter.future.set_result(reply)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                self._dozing = not self._waiters
                async with asyncio.timeout(_PING_S if self._dozing else _SWEEP_S):
                    await self._kick.wait()
            self._kick.clear()
            self._check_subscriber(loop.time())
            now_s = loop.time()
            due = [
                waiter
                for waiters in self._waiters.values()
                for waiter in waiters
                if waiter.look_at <= now_s and not waiter.future.done()
            ]
            for start in range(0, len(due), _CHUNK):
                try:
                    await self._look(due[start : start + _CHUNK])
                except NpufleetError:
                    break  # the link is down; the next sweep looks again

    def _check_subscriber(self, now_s: float) -> None:
        """A silent subscriber may be a dead one: ping it, and drop it when that is not answered."""
        silent_s = now_s - self._last_push_s
        if silent_s > 2 * _PING_S:
            self._last_push_s = now_s
            self._subscriber.drop()
        elif silent_s > _PING_S / 2:
            self._subscriber.push(("PING",))

    async def _look(self, waiters: list[Waiter]) -> None:
        now_s = asyncio.get_running_loop().time()
        for waiter in waiters:
            waiter.look_at = now_s + waiter.spacing_s * random.uniform(0.75, 1.25)
            waiter.spacing_s = min(waiter.spacing_s * 2, _LOOK_CAP_S)
        answers = await self._link.execute(
            [
                ("LRANGE", self._keys.model(waiter.model).reply(waiter.id), -1, -1)
                for waiter in waiters
            ]
        )
        for waiter, found in zip(waiters, answers, strict=True):
            if isinstance(found, ReplyError) or not found or waiter.future.done():
                continue
            try:
                waiter.future.set_result(wire.unpack_reply(found[0]))
            except NpufleetError as error:
                waiter.future.set_exception(error)
