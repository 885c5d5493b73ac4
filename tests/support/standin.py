"""A stand-in for a worker, made of plain Redis commands as the protocol tells them.

It serves `double` (y = 2 * x + 1, rows of four FP32), `measure` (an image's length in bytes) and
`both` (two inputs), and says what the caller's tests ask it to.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import redis

from npufleet import tensors, wire
from npufleet.errors import NpufleetError
from npufleet.keys import GROUP, FleetKeys, ModelKeys
from npufleet.signature import Limits, Signature, TensorSpec, check_inputs
from npufleet.wire import Body, Entry, Reply
from tests.support.valkey import connect

SIGNATURES = {
    s.model: s
    for s in (
        Signature(
            "double",
            1,
            (TensorSpec("x", "FP32", (-1, 4)),),
            (TensorSpec("y", "FP32", (-1, 4)),),
            limits=Limits(timeout_ms=10_000, max_queue=1000),
        ),
        Signature(
            "measure",
            2,
            (TensorSpec("image", "UINT8", (-1, 8, 8, 3)),),
            (TensorSpec("length", "INT64", (-1, 1)),),
            image_input="image",
            classifies=True,
        ),
        Signature(
            "both",
            1,
            (TensorSpec("ids", "INT64", (-1, 2)), TensorSpec("words", "BYTES", (-1, 1))),
            (TensorSpec("ids", "INT64", (-1, 2)), TensorSpec("words", "BYTES", (-1, 1))),
        ),
    )
}


@dataclass
class StandIn:
    """What it did, and what it shall do; while `held` is set it takes nothing more."""

    url: str
    prefix: str
    hint: bool = True
    held: threading.Event = field(default_factory=threading.Event)
    resting: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)
    served: list[Entry] = field(default_factory=list)
    refuse: Callable[[Entry, Body], NpufleetError | None] = lambda _entry, _body: None

    def keys(self, model: str) -> ModelKeys:
        return FleetKeys(self.prefix).model(model)

    def hold(self) -> None:
        """From now on it takes nothing; `held.clear()` lets it go on."""
        self.resting.clear()
        self.held.set()
        assert self.resting.wait(10)

    def register(self, client: "redis.Redis", *, alive: bool = True) -> None:
        for model, signature in SIGNATURES.items():
            keys = self.keys(model)
            client.sadd(FleetKeys(self.prefix).models, model)
            client.hset(keys.signature, "signature", signature.to_json())
            if alive:
                seconds, micros = client.time()
                client.zadd(keys.workers, {"stand-in": seconds * 1000 + micros // 1000 + 3_600_000})
            for lane in keys.lanes:
                client.xgroup_create(lane, GROUP, id="0", mkstream=True)

    def run(self) -> None:
        with connect(self.url) as client:
            while not self.stop.is_set():
                if self.held.is_set():
                    self.resting.set()
                    self.stop.wait(0.01)
                    continue
                self.resting.clear()
                for model in SIGNATURES:
                    for lane in self.keys(model).lanes:
                        self._take(client, model, lane)
        self.stopped.set()

    def _take(self, client: "redis.Redis", model: str, lane: str) -> None:
        answer: Any = client.xreadgroup(GROUP, "stand-in", {lane: ">"}, count=64)
        for _, rows in answer or []:
            for entry_id, found in rows:
                self._answer(client, model, lane, entry_id, found)

    def _answer(
        self, client: "redis.Redis", model: str, lane: str, entry_id: bytes, found: Any
    ) -> None:
        keys = self.keys(model)
        flat = [part for pair in found.items() for part in pair]
        entry = wire.parse_entry(flat, body_prefix=keys.body_prefix)
        raw: Any = entry.body if entry.body is not None else client.get(str(entry.body_key))
        self.served.append(entry)
        reply = self._computed(model, entry, wire.unpack_body(raw))
        packed = wire.pack_reply(reply)
        pipeline = client.pipeline(transaction=True)
        pipeline.xack(lane, GROUP, entry_id)
        pipeline.xdel(lane, entry_id)
        pipeline.rpush(keys.reply(entry.id), packed)
        pipeline.pexpire(keys.reply(entry.id), 1000 * (entry.reply_ttl_s or 86_400))
        if entry.brought:
            pipeline.set(keys.seen(entry.id), f"done:{wire.digest(raw)}:", ex=3600)
        if entry.notify and self.hint:
            pipeline.publish(FleetKeys(self.prefix).notify(entry.notify), packed)
        pipeline.execute()

    def _computed(self, model: str, entry: Entry, body: Body) -> Reply:
        refusal = self.refuse(entry, body)
        if refusal is not None:
            return Reply(entry.id, model=model, error=refusal)
        try:
            check_inputs(SIGNATURES[model], body.inputs)
        except NpufleetError as error:
            return Reply(entry.id, model=model, error=error)
        predictions = None
        outputs: dict[str, Any] = dict(body.inputs)
        if model == "double":
            outputs = {"y": tensors.encode(2 * tensors.decode(body.inputs["x"]) + 1)}
        elif model == "measure":
            size = len(body.inputs["image"].get("image", b""))
            outputs = {"length": tensors.encode(np.array([[size]]))}
            predictions = [[{"label": "bytes", "index": size, "probability": 1.0}]]
        return Reply(
            entry.id,
            model=model,
            version=SIGNATURES[model].version,
            outputs=outputs,
            predictions=predictions,
            timing_ms={"executed": 0.5},
            batch_size=1,
            worker="stand-in",
            attempt=1,
        )


@contextmanager
def standing_in(url: str, prefix: str) -> Iterator[StandIn]:
    """A stand-in that serves its models until the block is left."""
    worker = StandIn(url, prefix)
    with connect(url) as client:
        worker.register(client)
    thread = threading.Thread(target=worker.run, name="stand-in worker")
    thread.start()
    try:
        yield worker
    finally:
        worker.stop.set()
        thread.join(10)
