"""One gateway process: connects, listens, and on SIGTERM finishes what it has begun.

Knows nothing of other processes that may listen on the same port.
"""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import secrets
import signal
import time
from collections.abc import Awaitable

import redis.asyncio
import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from npufleet.endpoint import client
from npufleet.errors import ConfigurationError, Unavailable
from npufleet.exchange import Exchange
from npufleet.process import calm_collector
from npufleet.registry import Registry
from npufleet.server import check_async
from npufleet.settings import Settings
from npufleet_gateway.admission import Admission
from npufleet_gateway.app import build

log = logging.getLogger(__name__)

_REACH_LIMIT_S = 30.0
"""How long a Redis that is not there yet is waited for at start."""

_REACH_PAUSE_S = 0.5
_CLOSE_LIMIT_S = 3.0
_KEEPALIVE_S = 75.0
_LINGER_S = 5.0
"""How long the rest of a refused body is read, so that the client sees the refusal."""

_BACKLOG = 1024
_FILES = 1 << 16


class _NoUnreadable(logging.Filter):
    """Drops what aiohttp logs of bytes that are no HTTP: tracebacks that quote the bytes."""

    def filter(self, record: logging.LogRecord) -> bool:
        problem = record.exc_info[1] if record.exc_info else None
        return not isinstance(problem, HttpProcessingError)


def run(settings: Settings, *, reuse_port: bool = False) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once.

    Raises ConfigurationError for a port in use or a server that will not do, and Unavailable when
    Redis cannot be reached.
    """
    logging.getLogger("aiohttp.server").addFilter(_NoUnreadable())
    _allow_files(_FILES)
    calm_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, reuse_port=reuse_port))


def _allow_files(most: int) -> None:
    """Raise the soft limit on open files: 1024 of them is where connections end by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(settings: Settings, *, reuse_port: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, stop)
    url = settings.server_url
    name = f"gateway-{os.getpid()}-{secrets.token_hex(6)}"
    redis_client = client(url, timeout_s=settings.connect_timeout_s)
    try:
        if not await _reach(redis_client, url, stop):
            return
        registry = Registry(redis_client, prefix=settings.prefix)
        exchange = Exchange(
            url, prefix=settings.prefix, name=name, connect_timeout_s=settings.connect_timeout_s
        )
        await exchange.start()
        await registry.start()
        try:
            await _listen(settings, exchange, registry, stop=stop, reuse_port=reuse_port)
        finally:
            await _within_limit(registry.close())
            await _within_limit(exchange.close())
    finally:
        await _within_limit(redis_client.aclose())


async def _within_limit(closing: Awaitable[None]) -> None:
    """Close, but not for ever: redis-py now and then loses the cancellation of a read."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_LIMIT_S):
            await closing


async def _reach(redis_client: redis.asyncio.Redis, url: str, stop: asyncio.Event) -> bool:
    """Wait until the server answers, within the limit, and check it; False: told to stop."""
    end_s = time.monotonic() + _REACH_LIMIT_S
    told = False
    while True:
        try:
            await check_async(redis_client, url)
            return True
        except Unavailable as error:
            if time.monotonic() > end_s:
                raise
            if not told:
                log.warning("%s; trying for %d s", error, _REACH_LIMIT_S)
            told = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _REACH_PAUSE_S)
        if stop.is_set():
            return False


async def _listen(
    settings: Settings,
    exchange: Exchange,
    registry: Registry,
    *,
    stop: asyncio.Event,
    reuse_port: bool,
) -> None:
    gateway = build(settings, exchange, registry)
    runner = web.AppRunner(
        gateway.app,
        access_log=None,
        handler_cancellation=True,  # a client that leaves cancels its request
        keepalive_timeout=_KEEPALIVE_S,
        lingering_time=_LINGER_S,
        shutdown_timeout=settings.drain_s,
    )
    await runner.setup()
    try:
        site = web.TCPSite(
            runner, settings.host, settings.port, backlog=_BACKLOG, reuse_port=reuse_port
        )
        try:
            await site.start()
        except OSError as error:
            raise _refusal(settings, error) from None
        host, port = runner.addresses[0][:2]
        shown_host = f"[{host}]" if ":" in host else host
        log.info("gateway listening on http://%s:%d", shown_host, port)
        await stop.wait()
        log.info("gateway draining", extra={"in_flight": gateway.admission.in_flight})
    finally:
        await _drain(runner, gateway.admission)


async def _drain(runner: web.AppRunner, admission: Admission) -> None:
    """Take nothing new, and give what was begun its time."""
    admission.draining = True
    await runner.cleanup()
    log.info("gateway stopped", extra={"unfinished": admission.in_flight})


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        log.warning("a second signal: ending at once")
        os._exit(1)
    stop.set()


def _refusal(settings: Settings, error: OSError) -> ConfigurationError:
    where = f"{settings.host}:{settings.port}"
    if error.errno != errno.EADDRINUSE:
        return ConfigurationError(f"cannot listen on {where}: {error}")
    return ConfigurationError(
        f"port {settings.port} on {settings.host} is in use: stop what uses it, or choose another "
        f"with --port {settings.port + 1}"
    )
