"""A caller's side of the wire against a real server, with a minimal worker in the test."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from npufleet import wire
from npufleet.endpoint import client
from npufleet.errors import (
    DeadlineExceeded,
    IdConflict,
    InvalidParameter,
    Overloaded,
    Unavailable,
)
from npufleet.exchange import Exchange
from npufleet.keys import GROUP, FleetKeys
from npufleet.registry import Registry
from npufleet.scripts import FINISH
from npufleet.signature import Limits, Signature, TensorSpec
from npufleet.wire import Entry, Reply
from tests.support.waiting import wait_until_async

SIGNATURE = Signature(
    model="m",
    version=1,
    inputs=(TensorSpec("x", "FP32", (-1, 4)),),
    outputs=(TensorSpec("y", "FP32", (-1, 4)),),
)


class MinimalWorker:
    """Answers every entry with its own body as the prediction; `hints` off loses all hints."""

    def __init__(self, url: str, prefix: str, *, hints: bool = True) -> None:
        self.client: Any = client(url, timeout_s=10)
        self.keys = FleetKeys(prefix)
        self.model = self.keys.model("m")
        self.hints = hints
        self.served: list[str] = []
        self.stopping = False  # not by cancelling: redis-py now and then loses that

    async def run(self) -> None:
        lanes = self.model.lanes
        for lane in lanes:
            await self.client.xgroup_create(lane, GROUP, id="0", mkstream=True)
        while not self.stopping:
            read = await self.client.xreadgroup(
                GROUP, "w", dict.fromkeys(lanes, ">"), count=10, block=100
            )
            for lane, entries in read or []:
                for entry_id, fields in entries:
                    flat = [part for pair in fields.items() for part in pair]
                    await self.answer(lane.decode(), entry_id, flat)

    async def answer(self, lane: str, entry_id: bytes, flat: list[bytes]) -> None:
        entry = wire.parse_entry(flat, body_prefix=self.model.body_prefix)
        body = entry.body
        if entry.body_key:
            body = await self.client.get(entry.body_key)
        self.served.append(entry.id)
        keys = [*self.model.lanes, self.model.dead, self.model.cancelled]
        keys += [self.model.reply(entry.id), self.model.seen(entry.id)]
        reply = wire.pack_reply(Reply(id=entry.id, model="m", predictions=[body]))
        channel = self.keys.notify(entry.notify) if entry.notify and self.hints else ""
        lane_at = keys.index(lane) + 1
        item = ["ok", lane_at, entry_id, entry.id, 6, 60_000, 7 if entry.brought else 0, 0]
        args = [GROUP, "w", 16_384, 100, 1000, 1, *item, channel, reply, "", ""]
        await self.client.eval(FINISH.text.decode(), len(keys), *keys, *args)


@pytest.fixture
async def exchange(redis_url: str, prefix: str) -> AsyncIterator[Exchange]:
    exchange = Exchange(redis_url, prefix=prefix, name=f"gw-{prefix}")
    await exchange.start()
    yield exchange
    await exchange.close()


@pytest.fixture
async def worker(redis_url: str, prefix: str) -> AsyncIterator[MinimalWorker]:
    worker = MinimalWorker(redis_url, prefix)
    task = asyncio.create_task(worker.run())
    yield worker
    worker.stopping = True
    await task
    await worker.client.aclose()


def entry_of(exchange: Exchange, body: bytes = b"question", **fields: Any) -> Entry:
    return Entry(id=wire.new_id(), body=body, notify=exchange.name, reply_ttl_s=60, **fields)


async def infer(exchange: Exchange, entry: Entry, timeout_s: float = 20.0) -> Reply:
    return await exchange.infer(SIGNATURE, entry, lane="normal", timeout_s=timeout_s)


async def test_a_thousand_callers_each_get_their_own_answer(
    exchange: Exchange, worker: MinimalWorker
) -> None:
    """Every reply reaches the caller whose request it answers; large bodies too."""
    bodies = [f"question {n}".encode() * (10_000 if n % 100 == 0 else 1) for n in range(1000)]

    replies = await asyncio.gather(*(infer(exchange, entry_of(exchange, b)) for b in bodies))

    assert [reply.predictions for reply in replies] == [[body] for body in bodies]
    assert exchange.waiting == 0


async def test_an_entry_that_cannot_be_sent_fails_alone(
    exchange: Exchange, worker: MinimalWorker
) -> None:
    """Half a character in a text: an error for it, an answer for what was sent beside it."""
    bad, good = entry_of(exchange, version="\ud800"), entry_of(exchange)

    error, reply = await asyncio.gather(
        infer(exchange, bad), infer(exchange, good), return_exceptions=True
    )

    assert isinstance(error, InvalidParameter)
    assert isinstance(reply, Reply)
    assert reply.ok
    assert exchange.waiting == 0


async def test_a_lost_hint_costs_time_but_not_the_answer(
    exchange: Exchange, worker: MinimalWorker
) -> None:
    """The key is the truth: a reply that nobody announced is found."""
    worker.hints = False

    reply = await infer(exchange, entry_of(exchange))

    assert reply.predictions == [b"question"]


async def test_connections_cut_by_the_server_come_back(
    exchange: Exchange, worker: MinimalWorker, redis_client: Any
) -> None:
    """Both connections are cut under way: the waiting request is still answered, and later ones."""
    worker.hints = False
    waiting = asyncio.create_task(infer(exchange, entry_of(exchange)))
    await wait_until_async(lambda: _true(bool(worker.served)), what="the entry to be served")
    for row in redis_client.client_list():
        if row["name"].startswith(exchange.name):
            redis_client.execute_command("CLIENT", "KILL", "ID", row["id"])

    assert (await waiting).ok
    await wait_until_async(lambda: _true(exchange.connected), what="both links to be back")
    worker.hints = True
    assert (await infer(exchange, entry_of(exchange))).ok


async def _true(value: bool) -> bool:
    return value


async def test_no_answer_is_deadline_exceeded(exchange: Exchange) -> None:
    """Without a worker the wait ends at the limit, with the error for that."""
    with pytest.raises(DeadlineExceeded):
        await infer(exchange, entry_of(exchange), timeout_s=0.05)


async def test_a_full_lane_is_refused(exchange: Exchange) -> None:
    """The bound of the lane holds, and says so."""
    small = replace(SIGNATURE, limits=Limits(max_queue=2))
    for _ in range(2):
        await exchange.submit(small, entry_of(exchange), lane="normal")

    with pytest.raises(Overloaded, match="bound is 2"):
        await exchange.submit(small, entry_of(exchange), lane="normal")


async def test_a_brought_id_is_run_once_and_answered_every_time(
    exchange: Exchange, worker: MinimalWorker
) -> None:
    """Sent again, also while the first is under way, it joins it; another body is refused."""
    wire_id = wire.derived_id("", "order-17")
    entry = Entry(id=wire_id, body=b"q", notify=exchange.name, brought=True, reply_ttl_s=60)

    first = await asyncio.gather(*(infer(exchange, entry) for _ in range(5)))
    again = await infer(exchange, entry)

    assert [reply.predictions for reply in (*first, again)] == [[b"q"]] * 6
    assert worker.served == [wire_id]
    with pytest.raises(IdConflict):
        await infer(exchange, replace(entry, body=b"other"))


async def test_a_caller_that_goes_leaves_nothing(
    exchange: Exchange, redis_client: Any, redis_url: str, prefix: str
) -> None:
    """A cancelled call marks its id, and its late reply is deleted at once."""
    entry = entry_of(exchange)
    task = asyncio.create_task(infer(exchange, entry))
    keys = FleetKeys(prefix).model("m")
    await wait_until_async(lambda: _true(redis_client.xlen(keys.lane("normal")) == 1), what="entry")

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await wait_until_async(lambda: _true(redis_client.zcard(keys.cancelled) == 1), what="the mark")
    late = MinimalWorker(redis_url, prefix)
    ((entry_id, fields),) = redis_client.xrange(keys.lane("normal"))
    redis_client.xgroup_create(keys.lane("normal"), GROUP, id="0")
    redis_client.xreadgroup(GROUP, "w", {keys.lane("normal"): ">"})
    flat = [part for pair in fields.items() for part in pair]
    await late.answer(keys.lane("normal"), entry_id, flat)
    await late.client.aclose()
    left = [keys.reply(entry.id), keys.cancelled]
    await wait_until_async(lambda: _true(redis_client.exists(*left) == 0), what="nothing left")


async def test_a_server_that_is_away_is_unavailable() -> None:
    """Nothing listens there: one clear error, no traceback of a library."""
    exchange = Exchange("unix:///tmp/npufleet-no-such.sock", prefix="t", name="t")

    with pytest.raises(Unavailable, match="cannot reach Redis"):
        await exchange.start()


async def test_the_registry_knows_live_workers_and_names_the_models(
    redis_client: Any, redis_url: str, prefix: str
) -> None:
    """What workers publish is what callers see; a heartbeat that is old does not count."""
    keys = FleetKeys(prefix)
    redis_client.sadd(keys.models, "m")
    redis_client.hset(keys.model("m").signature, "signature", SIGNATURE.to_json())
    seconds, _ = redis_client.time()
    redis_client.zadd(keys.model("m").workers, {"live": seconds * 1000, "dead": 1000})
    source = client(redis_url)
    registry = Registry(source, prefix=prefix)
    await registry.start()

    state = await registry.get("m")
    with pytest.raises(Exception, match="models: m"):
        await registry.get("n")
    await registry.close()
    await source.aclose()

    assert state.signature == SIGNATURE
    assert state.workers == ("live",)
    assert state.queued == {"high": 0, "normal": 0, "low": 0}


async def test_a_deadline_holds_while_the_server_answers_nothing(
    exchange: Exchange, redis_client: Any
) -> None:
    """Neither submit nor the last look makes a caller wait for a stalled server."""
    redis_client.client_pause(4000)

    async with asyncio.timeout(3):
        with pytest.raises(DeadlineExceeded):
            await infer(exchange, entry_of(exchange), timeout_s=0.1)

    redis_client.client_unpause()


async def test_who_waits_at_the_end_is_told(redis_url: str, prefix: str) -> None:
    """Closing leaves nobody waiting for its deadline."""
    exchange = Exchange(redis_url, prefix=prefix, name=prefix)
    await exchange.start()
    task = asyncio.create_task(infer(exchange, entry_of(exchange), timeout_s=60))
    await asyncio.sleep(0)
    assert exchange.waiting == 1

    await exchange.close()

    async with asyncio.timeout(5):
        with pytest.raises(Unavailable):
            await task
