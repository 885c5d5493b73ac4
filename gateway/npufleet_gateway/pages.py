"""What the gateway shows of the fleet and of itself: health, models, metrics, the index.

Knows nothing of inference.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from npufleet import __version__
from npufleet.errors import Unavailable
from npufleet.exchange import Exchange
from npufleet.registry import ModelState, Registry
from npufleet_gateway.admission import Admission
from npufleet_gateway.metrics import CONTENT_TYPE, Metrics

_ENDPOINTS = {
    "POST /v1/infer": "inference; JSON, an image, a form or a raw tensor",
    "POST /v1/models/{model}/infer": "the same, with the model in the URL",
    "GET /v1/models": "the models: inputs, outputs, workers, queues",
    "GET /v1/models/{model}": "one of them",
    "GET /health": "the fleet in one page; 200 or 503",
    "GET /livez": "whether this process lives",
    "GET /readyz": "whether this process can take requests",
    "GET /metrics": "metrics for Prometheus",
}


class Pages:
    """The handlers of every GET."""

    def __init__(
        self,
        exchange: Exchange,
        registry: Registry,
        *,
        admission: Admission,
        metrics: Metrics,
        redis_shown: str,
    ) -> None:
        self._exchange = exchange
        self._registry = registry
        self._admission = admission
        self._metrics = metrics
        self._redis_shown = redis_shown

    async def index(self, _: web.Request) -> web.Response:
        return _json({"name": "npufleet", "version": __version__, "endpoints": _ENDPOINTS})

    async def models(self, _: web.Request) -> web.Response:
        states = await self._registry.all()
        return _json({"models": [_model(states[name]) for name in sorted(states)]})

    async def model(self, request: web.Request) -> web.Response:
        return _json(_model(await self._registry.get(request.match_info["model"])))

    async def livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(self, _: web.Request) -> web.Response:
        reason = self._unready()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    async def metrics(self, _: web.Request) -> web.Response:
        body = await asyncio.to_thread(self._metrics.exposition)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def health(self, _: web.Request) -> web.Response:
        try:
            states = await self._registry.all()
        except Unavailable:
            states = {}
        unserved = [name for name, state in sorted(states.items()) if not state.workers]
        reason = self._unready() or _unserved(states, unserved)
        unavailable = bool(self._unready()) or len(unserved) == len(states)
        status = "unavailable" if unavailable else "degraded" if unserved else "ok"
        page = {
            "status": status,
            **({"reason": reason} if reason else {}),
            "redis": {"url": self._redis_shown, "connected": self._exchange.connected},
            "models": {name: _health(state) for name, state in sorted(states.items())},
            "gateway": {
                "version": __version__,
                "pid": os.getpid(),
                "in_flight": self._admission.in_flight,
                "draining": self._admission.draining,
            },
        }
        return _json(page, status=503 if unavailable else 200)

    def _unready(self) -> str | None:
        """Why this process takes no requests; None when it does."""
        if self._admission.draining:
            return "this gateway is shutting down"
        if not self._exchange.connected:
            return "Redis cannot be reached"
        return None


def _unserved(states: Mapping[str, ModelState], unserved: list[str]) -> str | None:
    if not states:
        return "no worker has registered a model"
    return f"no worker serves {', '.join(unserved)}" if unserved else None


def _health(state: ModelState) -> dict[str, Any]:
    return {
        "version": state.signature.version,
        "workers": state.workers,
        "queued": state.queued,
    }


def _model(state: ModelState) -> dict[str, Any]:
    return {**asdict(state.signature), "workers": state.workers, "queued": state.queued}


def _json(content: Mapping[str, Any], *, status: int = 200) -> web.Response:
    body = orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    return web.Response(status=status, body=body, content_type="application/json")
