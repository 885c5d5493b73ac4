"""A worker of few lines for tests of callers: reads real lanes, answers by a function per model.

It registers the models, acknowledges, and replies by RPUSH and PUBLISH as docs/protocol.md says.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from redis.asyncio import Redis

from npufleet import wire
from npufleet.endpoint import client
from npufleet.errors import NpufleetError
from npufleet.keys import GROUP, FleetKeys
from npufleet.signature import Signature
from npufleet.wire import Body, Entry, Reply

Answer = Callable[[Body], Reply | None]
"""The reply to a body (its id and model are filled in), or None to leave the caller waiting."""


@dataclass
class ScriptedWorker:
    """What it has seen: the entries, in the order of their arrival."""

    models: Sequence[tuple[Signature, Answer]]
    entries: list[tuple[str, Entry]] = field(default_factory=list)
    """Lane and entry."""


@asynccontextmanager
async def scripted_worker(
    url: str, prefix: str, models: Sequence[tuple[Signature, Answer]]
) -> AsyncIterator[ScriptedWorker]:
    """A running worker; it has registered its models before the block begins."""
    worker = ScriptedWorker(models)
    keys = FleetKeys(prefix)
    redis = client(url, timeout_s=30)
    for signature, _ in models:
        model = keys.model(signature.model)
        await redis.sadd(keys.models, signature.model)
        await redis.hset(model.signature, "signature", signature.to_json())
        # A heartbeat from the future, so that no slow test loses its worker.
        await redis.zadd(model.workers, {"scripted": time.time() * 1000 + 3_600_000})
        for lane in model.lanes:
            await redis.xgroup_create(lane, GROUP, id="0", mkstream=True)
    task = asyncio.create_task(_serve(worker, redis, keys))
    try:
        yield worker
    finally:
        while not task.done():  # redis-py now and then loses the cancellation of a read
            task.cancel()
            await asyncio.wait([task], timeout=1)
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await redis.aclose()


async def _serve(worker: ScriptedWorker, redis: Redis, keys: FleetKeys) -> None:
    lanes = {
        lane.encode(): (signature.model, lane, answer)
        for signature, answer in worker.models
        for lane in keys.model(signature.model).lanes
    }
    while True:
        read: Any = await redis.xreadgroup(
            GROUP, "scripted", dict.fromkeys(lanes, ">"), count=64, block=500
        )
        for lane, entries in read or []:
            model, lane_name, answer = lanes[lane]
            for stream_id, fields in entries:
                flat = [part for pair in fields.items() for part in pair]
                model_keys = keys.model(model)
                entry = wire.parse_entry(flat, body_prefix=model_keys.body_prefix)
                worker.entries.append((lane_name.rpartition(":")[2], entry))
                stored: Any = await redis.get(entry.body_key) if entry.body_key else entry.body
                reply = answer(wire.unpack_body(stored))
                await redis.xack(lane_name, GROUP, stream_id)
                await redis.xdel(lane_name, stream_id)
                if reply is None:
                    continue
                raw = wire.pack_reply(replace(reply, id=entry.id, model=model))
                await redis.rpush(model_keys.reply(entry.id), raw)
                await redis.expire(model_keys.reply(entry.id), entry.reply_ttl_s or 60)
                if entry.notify:
                    await redis.publish(keys.notify(entry.notify), raw)


def failing(error: NpufleetError) -> Answer:
    return lambda _: Reply(id="", error=error)


def outputs(tensors: Mapping[str, Mapping[str, object]]) -> Reply:
    """A right reply with the particulars that every worker sends along."""
    return Reply(
        id="",
        version=1,
        outputs=tensors,
        timing_ms={"queued": 0.5, "executed": 1.25},
        batch_size=1,
        worker="scripted",
        attempt=1,
    )
