"""The client for ordinary, synchronous code: `AsyncClient` on a private event-loop thread.

Knows nothing of the wire: all that is `npufleet.aio`.
"""

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from npufleet.aio import AsyncClient, Options
from npufleet.inputs import Value
from npufleet.registry import ModelState
from npufleet.result import Result

T = TypeVar("T")

_CLOSE_LIMIT_S = 10.0
_END = object()


class Client:
    """A producer on the queue at `url` (`redis://`, `rediss://` or `unix://`), for any thread.

    Connects at once; raises Unavailable when the server cannot be reached. Close it, or use it as a
    context manager. Methods, options and errors are those of `AsyncClient`.
    """

    def __init__(
        self, url: str, *, prefix: str = "npufleet", connect_timeout_s: float = 5.0
    ) -> None:
        self._loop = _new_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="npufleet client", daemon=True
        )
        self._calls: set[asyncio.Task[Any]] = set()
        self._thread.start()
        try:
            self._client = self._run(_opened(url, prefix, connect_timeout_s))
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """Closes the connections; what other threads wait for is cancelled. Idempotent."""
        if self._loop.is_closed():
            return
        try:
            self._run(self._shut(), limit_s=_CLOSE_LIMIT_S)
        finally:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def models(self) -> Mapping[str, ModelState]:
        """As `AsyncClient.models`."""
        return self._run(self._client.models())

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Value] | Value,
        *,
        id: str | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """As `AsyncClient.infer`."""
        return self._run(self._client.infer(model, inputs, id=id, **options))

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Value] | Value,
        *,
        id: str | None = None,
        **options: Unpack[Options],
    ) -> str:
        """As `AsyncClient.submit`."""
        return self._run(self._client.submit(model, inputs, id=id, **options))

    def result(self, handle: str, *, timeout_s: float = 60.0) -> Result:
        """As `AsyncClient.result`."""
        return self._run(self._client.result(handle, timeout_s=timeout_s))

    def map(
        self,
        model: str,
        items: Iterable[Any],
        *,
        in_flight: int = 64,
        **options: Unpack[Options],
    ) -> Iterator[tuple[int, Result]]:
        """As `AsyncClient.map`; `items` are drawn in the thread that iterates over the results."""
        source, under_way = iter(items), 0
        # What the loop has for this thread: a result, a wish for more items, or the end. Bounded by
        # `in_flight`, since nothing is under way that this thread has not drawn.
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()

        async def drawn() -> AsyncIterator[Any]:
            while True:
                wish: asyncio.Future[list[Any]] = self._loop.create_future()
                events.put(wish)
                if not (some := await wish):
                    return
                for item in some:
                    yield item

        async def work() -> None:
            results = self._client.map(model, drawn(), in_flight=in_flight, **options)
            async for pair in results:
                events.put(pair)

        future = self._begin(work())
        future.add_done_callback(lambda _: events.put(_END))
        try:
            while (event := events.get()) is not _END:
                if isinstance(event, asyncio.Future):
                    # All that there is room for: a thread's turn costs more than an item.
                    some = list(itertools.islice(source, max(1, in_flight - under_way)))
                    under_way += len(some)
                    self._loop.call_soon_threadsafe(_grant, event, some)
                else:
                    under_way -= 1
                    yield event
            future.result()
        finally:
            future.cancel()

    def _run(self, work: Coroutine[Any, Any, T], *, limit_s: float | None = None) -> T:
        """Runs on the loop; an interrupted wait (Ctrl-C) cancels the work."""
        future = self._begin(work)
        try:
            return future.result(limit_s)
        finally:
            future.cancel()

    def _begin(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("this client is closed")

        async def counted() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            try:
                return await work
            finally:
                self._calls.discard(task)

        return asyncio.run_coroutine_threadsafe(counted(), self._loop)

    async def _shut(self) -> None:
        calls = self._calls - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        if calls:  # while there still is a connection that can mark them cancelled
            await asyncio.wait(calls, timeout=_CLOSE_LIMIT_S / 2)
        await self._client.__aexit__(None, None, None)

    def _stop(self) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(_CLOSE_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_LIMIT_S)
        self._loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # it is not among what a client needs
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _opened(url: str, prefix: str, connect_timeout_s: float) -> AsyncClient:
    client = AsyncClient(url, prefix=prefix, connect_timeout_s=connect_timeout_s)
    return await client.__aenter__()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CLOSE_LIMIT_S)
    await asyncio.get_running_loop().shutdown_default_executor()


def _grant(wish: "asyncio.Future[list[Any]]", items: list[Any]) -> None:
    if not wish.done():
        wish.set_result(items)
