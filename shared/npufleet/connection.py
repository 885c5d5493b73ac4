"""The thin pipelined connection of the hot path: one socket, hiredis, no pool, no retry.

`Connection` is one socket; `Link` keeps one open for ever, with jittered back-off. Calls are
answered in the order in which they were written; when the socket goes, every call under way fails
with ConnectionLost and is not sent again. Knows nothing of what the commands mean.
"""

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import hiredis

from npufleet.endpoint import Endpoint
from npufleet.errors import ConnectionLost, Unavailable
from npufleet.scripts import Script

log = logging.getLogger(__name__)

Command = tuple[str | bytes | int | float | memoryview, ...]
Replies = list[Any]
"""One answer per command; a server's error stands as a `hiredis.ReplyError` in its place."""

ReplyError = hiredis.ReplyError

_INCOMPLETE = object()


def _pack(command: Command) -> bytes:
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # its stub means tuple[…, ...]
    return packed


class Connection(asyncio.Protocol):
    """One socket to one server.

    `timeout_s` bounds the wait for the oldest answer; beyond it the socket is closed. Once
    `on_push` is set the connection is a subscriber's: every answer goes there, not to a caller.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._waiting: deque[tuple[asyncio.Future[Replies], int, Replies]] = deque()
        self._timeout_s = timeout_s
        self.on_push: Callable[[list[Any]], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._answered = 0
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream transport by construction

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not _INCOMPLETE:
            if self.on_push is not None:
                self.on_push(reply)
                continue
            future, wanted, got = self._waiting[0]
            got.append(reply)
            if len(got) == wanted:
                self._waiting.popleft()
                self._answered += 1
                if not future.done():
                    future.set_result(got)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        reason = f"the connection to Redis was lost: {exc or 'closed'}"
        while self._waiting:
            future, _, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(ConnectionLost(reason))
        self.closed.set()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def execute(self, commands: Sequence[Command]) -> asyncio.Future[Replies]:
        """Writes the commands at once; the future gets all their answers, or ConnectionLost."""
        if self._transport is None or self._transport.is_closing():
            raise Unavailable("not connected to Redis", retry_after_s=1)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Replies] = loop.create_future()
        if not commands:
            future.set_result([])
            return future
        # Packed first: what cannot be packed must not wait for an answer, which would be another's.
        packed = [_pack(command) for command in commands]
        self._waiting.append((future, len(commands), []))
        self._transport.write(packed[0] if len(packed) == 1 else b"".join(packed))
        if self._watch is None:
            self._watch = loop.call_later(self._timeout_s, self._check, self._answered)
        return future

    def push(self, command: Command) -> None:
        """Writes a command whose answer goes to `on_push`: SUBSCRIBE and PING of a subscriber."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_pack(command))

    def _check(self, answered_before: int) -> None:
        self._watch = None
        if not self._waiting:
            return
        if self._answered == answered_before:
            log.warning("redis gave no answer in time", extra={"timeout_s": self._timeout_s})
            self.close()
            return
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(self._timeout_s, self._check, self._answered)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def connect(
    endpoint: Endpoint,
    *,
    name: str,
    connect_timeout_s: float,
    timeout_s: float,
    on_push: Callable[[list[Any]], None] | None = None,
) -> Connection:
    """An open connection, authenticated, on its database and named; Unavailable otherwise."""
    loop = asyncio.get_running_loop()

    def factory() -> Connection:
        return Connection(timeout_s=timeout_s)

    try:
        async with asyncio.timeout(connect_timeout_s):
            if endpoint.path is not None:
                _, connection = await loop.create_unix_connection(factory, endpoint.path)
            else:
                _, connection = await loop.create_connection(
                    factory, endpoint.host, endpoint.port, ssl=endpoint.tls
                )
            try:
                await _enter(connection, endpoint, name)
            except BaseException:
                connection.close()
                raise
    except (OSError, TimeoutError, ConnectionLost) as error:
        where = endpoint.path or f"{endpoint.host}:{endpoint.port}"
        reason = str(error) or type(error).__name__
        raise Unavailable(f"cannot reach Redis at {where}: {reason}", retry_after_s=1) from None
    connection.on_push = on_push
    return connection


async def _enter(connection: Connection, endpoint: Endpoint, name: str) -> None:
    commands: list[Command] = []
    if endpoint.password is not None:
        user = (endpoint.username,) if endpoint.username else ()
        commands.append(("AUTH", *user, endpoint.password))
    commands += [("SELECT", endpoint.db)] if endpoint.db else []
    commands.append(("CLIENT", "SETNAME", name))
    for command, reply in zip(commands, await connection.execute(commands), strict=True):
        # a name is a courtesy; an ACL may forbid it
        if isinstance(reply, ReplyError) and (
            command[0] != "CLIENT" or str(reply).startswith("NOAUTH")
        ):
            raise Unavailable(f"Redis refused {command[0]!s}: {reply}", retry_after_s=5)


class Link:
    """A connection that comes back: reconnects for ever, with jittered exponential back-off.

    `on_connect` runs on every fresh connection before callers may use it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        name: str,
        connect_timeout_s: float = 5.0,
        timeout_s: float = 10.0,
        on_connect: Callable[[Connection], Awaitable[None]] | None = None,
        on_push: Callable[[list[Any]], None] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._name = name
        self._limits = {"connect_timeout_s": connect_timeout_s, "timeout_s": timeout_s}
        self._on_connect = on_connect
        self._on_push = on_push
        self._current: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._up = asyncio.Event()

    @property
    def connected(self) -> bool:
        return self._current is not None and self._current.usable

    async def start(self) -> None:
        """Connects once, or raises Unavailable; from then on keeps the connection by itself."""
        await self._open()
        self._task = asyncio.create_task(self._keep(), name=f"link {self._name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._current is not None:
            self._current.close()
            await self._current.closed.wait()

    async def wait_connected(self) -> None:
        """Returns as soon as there is a connection; the caller sets the limit."""
        while not self.connected:
            self._up.clear()  # it may be set still, while a socket is closing
            await self._up.wait()

    def drop(self) -> None:
        """Closes the present connection, so that a fresh one is made."""
        if self._current is not None:
            self._current.close()

    def execute(self, commands: Sequence[Command]) -> asyncio.Future[Replies]:
        """As `Connection.execute`; Unavailable while there is no connection."""
        if self._current is None:
            raise Unavailable("not connected to Redis", retry_after_s=1)
        return self._current.execute(commands)

    async def call(self, *command: str | bytes | int | float) -> Any:
        """One command's answer; a server's error is raised as the `ReplyError` it is."""
        (reply,) = await self.execute([command])
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """A script's answer; loads it where the server does not know it (it has not run then)."""
        tail = (len(keys), *keys, *args)
        (reply,) = await self.execute([("EVALSHA", script.sha, *tail)])
        if isinstance(reply, ReplyError) and str(reply).startswith("NOSCRIPT"):
            (reply,) = await self.execute([("EVAL", script.text, *tail)])
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def push(self, command: Command) -> None:
        if self._current is not None:
            self._current.push(command)

    async def _open(self) -> None:
        connection = await connect(
            self._endpoint, name=self._name, on_push=self._on_push, **self._limits
        )
        if self._on_connect is not None:
            try:
                await self._on_connect(connection)
            except BaseException:
                connection.close()
                raise
        self._current = connection
        self._up.set()

    async def _keep(self) -> None:
        while True:
            if self._current is not None:
                await self._current.closed.wait()
                self._current = None
                log.warning("redis connection lost", extra={"link": self._name})
            await self._reopen()
            log.info("redis connection is back", extra={"link": self._name})

    async def _reopen(self) -> None:
        delay_s, told = 0.05, False
        while True:
            try:
                await self._open()
                return
            except (Unavailable, ConnectionLost, ReplyError) as error:
                if not told:
                    log.warning("cannot reconnect yet: %s", error, extra={"link": self._name})
                    told = True
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
            delay_s = min(delay_s * 2, 2.0)
