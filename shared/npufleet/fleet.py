"""Everything on one machine: the queue server, workers and gateways as children of one process.

Started in that order, ended in the reverse one; a child that dies is started again. Children are
tied to this process, so nothing outlives it. Knows nothing of what children do beyond their
command lines and whether their pages say that they are ready; how it all is shown is the caller's.
"""

import asyncio
import contextlib
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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
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
        worker_ports = _worker_ports(settings)
        # Pages that answer 200 once the fleet is ready. The gateway's /health says that a model
        # is served, which none is where no worker was asked for.
        page = "/health" if worker_ports else "/readyz"
        self._pages = [(settings.worker_http_host, number, "/readyz") for number in worker_ports]
        self._pages.append((settings.host, port, page))
        self._server = _embedded(settings)
        self.redis_url = self._server.url if self._server else str(settings.redis_url)
        workers = _workers(settings, redis_url=self.redis_url, ports=worker_ports)
        gateways = [_gateway(settings, redis_url=self.redis_url, port=port)]
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
        """Wait until every worker is ready and the gateway sees a model that is served."""
        end = time.monotonic() + limit_s
        for host, port, path in self._pages:
            while True:
                answer = await asyncio.to_thread(_get, reachable(host), port, path)
                if answer.status == http.HTTPStatus.OK:
                    break
                if time.monotonic() > end:
                    page = f"http://{reachable(host)}:{port}{path}"
                    raise NpufleetError(f"not ready after {limit_s:.0f} s: {page} {answer.said}")
                await asyncio.sleep(0.1)

    def stop(self) -> None:
        """Have `run` stop everything and return, as a first signal does."""
        self._stop.set()

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


def _workers(settings: Settings, *, redis_url: str, ports: Sequence[int]) -> list[Program]:
    base = settings.worker_name or re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) or "local"
    return [
        Program(
            name=f"worker-{number}",
            command=(*_PYTHON, "worker"),
            environ=_environ(
                settings,
                redis_url=redis_url,
                worker_name=f"{base}-{number}",
                worker_http_port=port,
            ),
        )
        for number, port in enumerate(ports, start=1)
    ]


def _gateway(settings: Settings, *, redis_url: str, port: int) -> Program:
    command = (*_PYTHON, "gateway", "--processes", str(settings.gateways))
    return Program("gateway", command, _environ(settings, redis_url=redis_url, port=port))


def free_port(settings: Settings) -> int:
    """The gateway's port, known to be free; ConfigurationError with the way out if it is not."""
    with _bound(settings.host, settings.port, option="--port") as probe:
        return int(probe.getsockname()[1])


def _worker_ports(settings: Settings) -> list[int]:
    """A port for each worker's own pages: the one that was asked for and those after it, else any.

    The default is not insisted on: two fleets started at once would both find it free.
    """
    asked = "worker_http_port" in settings.model_fields_set and settings.worker_http_port
    # All held until the last is chosen, so that no two are the same.
    with contextlib.ExitStack() as held:
        probes = [
            held.enter_context(
                _bound(
                    settings.worker_http_host,
                    asked + number if asked else 0,
                    option="NPUFLEET_WORKER_HTTP_PORT",
                )
            )
            for number in range(settings.workers)
        ]
        return [int(probe.getsockname()[1]) for probe in probes]


def _bound(host: str, port: int, *, option: str) -> socket.socket:
    """A socket on that address; ConfigurationError naming `option` when it cannot be had."""
    probe: socket.socket | None = None
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        probe = socket.socket(family, socket.SOCK_STREAM)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    except OSError as error:
        if probe is not None:
            probe.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} on {host} is in use: stop what uses it, or choose another with "
                f"{option} {port + 1}"
            ) from None
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}") from None
    return probe


def _embedded(settings: Settings) -> EmbeddedServer | None:
    if settings.redis_url is None:
        return EmbeddedServer(
            settings.state, port=settings.redis_port, maxmemory_mb=settings.redis_maxmemory_mb
        )
    with sync_client(settings.redis_url, timeout_s=settings.connect_timeout_s) as client:
        check(client, settings.redis_url)
    return None


def _environ(settings: Settings, **own: object) -> dict[str, str]:
    """This environment, the settings that were given anywhere, and `own` over both."""
    given = settings.model_dump(mode="json", include=settings.model_fields_set)
    given |= {"models": settings.models.resolve(), "state": settings.state.resolve(), **own}
    own_words = {PREFIX + n.upper(): str(v) for n, v in given.items() if v is not None}
    return {**os.environ, **own_words}


@dataclass(frozen=True)
class _Answer:
    """What a GET brought: `status` is None while nothing answers; `said` is for people."""

    status: int | None
    said: str


def _get(host: str, port: int, path: str) -> _Answer:
    # Not urllib: it would go through a proxy that the environment names.
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        text = response.read(4096).decode(errors="replace").strip()
        return _Answer(response.status, f"answers {response.status}: {text}")
    except (OSError, http.client.HTTPException):
        return _Answer(None, "does not answer")
    finally:
        connection.close()


def reachable(host: str) -> str:
    """The address at which this machine itself reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
