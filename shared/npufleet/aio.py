"""The client for asyncio: straight onto the queue, without a gateway.

Knows nothing of threads, HTTP or how a model runs.
"""

import asyncio
import random
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from npufleet import wire
from npufleet.endpoint import client as redis_client
from npufleet.errors import (
    InvalidId,
    InvalidParameter,
    NoWorkers,
    NpufleetError,
    Overloaded,
    Unavailable,
)
from npufleet.exchange import Exchange
from npufleet.inputs import Value, reads_files, wire_inputs
from npufleet.keys import DEFAULT_LANE, LANES, check_id, check_model
from npufleet.registry import ModelState, Registry
from npufleet.result import Result, result_of
from npufleet.signature import Signature
from npufleet.wire import Body, Entry

REPLY_TTL_S = 60
"""Life of the reply to `infer`, whose caller is waiting for it."""

_MAP_WAIT_S = 24 * 3600.0
"""How long `map` waits for one answer: as long as the fleet keeps it."""

_LOST_WAIT_S = 60.0
"""How long `map` waits for an item of which a lost connection has left open if it was queued."""

_PATIENCE_S = 600.0
"""How long `map` goes on offering an item to a full queue or to a server that is away."""

_CLOSE_LIMIT_S = 5.0
_PAUSE_S = (0.05, 5.0)


class Options(TypedDict, total=False):
    """What any request may ask for. InvalidParameter is raised for values that there are not."""

    timeout_ms: int | None
    """The deadline, by the server's clock: 1 to a week."""
    priority: str
    """high, normal (the default) or low."""
    version: int | str | None
    """A number or a label of the model's versions."""
    parameters: Mapping[str, Any] | None
    """Go to the model as they are."""


class AsyncClient:
    """A producer on the queue at `url` (`redis://`, `rediss://` or `unix://`).

    One is enough for a process: its requests share two connections, and those of one tick of the
    event loop share a round trip. Use it as an async context manager; entering raises Unavailable
    when the server cannot be reached, and later losses of the connection mend by themselves.
    """

    def __init__(
        self, url: str, *, prefix: str = "npufleet", connect_timeout_s: float = 5.0
    ) -> None:
        self._exchange = Exchange(
            url,
            prefix=prefix,
            name=f"client-{secrets.token_hex(8)}",
            connect_timeout_s=connect_timeout_s,
        )
        self._redis = redis_client(url, timeout_s=connect_timeout_s)
        self._registry = Registry(self._redis, prefix=prefix)

    async def __aenter__(self) -> Self:
        await self._exchange.start()
        await self._registry.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._registry.close()
        await self._exchange.close()
        await self._redis.aclose()

    async def models(self) -> Mapping[str, ModelState]:
        """The models by name: signature, live workers, queue lengths, as of now."""
        await self._registry.refresh()
        return await self._registry.all()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Value] | Value,
        *,
        id: str | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """The model's answer, within `timeout_ms` or else the model's own default.

        With an `id` of your own a repetition is safe: the same id with the same inputs runs once.
        Raises the error of the request; NoWorkers at once when nothing serves the model.
        """
        _check(options)
        signature = await self._served(model)
        timeout_ms = options.get("timeout_ms") or signature.limits.timeout_ms
        options["timeout_ms"] = timeout_ms
        entry = await self._entry(signature, inputs, options, id=id, reply_ttl_s=REPLY_TTL_S)
        result = await self._exchanged(
            signature, entry, lane=_lane(options), timeout_s=timeout_ms / 1000
        )
        return _raised(result)

    async def submit(
        self,
        model: str,
        inputs: Mapping[str, Value] | Value,
        *,
        id: str | None = None,
        **options: Unpack[Options],
    ) -> str:
        """Puts a request on the queue; returns its handle, `<model>~<id>`, for `result`.

        There is no deadline unless `timeout_ms` is given; no worker needs to be there yet; the
        answer is kept for a day.
        """
        _check(options)
        signature = (await self._registry.get(model)).signature
        entry = await self._entry(signature, inputs, options, id=id)
        await self._exchange.submit(signature, entry, lane=_lane(options))
        return f"{model}~{entry.id}"

    async def result(self, handle: str, *, timeout_s: float = 60.0) -> Result:
        """The answer to what any client submitted, as often as asked while it is kept.

        Raises the error of the request, InvalidId for what is no handle, and DeadlineExceeded when
        there is no answer within `timeout_s`.
        """
        model, tilde, wire_id = handle.rpartition("~")
        if not tilde:
            raise InvalidId(f"a handle is <model>~<id>, got {handle[:80]!r}")
        reply = await self._exchange.wait(
            check_model(model), check_id(wire_id), timeout_s=timeout_s
        )
        return _raised(result_of(reply))

    async def map(
        self,
        model: str,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        in_flight: int = 64,
        **options: Unpack[Options],
    ) -> AsyncIterator[tuple[int, Result]]:
        """Yields (index, result) of each item as the answers come, in no particular order.

        At most `in_flight` items are under way; the next is drawn when one was yielded. An item
        that fails is a result with `error` set, and ends nothing; a full queue and a server that is
        away are waited for. (ConnectionLost: it is not known whether the item was queued, and it
        was not answered within a minute.) No deadline unless `timeout_ms` is given. What is under
        way when the iteration is left is cancelled. A plain iterable is advanced on the event
        loop: make a slow one asynchronous.
        """
        _check(options)
        await self._registry.get(model)
        room = asyncio.Semaphore(in_flight)
        under_way: set[asyncio.Task[Any]] = set()
        ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()

        def start(work: Any) -> asyncio.Task[Any]:
            task = asyncio.create_task(work)
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            task.add_done_callback(ended.put_nowait)
            return task

        async def feed() -> int:
            source, index = _iterated(items), 0
            while True:
                await room.acquire()
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return index
                start(self._attempt(model, item, index, options))
                index += 1

        feeder, total, yielded = start(feed()), None, 0
        try:
            while yielded != total:
                task = await ended.get()
                if task is feeder:
                    total = task.result()  # raises what the iterable raised
                    continue
                yield task.result()
                yielded += 1
                room.release()
        finally:
            for task in under_way:
                task.cancel()
            if under_way:
                await asyncio.wait(under_way, timeout=_CLOSE_LIMIT_S)

    async def _served(self, model: str) -> Signature:
        state = await self._registry.get(model)
        if not state.workers:  # the view may be two seconds old
            await self._registry.refresh()
            state = await self._registry.get(model)
        if not state.workers:
            raise NoWorkers(f"no worker serves {model} at present", retry_after_s=1)
        return state.signature

    async def _entry(
        self,
        signature: Signature,
        inputs: Any,
        options: Options,
        *,
        id: str | None = None,
        reply_ttl_s: int | None = None,
    ) -> Entry:
        if reads_files(signature, inputs):
            content = await asyncio.to_thread(wire_inputs, signature, inputs)
        else:
            content = wire_inputs(signature, inputs)
        version = options.get("version")
        return Entry(
            id=wire.new_id() if id is None else wire.derived_id("", id),
            brought=id is not None,
            body=wire.pack_body(Body(content, options.get("parameters") or {})),
            timeout_ms=options.get("timeout_ms"),
            reply_ttl_s=reply_ttl_s,
            notify=self._exchange.name,
            version=None if version is None else str(version),
        )

    async def _exchanged(
        self, signature: Signature, entry: Entry, *, lane: str, timeout_s: float
    ) -> Result:
        reply = await self._exchange.infer(
            signature, entry, lane=lane, timeout_s=timeout_s, lost_timeout_s=_LOST_WAIT_S
        )
        if not entry.brought:
            self._exchange.answered(signature.model, entry.id)
        return result_of(reply)

    async def _attempt(
        self, model: str, item: Any, index: int, options: Options
    ) -> tuple[int, Result]:
        """One item of `map`, offered until the queue takes it; never raises one of our errors."""
        timeout_ms = options.get("timeout_ms")
        timeout_s = timeout_ms / 1000 if timeout_ms else _MAP_WAIT_S
        loop = asyncio.get_running_loop()
        give_up, (pause_s, longest_s) = loop.time() + _PATIENCE_S, _PAUSE_S
        try:
            signature = (await self._registry.get(model)).signature
            entry = await self._entry(signature, item, options)
            while True:
                try:
                    return index, await self._exchanged(
                        signature, entry, lane=_lane(options), timeout_s=timeout_s
                    )
                except (Overloaded, Unavailable):  # both prove that nothing was added
                    if loop.time() > give_up:
                        raise
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, longest_s)
        except NpufleetError as error:
            return index, Result(id="", model=model, error=error)


def _lane(options: Options) -> str:
    return options.get("priority", DEFAULT_LANE)


def _check(options: Options) -> None:
    if unknown := set(options) - Options.__optional_keys__:
        raise InvalidParameter(f"there is no option {', '.join(map(repr, sorted(unknown)))}")
    if _lane(options) not in LANES:
        raise InvalidParameter(f"priority is {', '.join(LANES)}; got {_lane(options)!r}")
    limit = options.get("timeout_ms")
    if limit is not None and not 1 <= limit <= wire.MAX_TIMEOUT_MS:
        raise InvalidParameter(f"timeout_ms is 1 to {wire.MAX_TIMEOUT_MS}, got {limit!r}")


def _raised(result: Result) -> Result:
    if result.error is not None:
        raise result.error
    return result


async def _iterated(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
