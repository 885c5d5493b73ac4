"""Everything on one machine: the queue server, workers and gateways as children of one process.

Started in that order, ended in the reverse one; a child that dies is started again. Children are
tied to this process, so nothing outlives it. Knows nothing of what children do beyond their
command lines and the gateway's `/readyz`; how it all is shown is the caller's.
"""

import asyncio
import errno
import http
import http.client
import itertools
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from npufleet.child import Child, Program, Restarts
from npufleet.embedded import EmbeddedServer
from npufleet.endpoint import sync_client
from npufleet.errors import ConfigurationError, NpufleetError
from npufleet.server import check
from npufleet.settings import PREFIX, Settings

logger = logging.getLogger(__name__)

# Beyond what a child itself allows for its draining.
_STOP_MARGIN_S = 5.0
_SERVER_CHECK_S = 0.5
# -P: a folder in the working folder must not stand in for a module.
_PYTHON = (sys.executable, "-P", "-m", "npufleet")


class Fleet:
    """The queue server and its children, for one call of `run`."""

    def __init__(
        self, settings: Settings, *, port: int, on_line: Callable[[str, str], None]
    ) -> None:
        """`port` is the gateway's, which `free_port` has found free.

        Takes the state folder, unless the settings name a Redis; raises ConfigurationError when
        another fleet has it or when that Redis will not do.
        """
        self._settings = settings
        self._port = port
        self._server = _embedded(settings)
        self.redis_url = self._server.url if self._server else str(settings.redis_url)
        workers, gateways = programs(settings, redis_url=self.redis_url, port=port)
        # In the order of starting, each kind ended before the one it depends on.
        self._kinds = [
            [Child(program, on_line) for program in kind] for kind in (workers, gateways)
        ]
        self._keepers: dict[Child, asyncio.Task[None]] = {}
        self._server_keeper: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def run(self, on_ready: Callable[[], None], *, ready_limit_s: float = 120.0) -> None:
        """Start everything, call `on_ready` once it answers, run until a signal, stop it all.

        SIGINT and SIGTERM end it in order; a second one at once. Raises NpufleetError when a part
        keeps failing or nothing answers within the limit; everything has been stopped by then.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            if self._server:
                self._server.spawn()
                if not await self._until(asyncio.to_thread(self._server.wait_ready)):
                    return
                self._server_keeper = asyncio.create_task(_keep_server(self._server))
            for child in self._children():
                self._keepers[child] = asyncio.create_task(child.keep())
            if await self._until(self._ready(ready_limit_s)):
                on_ready()
                await self._until(self._stop.wait())
        finally:
            await self._stop_all()

    async def _until(self, goal: Coroutine[Any, Any, object]) -> bool:
        """Whether `goal` was reached before a signal came; raises what made a part fail."""
        reached, stopped = asyncio.create_task(goal), asyncio.create_task(self._stop.wait())
        keepers = [*self._keepers.values()]
        if self._server_keeper is not None:
            keepers.append(self._server_keeper)
        try:
            done, _ = await asyncio.wait(
                [reached, stopped, *keepers], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            return reached in done and not self._stop.is_set()
        finally:
            reached.cancel()
            stopped.cancel()

    async def _ready(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while True:
            status = await asyncio.to_thread(_status, self._settings.host, self._port, "/readyz")
            if status == http.HTTPStatus.OK:
                return
            if time.monotonic() > end:
                said = f"/readyz answers {status}" if status else "nothing answers"
                raise NpufleetError(f"not ready after {limit_s:.0f} s: {said} on port {self._port}")
            await asyncio.sleep(0.1)

    def _on_signal(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        logger.warning("a second signal: ending everything at once")
        for child in self._children():
            child.kill()
        if self._server:
            self._server.kill()

    async def _stop_all(self) -> None:
        self._stop.set()
        for kind in reversed(self._kinds):
            await self._finish(kind, limit_s=self._settings.drain_s + _STOP_MARGIN_S)
        if self._server_keeper is not None:
            self._server_keeper.cancel()
        if self._server:
            await asyncio.to_thread(self._server.stop)

    async def _finish(self, kind: list[Child], *, limit_s: float) -> None:
        for child in kind:
            child.stop()
        keepers = [self._keepers[child] for child in kind if child in self._keepers]
        if not keepers:
            return
        done, late = await asyncio.wait(keepers, timeout=limit_s)
        if late:
            logger.warning("children do not end: killing them", extra={"count": len(late)})
            for child in kind:
                child.kill()
            await asyncio.wait(late, timeout=_STOP_MARGIN_S)
        # Whichever failed first is what `run` raises; asyncio would complain of the others.
        await asyncio.gather(*done, return_exceptions=True)

    def _children(self) -> Iterator[Child]:
        return itertools.chain.from_iterable(self._kinds)


async def _keep_server(server: EmbeddedServer) -> None:
    restarts, born = Restarts(), time.monotonic()
    while True:
        await asyncio.sleep(_SERVER_CHECK_S)
        code = server.returncode
        if code is None:
            continue
        wait_s = restarts.after(time.monotonic() - born)
        if wait_s is None:
            raise NpufleetError(f"the embedded server keeps dying (exit {code}); see {server.log}")
        logger.warning("the embedded server died", extra={"exit": code, "again_in_s": wait_s})
        await asyncio.sleep(wait_s)
        born = time.monotonic()
        server.spawn()
        await asyncio.to_thread(server.wait_ready)


def programs(
    settings: Settings, *, redis_url: str, port: int
) -> tuple[list[Program], list[Program]]:
    """The workers and the gateways that `settings` ask for."""
    explicit = settings.model_dump(mode="json", include=settings.model_fields_set)
    given = explicit | {
        "redis_url": redis_url,
        "models": settings.models.resolve(),
        "state": settings.state.resolve(),
        "port": port,
        # Of several workers on one machine only one could have the default port.
        "worker_http_port": explicit.get("worker_http_port", 0) if settings.workers == 1 else 0,
    }
    base = settings.worker_name or re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) or "local"
    workers = [
        Program(
            name=f"worker-{number}",
            command=(*_PYTHON, "worker"),
            environ=_environ(given | {"worker_name": f"{base}-{number}"}),
        )
        for number in range(1, settings.workers + 1)
    ]
    gateway = (*_PYTHON, "gateway", "--processes", str(settings.gateways))
    return workers, [Program(name="gateway", command=gateway, environ=_environ(given))]


def free_port(settings: Settings) -> int:
    """The gateway's port, known to be free; ConfigurationError with the way out if it is not."""
    try:
        family = socket.getaddrinfo(settings.host, None, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((settings.host, settings.port))
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            where = f"{settings.host}:{settings.port}"
            raise ConfigurationError(f"cannot listen on {where}: {error}") from None
    raise ConfigurationError(
        f"port {settings.port} on {settings.host} is in use: stop what uses it, or choose another "
        f"with --port {settings.port + 1}"
    )


def _embedded(settings: Settings) -> EmbeddedServer | None:
    if settings.redis_url is None:
        return EmbeddedServer(
            settings.state, port=settings.redis_port, maxmemory_mb=settings.redis_maxmemory_mb
        )
    with sync_client(settings.redis_url, timeout_s=settings.connect_timeout_s) as client:
        check(client, settings.redis_url)
    return None


def _environ(settings: Mapping[str, object]) -> dict[str, str]:
    own = {f"{PREFIX}{name.upper()}": str(value) for name, value in settings.items()}
    return {**os.environ, **own}


def _status(host: str, port: int, path: str) -> int | None:
    """HTTP status of one GET; None while nothing answers."""
    connection = http.client.HTTPConnection(reachable(host), port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def reachable(host: str) -> str:
    """The address at which this machine itself reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
