"""A caller's side of the wire: submits entries and waits for their replies.

What the gateway and the client share. Two connections, however many requests are under way. Knows
nothing of HTTP, of numpy or of how a model runs.
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from functools import partial

from npufleet.connection import Link, ReplyError
from npufleet.endpoint import resolve
from npufleet.errors import ConnectionLost, NpufleetError
from npufleet.keys import FleetKeys
from npufleet.replies import Replies, Waiter
from npufleet.scripts import CANCEL
from npufleet.signature import Signature
from npufleet.submitter import Submitter
from npufleet.wire import Entry, Reply

_CANCEL_MARK_MS = 24 * 3600 * 1000
_CANCEL_MARKS_MOST = 100_000


class Exchange:
    """Submits and awaits on one server, reconnecting by itself.

    `name` must be unique among the callers of that server: replies are announced under it.
    """

    def __init__(self, url: str, *, prefix: str, name: str, connect_timeout_s: float = 5.0) -> None:
        endpoint = resolve(url)
        self.name = name
        self._keys = FleetKeys(prefix)
        self._link = Link(endpoint, name=name, connect_timeout_s=connect_timeout_s)
        self._submitter = Submitter(self._link, self._keys)
        self._replies = Replies(
            endpoint,
            self._link,
            self._keys,
            name=name,
            delete_reply=self._submitter.delete_reply,
        )
        self._background: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        return self._link.connected and self._replies.connected

    @property
    def waiting(self) -> int:
        """Requests under way."""
        return len(self._replies)

    async def start(self) -> None:
        """Connects, or raises Unavailable; later losses are mended in the background."""
        await self._link.start()
        try:
            await self._replies.start()
        except BaseException:
            await self._link.close()
            raise

    async def close(self) -> None:
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)
        await self._replies.close()
        await self._link.close()

    async def submit(self, signature: Signature, entry: Entry, *, lane: str) -> None:
        """Returns once the entry stands in its lane.

        Raises Overloaded, IdConflict or Unavailable when it does not, and ConnectionLost when that
        is not known: sending the same brought id again is then safe.
        """
        await self._submitter.submit(signature.model, entry, lane=lane, limits=signature.limits)

    async def wait(self, model: str, wire_id: str, *, timeout_s: float) -> Reply:
        """The reply of an id submitted before, maybe by another process; else DeadlineExceeded."""
        waiter = self._replies.expect(model, wire_id, look_now=True)
        return await self._replies.wait(waiter, timeout_s=timeout_s)

    async def infer(
        self,
        signature: Signature,
        entry: Entry,
        *,
        lane: str,
        timeout_s: float,
        lost_timeout_s: float = float("inf"),
    ) -> Reply:
        """Submits and waits. A cancelled call marks the request cancelled and leaves nothing.

        Where it is not known whether the entry was added, the wait ends after `lost_timeout_s`,
        with ConnectionLost, if that is sooner.
        """
        model = signature.model
        accepted = self._submitter.submit(model, entry, lane=lane, limits=signature.limits)
        waiter = self._replies.expect(model, entry.id)  # in time: it is sent when this tick ends
        accepted.add_done_callback(partial(self._accepted, waiter, lost_timeout_s))
        try:
            return await self._replies.wait(waiter, timeout_s=timeout_s)
        except asyncio.CancelledError:
            accepted.cancel()
            if not entry.brought:
                self._replies.abandon(model, entry.id)
                self._in_background(self.cancel(model, entry.id))
            raise

    def _accepted(
        self, waiter: Waiter, lost_timeout_s: float, accepted: asyncio.Future[str]
    ) -> None:
        """What a submit came to, for the one who waits for the reply: mostly nothing new."""
        if accepted.cancelled():
            return
        error = accepted.exception()
        if isinstance(error, ConnectionLost):
            # It may have been added: wait as if it was, and never send it twice.
            waiter.lost = error
            waiter.expire_in(lost_timeout_s)
        elif isinstance(error, NpufleetError):
            waiter.fail(error)
        elif not accepted.result():
            self._replies.look_now(waiter)  # the id was there before: its reply may be there too

    async def cancel(self, model: str, wire_id: str) -> None:
        """Marks an id as cancelled; what has begun to run is not stopped."""
        key = self._keys.model(model).cancelled
        await self._link.run(CANCEL, [key], [_CANCEL_MARK_MS, _CANCEL_MARKS_MOST, wire_id])

    def answered(self, model: str, wire_id: str) -> None:
        """Has the reply key of a fresh id deleted, once its caller has the answer."""
        self._submitter.delete_reply(model, wire_id)

    def _in_background(self, work: Awaitable[None]) -> None:
        async def quietly() -> None:
            # a mark only saves work; without it the reply expires by itself
            with contextlib.suppress(NpufleetError, ReplyError):
                await work

        task = asyncio.create_task(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
