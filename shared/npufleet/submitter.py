"""Puts requests onto the lanes: gathers those of one event-loop tick into one call per model.

Fresh ids on a lane well below its bound go as a plain `XADD … XLEN` pipeline, for a third less of
the server's time; brought ids, large bodies and full lanes go through the submit script. A submit
whose answer was lost is never sent again. Knows nothing of replies.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from npufleet import wire
from npufleet.connection import Command, Link, ReplyError
from npufleet.errors import IdConflict, NpufleetError, Overloaded, Unavailable
from npufleet.keys import FleetKeys, ModelKeys
from npufleet.scripts import SUBMIT
from npufleet.signature import Limits
from npufleet.wire import Entry

_PLAIN_BELOW = 0.8
"""Share of the bound up to which a lane takes plain XADDs; the overshoot is callers x one tick."""

_CHUNK_BYTES = 4 << 20
_CHUNK_ITEMS = 128
"""Bounds of one script call, so that no call holds the server for long."""

_TIDY_S = 0.05
"""How long a deletion waits for a call to go along with."""

_SEEN_TTL_MS = 30 * 24 * 3600 * 1000
"""How long an unanswered brought id is remembered, when its entry has no deadline."""

_AFTER_DEADLINE_MS = 24 * 3600 * 1000
"""How long ids and bodies outlive a deadline, so that they stay ahead of their entry."""


@dataclass(frozen=True, slots=True)
class _Item:
    lane: str
    entry: Entry
    limits: Limits
    fields: list[str | bytes | int]
    body: bytes
    """A body too large for the stream; empty where the entry carries its own."""
    accepted: asyncio.Future[str]

    @property
    def large(self) -> bool:
        return bool(self.body)


class Submitter:
    """One per process and server, on the link that it is given."""

    def __init__(self, link: Link, keys: FleetKeys) -> None:
        self._link = link
        self._keys = keys
        self._waiting: dict[str, list[_Item]] = defaultdict(list)
        self._unlink: dict[str, list[str]] = defaultdict(list)
        self._lengths: dict[str, int] = {}
        self._scheduled = False
        self._tidy: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, model: str, entry: Entry, *, lane: str, limits: Limits) -> asyncio.Future[str]:
        """Queues one entry; the future gets its stream id ("" for an id that is already known).

        It fails with Overloaded, IdConflict, Unavailable, or with ConnectionLost when it is not
        known whether the entry was added. Raises InvalidParameter for an entry that no stream can
        carry: here, where it is alone.
        """
        accepted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        body, sent = b"", entry
        if entry.body is not None and len(entry.body) > wire.INLINE_BODY_BYTES:
            body = entry.body
            sent = replace(entry, body=None, body_key=self._keys.model(model).body(entry.id))
        item = _Item(lane, entry, limits, wire.entry_fields(sent), body, accepted)
        self._waiting[model].append(item)
        self._schedule()
        return accepted

    def delete_reply(self, model: str, wire_id: str) -> None:
        """Deletes a reply key: along with the next call, or by itself where none comes soon."""
        self._unlink[model].append(self._keys.model(model).reply(wire_id))
        if self._tidy is None:
            self._tidy = asyncio.get_running_loop().call_later(_TIDY_S, self._flush)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._tidy is not None:
            self._tidy.cancel()
            self._tidy = None
        waiting, self._waiting = self._waiting, defaultdict(list)
        unlink, self._unlink = self._unlink, defaultdict(list)
        for model, items in waiting.items():
            keys = self._keys.model(model)
            items = [item for item in items if not item.accepted.done()]
            for lane, group in itertools.groupby(
                sorted(items, key=lambda item: item.lane), key=lambda item: item.lane
            ):
                self._send_lane(keys, lane, list(group), unlink.pop(model, []))
        for reply_keys in unlink.values():
            self._spawn(self._send_unlink(reply_keys))

    def _send_lane(self, keys: ModelKeys, lane: str, items: list[_Item], unlink: list[str]) -> None:
        length = self._lengths.get(keys.lane(lane))
        roomy = (
            length is not None and length + len(items) < _PLAIN_BELOW * items[0].limits.max_queue
        )
        plain = [i for i in items if roomy and not i.entry.brought and not i.large]
        scripted = [i for i in items if not roomy or i.entry.brought or i.large]
        if plain:
            self._send_plain(keys.lane(lane), plain, unlink)
        for chunk in _chunks(scripted):
            self._spawn(self._send_script(keys, lane, chunk))
        if unlink and not plain:
            self._spawn(self._send_unlink(unlink))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_unlink(self, reply_keys: list[str]) -> None:
        try:
            await self._link.execute([("UNLINK", *reply_keys)])
        except NpufleetError:
            return  # they expire by themselves

    def _send_plain(self, lane_key: str, items: list[_Item], unlink: list[str]) -> None:
        commands: list[Command] = [("XADD", lane_key, "*", *item.fields) for item in items]
        commands.append(("XLEN", lane_key))
        if unlink:
            commands.append(("UNLINK", *unlink))
        try:
            replies = self._link.execute(commands)
        except NpufleetError as error:
            _fail(items, error)
            return
        replies.add_done_callback(partial(self._sent_plain, lane_key, items))

    def _sent_plain(
        self, lane_key: str, items: list[_Item], done: asyncio.Future[list[Any]]
    ) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            _fail(items, error if isinstance(error, NpufleetError) else _refused(str(error)))
            return
        replies = done.result()
        length = replies[len(items)]
        if isinstance(length, int):
            self._lengths[lane_key] = length
        for item, reply in zip(items, replies, strict=False):
            if isinstance(reply, ReplyError):
                _settle(item, [b"failed", str(reply).encode()])
            else:
                _settle(item, [b"added", reply])

    async def _send_script(self, keys: ModelKeys, lane: str, items: Sequence[_Item]) -> None:
        key_list, args = _script_call(keys, lane, items)
        try:
            length, results = await self._link.run(SUBMIT, key_list, args)
        except ReplyError as error:
            _fail(items, _refused(str(error)))
            return
        except NpufleetError as error:
            _fail(items, error)
            return
        self._lengths[keys.lane(lane)] = length
        for item, result in zip(items, results, strict=True):
            _settle(item, result)


def _chunks(items: Sequence[_Item]) -> list[list[_Item]]:
    chunks: list[list[_Item]] = []
    size = 0
    for item in items:
        body_bytes = len(item.entry.body or b"")
        if not chunks or len(chunks[-1]) == _CHUNK_ITEMS or size + body_bytes > _CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(item)
        size += body_bytes
    return chunks


def _script_call(
    keys: ModelKeys, lane: str, items: Sequence[_Item]
) -> tuple[list[str], list[str | bytes | int]]:
    """KEYS and ARGV of the submit script."""
    key_list = [keys.lane(lane)]
    args: list[str | bytes | int] = [items[0].limits.max_queue, len(items)]

    def index_of(key: str) -> int:
        key_list.append(key)
        return len(key_list)

    for item in items:
        entry, timeout_ms = item.entry, item.entry.timeout_ms
        seen_at = index_of(keys.seen(entry.id)) if entry.brought else 0
        seen_digest = wire.digest(entry.body or b"") if entry.brought else ""
        body_at = index_of(keys.body(entry.id)) if item.large else 0
        lasts_ms = timeout_ms + _AFTER_DEADLINE_MS if timeout_ms else 0
        args += (seen_at, seen_digest, lasts_ms or _SEEN_TTL_MS)
        args += (body_at, lasts_ms, item.body, len(item.fields), *item.fields)
    return key_list, args


def _settle(item: _Item, result: Sequence[Any]) -> None:
    if item.accepted.done():
        return
    status, detail = result[0].decode(), result[1] if len(result) > 1 else b""
    if status == "added":
        item.accepted.set_result(detail.decode())
    elif status in ("queued", "done"):
        item.accepted.set_result("")
    else:
        item.accepted.set_exception(_error(item, status, detail))


def _error(item: _Item, status: str, detail: Any) -> NpufleetError:
    if status == "full":
        return Overloaded(
            f"{detail} requests wait in lane {item.lane!r}, its bound is {item.limits.max_queue}; "
            "try again later",
            retry_after_s=1,
        )
    if status == "conflict":
        return IdConflict("this request_id was used before with another body; choose a new one")
    return _refused(detail.decode(errors="replace"))


def _refused(reason: str) -> NpufleetError:
    """A server's error that proves that nothing was added."""
    if reason.startswith("OOM"):
        return Unavailable("Redis is out of memory; try again later", retry_after_s=5)
    return Unavailable(f"Redis refused the request: {reason}", retry_after_s=1)


def _fail(items: Sequence[_Item], error: NpufleetError) -> None:
    for item in items:
        if not item.accepted.done():
            item.accepted.set_exception(error)
