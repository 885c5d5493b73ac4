"""A gateway for tests: the real application on a real port, over a real server and worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from npufleet import tensors
from npufleet.endpoint import client
from npufleet.errors import InvalidImage
from npufleet.exchange import Exchange
from npufleet.registry import Registry
from npufleet.settings import load
from npufleet.signature import Limits, Signature, TensorSpec
from npufleet.wire import Body, Reply
from npufleet_gateway.app import Gateway, build
from tests.support.scripted_worker import (
    Answer,
    ScriptedWorker,
    failing,
    outputs,
    scripted_worker,
)

PNG = b"\x89PNG\r\n\x1a\n and whatever follows"


@dataclass(frozen=True)
class Running:
    """A gateway that runs: `http` resolves paths against it."""

    http: aiohttp.ClientSession
    url: str
    gateway: Gateway
    exchange: Exchange
    registry: Registry
    worker: ScriptedWorker


@asynccontextmanager
async def running_gateway(redis_url: str, prefix: str, **settings: Any) -> AsyncIterator[Running]:
    """A gateway process's inside, with `MODELS` served behind it."""
    found = load({"redis_url": redis_url, "prefix": prefix, **settings}, environ={})
    redis = client(redis_url)
    exchange = Exchange(redis_url, prefix=prefix, name=f"gw-{prefix}")
    registry = Registry(redis, prefix=prefix)
    async with scripted_worker(redis_url, prefix, MODELS) as worker:
        await exchange.start()
        await registry.start()
        gateway = build(found, exchange, registry)
        runner = web.AppRunner(gateway.app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}".format(*runner.addresses[0])
        try:
            async with aiohttp.ClientSession(url) as http:
                yield Running(http, url, gateway, exchange, registry, worker)
        finally:
            await runner.cleanup()
            await registry.close()
            await exchange.close()
            await redis.aclose()


def _signature(
    model: str, inputs: dict[str, tuple[str, list[int]]], out: list[str], **other: Any
) -> Signature:
    specs = tuple(TensorSpec(name, dtype, tuple(dims)) for name, (dtype, dims) in inputs.items())
    outs = tuple(TensorSpec(name, "FP32", (-1, -1)) for name in out)
    return Signature(model=model, version=1, inputs=specs, outputs=outs, **other)


DOUBLE = _signature("double", {"x": ("FP32", [-1, 4])}, ["y"])
PHOTO = _signature(
    "photo", {"image": ("UINT8", [-1, 8, 8, 3])}, ["p"], image_input="image", classifies=True
)
WORDS = _signature("words", {"text": ("BYTES", [-1])}, ["upper"])
PAIR = _signature("pair", {"a": ("FP32", [-1, 2]), "n": ("INT64", [-1])}, ["sum", "n"])
FLAGS = _signature("flags", {"on": ("BOOL", [-1, 2])}, ["off"])
FREE = _signature("free", {"x": ("INT8", [-1, -1])}, ["y"])
STUCK = _signature("stuck", {"x": ("FP32", [-1, 4])}, ["y"], limits=Limits(timeout_ms=300))
REFUSING = _signature("refusing", {"x": ("FP32", [-1, 4])}, ["y"])


def _double(body: Body) -> Reply:
    return outputs({"y": tensors.encode(tensors.decode(body.inputs["x"]) * 2 + 1)})


def _photo(body: Body) -> Reply:
    """Says how many bytes it saw, so that a mixed-up answer shows."""
    rows = [{"label": "seen", "index": len(body.inputs["image"]["image"]), "probability": 0.5}]
    return Reply(id="", version=1, predictions=[rows], batch_size=1, worker="scripted", attempt=1)


def _words(body: Body) -> Reply:
    found = tensors.decode(body.inputs["text"])
    return outputs({"upper": tensors.encode(np.array([w.decode().upper() for w in found], object))})


def _pair(body: Body) -> Reply:
    a, n = (tensors.decode(body.inputs[name]) for name in ("a", "n"))
    return outputs({"sum": tensors.encode(a.sum(axis=1)), "n": tensors.encode(n)})


def _flags(body: Body) -> Reply:
    return outputs({"off": tensors.encode(~tensors.decode(body.inputs["on"]))})


def _free(body: Body) -> Reply:
    return outputs({"y": tensors.encode(-tensors.decode(body.inputs["x"]))})


MODELS: list[tuple[Signature, Answer]] = [
    (DOUBLE, _double),
    (PHOTO, _photo),
    (WORDS, _words),
    (PAIR, _pair),
    (FLAGS, _flags),
    (FREE, _free),
    (STUCK, lambda _: None),
    (REFUSING, failing(InvalidImage("the image is cut short"))),
]
