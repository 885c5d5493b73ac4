"""A worker's own HTTP port: /livez, /readyz, /metrics. Knows nothing of requests or models."""

from collections.abc import Callable

from aiohttp import web

from npufleet.errors import ConfigurationError
from npufleet_worker.metrics import CONTENT_TYPE, Metrics


class Pages:
    """Serves the pages; `reasons` says why this worker is not ready (empty: it is)."""

    def __init__(self, metrics: Metrics, reasons: Callable[[], list[str]]) -> None:
        self._metrics = metrics
        self._reasons = reasons
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens, and says on which port; ConfigurationError where it is taken."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._page),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigurationError(
                f"the worker cannot listen on {host}:{port}: {error.strerror or error}; choose "
                "another NPUFLEET_WORKER_HTTP_PORT, or 0 for any"
            ) from None
        bound: int = self._runner.addresses[0][1]
        return bound

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _livez(self, _: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _readyz(self, _: web.Request) -> web.Response:
        reasons = self._reasons()
        body = {"ready": not reasons, "reasons": reasons}
        return web.json_response(body, status=503 if reasons else 200)

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.page(), headers={"Content-Type": CONTENT_TYPE})
