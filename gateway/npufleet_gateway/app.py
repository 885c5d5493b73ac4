"""The wiring of one gateway: its parts and its routes.

Knows nothing of sockets, signals or processes.
"""

from dataclasses import dataclass

from aiohttp import web

from npufleet.endpoint import shown
from npufleet.exchange import Exchange
from npufleet.registry import Registry
from npufleet.settings import Settings
from npufleet_gateway.admission import Admission
from npufleet_gateway.boundary import Boundary
from npufleet_gateway.inference import Inference, Terms
from npufleet_gateway.metrics import Metrics
from npufleet_gateway.pages import Pages


@dataclass(frozen=True, slots=True)
class Gateway:
    """The application, and the switch that makes it take no more requests."""

    app: web.Application
    admission: Admission


def build(settings: Settings, exchange: Exchange, registry: Registry) -> Gateway:
    """A gateway over connections that their owner starts and closes."""
    max_bytes = settings.max_request_mb << 20
    admission = Admission(settings.max_in_flight)
    metrics = Metrics()
    boundary = Boundary(metrics, max_bytes=max_bytes)
    inference = Inference(
        exchange,
        registry,
        admission=admission,
        metrics=metrics,
        terms=Terms(max_bytes=max_bytes, reply_ttl_s=settings.reply_ttl_s),
    )
    pages = Pages(
        exchange,
        registry,
        admission=admission,
        metrics=metrics,
        redis_shown=shown(settings.server_url),
    )
    app = web.Application(middlewares=[boundary.middleware()], client_max_size=max_bytes)
    for path in ("/v1/infer", "/v1/models/{model}/infer"):
        app.router.add_post(path, inference.answer, expect_handler=boundary.expect)
    app.router.add_get("/", pages.index)
    app.router.add_get("/v1/models", pages.models)
    app.router.add_get("/v1/models/{model}", pages.model)
    app.router.add_get("/health", pages.health)
    app.router.add_get("/livez", pages.livez)
    app.router.add_get("/readyz", pages.readyz)
    app.router.add_get("/metrics", pages.metrics)
    return Gateway(app, admission)
