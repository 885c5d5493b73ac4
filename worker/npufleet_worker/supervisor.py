"""One worker process: its models, its connections, its pages, its end. The wiring of the worker.

Knows nothing of how a model is served: that is each `Service`'s own.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from npufleet import __version__
from npufleet.connection import Link, ReplyError
from npufleet.endpoint import client, resolve
from npufleet.errors import ConfigurationError, NpufleetError, Unavailable
from npufleet.keys import FleetKeys
from npufleet.server import check_async
from npufleet.settings import Settings
from npufleet_worker.metrics import Metrics
from npufleet_worker.pages import Pages
from npufleet_worker.presence import Presence
from npufleet_worker.repository import ModelConfig, load_repository
from npufleet_worker.service import Host, Service

log = logging.getLogger(__name__)

_LEAVE_LIMIT_S = 2.0
"""For giving back, once draining has ended."""


class Supervisor:
    """Serves every model of the repository until it is told to stop."""

    def __init__(self, settings: Settings, *, redis_url: str) -> None:
        self._settings = settings
        self._redis_url = redis_url
        self._endpoint = resolve(redis_url)
        name = settings.worker_name or socket.gethostname() or "worker"
        self._name = name
        # Stable for people, new for the queue: a new process does not own what the old one held.
        self._consumer = f"{name}.{secrets.token_hex(4)}"
        self._metrics = Metrics()
        self._pages = Pages(self._metrics, self.reasons)
        self._threads = ThreadPoolExecutor(settings.decode_threads, "decode")
        self._link = Link(
            self._endpoint,
            name=self._consumer,
            connect_timeout_s=settings.connect_timeout_s,
        )
        self._services: list[Service] = []
        self._presence: Presence | None = None
        self._problems: dict[str, str] = {}
        self._loading = True
        self._stop = asyncio.Event()
        self._signals = 0
        self._broken: BaseException | None = None

    def reasons(self) -> list[str]:
        """Why this worker is not ready; empty when it is."""
        if self._stop.is_set():
            return ["stopping"]
        reasons = [f"{name}: {problem}" for name, problem in self._problems.items()]
        if self._loading:
            reasons.append("loading models")
        if not self._link.connected:
            reasons.append("no connection to Redis")
        return reasons + [reason for service in self._services for reason in service.reasons()]

    async def run(self) -> None:
        """Starts, serves and stops; ConfigurationError where nothing can be served."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.set_exception_handler(self._on_error)
        settings = self._settings
        port = await self._pages.start(settings.worker_http_host, settings.worker_http_port)
        try:
            await self._start(port)
            await self._serve()
        finally:
            await self._close()

    async def _start(self, port: int) -> None:
        configs = self._configs()
        redis = client(self._redis_url, timeout_s=self._settings.connect_timeout_s)
        try:
            await check_async(redis, self._redis_url)
        finally:
            await redis.aclose()
        await self._link.start()
        host = Host(
            settings=self._settings,
            endpoint=self._endpoint,
            link=self._link,
            keys=FleetKeys(self._settings.prefix),
            name=self._name,
            consumer=self._consumer,
            threads=self._threads,
            metrics=self._metrics,
        )
        for config in configs:
            await self._load(host, config)
        self._loading = False
        if not self._services:
            raise ConfigurationError(
                "no model can be served: "
                + "; ".join(f"{name}: {problem}" for name, problem in self._problems.items())
            )
        facts = {
            "worker": self._name,
            "models": ",".join(service.model for service in self._services),
            "pages": f"http://{self._settings.worker_http_host}:{port}",
        }
        self._presence = Presence(
            self._link,
            FleetKeys(self._settings.prefix).worker(self._name),
            {**facts, "consumer": self._consumer, "pid": os.getpid(), "npufleet": __version__},
            self._settings.lease_s,
        )
        log.info("worker serves", extra=facts)

    def _configs(self) -> tuple[ModelConfig, ...]:
        folder: Path = self._settings.models
        found = load_repository(folder)
        for name, problem in found.problems.items():
            log.error("model cannot be served: %s", problem, extra={"model": name})
            self._problems[name] = problem.message
        for config in found.configs:
            if config.fallback is not None:
                log.warning(
                    "model.toml names a fallback, which this release does not use yet",
                    extra={"model": config.name, "fallback": config.fallback},
                )
        if not found.configs and not found.problems:
            raise ConfigurationError(
                f"{folder.resolve()} holds no model; put one at <name>/1/model.onnx, or name "
                "another folder with --models"
            )
        return found.configs

    async def _load(self, host: Host, config: ModelConfig) -> None:
        if self._stop.is_set():
            return
        service = Service(host, config)
        try:
            await service.start()
        except ConfigurationError as error:
            log.error("model cannot be served: %s", error, extra={"model": config.name})
            self._problems[config.name] = error.message
            await service.close()
            return
        self._services.append(service)

    async def _serve(self) -> None:
        """Until a signal, or until a task of a service ends, which none does by itself."""
        stopped = asyncio.create_task(self._stop.wait())
        assert self._presence is not None
        shown = asyncio.create_task(self._presence.keep())
        tasks = [task for service in self._services for task in service.tasks]
        try:
            done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            shown.cancel()
        self._stop.set()  # not ready from now on, whatever the reason
        await self._drain()
        for task in done:
            task.result()
        if self._broken is not None:
            raise self._broken

    async def _drain(self) -> None:
        log.info("worker drains", extra={"worker": self._name})
        limit_s = self._settings.drain_s
        try:
            async with asyncio.timeout(limit_s + _LEAVE_LIMIT_S):
                await asyncio.gather(*(service.drain(limit_s) for service in self._services))
                if self._presence is not None:
                    await self._presence.leave()
        except TimeoutError:
            log.warning("cannot give entries back in time, their leases will")
        except (NpufleetError, ReplyError) as error:
            log.warning("cannot give entries back, their leases will: %s", error)

    async def _close(self) -> None:
        for service in self._services:
            await service.close()
        await self._link.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._pages.close()

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error that nobody owns: whom it concerns would be held, leases and all, for ever.

        So the worker ends, gives back what it holds, and is started again by whoever watches it.
        """
        loop.default_exception_handler(context)
        error = context.get("exception")
        of_a_socket = "transport" in context or "protocol" in context
        if error is not None and not of_a_socket and not isinstance(error, NpufleetError):
            self._broken = error
            self._stop.set()

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            log.warning("a second signal: ending at once")
            os._exit(1)
        self._stop.set()


async def run(settings: Settings, *, redis_url: str) -> None:
    """One worker, from its start to its end.

    Raises ConfigurationError or Unavailable where it cannot start.
    """
    try:
        await Supervisor(settings, redis_url=redis_url).run()
    except ReplyError as error:
        raise Unavailable(f"Redis refused: {error}") from error
