"""What docs/protocol.md promises and no example shows, on a real fleet."""

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from npufleet import wire
from npufleet.keys import ModelKeys
from tests.support.fleets import RunningFleet
from tests.support.valkey import connect
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import redis

KEYS = ModelKeys("npufleet", "double")
TENSOR = {"dtype": "FP32", "shape": [1, 4], "data": bytes(16)}
BODY = msgpack.packb({"inputs": {"x": TENSOR}})
DAY_S, WEEK_S = 86_400, 7 * 86_400


@pytest.fixture
def server(fleet: RunningFleet) -> "Iterator[redis.Redis]":
    with connect(fleet.redis_url) as client:
        yield client


def add(server: "redis.Redis", **fields: Any) -> str:
    """The id of a request that has just been added."""
    entry: dict[Any, Any] = {"v": 1, "id": uuid.uuid4().hex, "body": BODY, **fields}
    server.xadd(KEYS.lane("normal"), entry)
    return str(entry["id"])


@pytest.mark.parametrize(
    ("asked", "kept_s"),
    [({}, DAY_S), ({"reply_ttl_s": 100}, 100), ({"reply_ttl_s": 10 * WEEK_S}, WEEK_S)],
    ids=["default", "asked", "too long"],
)
def test_a_reply_is_kept_as_long_as_asked(
    server: "redis.Redis", asked: dict[str, int], kept_s: int
) -> None:
    """A day unless the entry says more or less, and a week at most."""
    key = KEYS.reply(add(server, **asked))
    wait_until(lambda: server.exists(key), what="the reply")

    assert kept_s - 60 < server.ttl(key) <= kept_s


def test_two_entries_with_one_id_get_two_replies(server: "redis.Redis") -> None:
    """A raw XADD gets one reply per entry."""
    wire_id = uuid.uuid4().hex
    for _ in range(2):
        add(server, id=wire_id)

    wait_until(lambda: server.llen(KEYS.reply(wire_id)) == 2, what="both replies")


def test_fields_of_ones_own_are_ignored(server: "redis.Redis") -> None:
    """Names beginning with x_ belong to producers."""
    found: Any = server.blpop([KEYS.reply(add(server, x_batch="7"))], 30)

    assert wire.unpack_reply(found[1]).ok


def test_a_reply_is_announced_to_who_asked(server: "redis.Redis") -> None:
    """One message holding the reply's own map, on a channel under notify alone."""
    name = uuid.uuid4().hex
    with server.pubsub() as listener:  # type: ignore[no-untyped-call]  # untyped in redis-py
        listener.subscribe(f"npufleet:notify:{name}")
        wire_id = add(server, notify=name)
        heard = wait_until(
            lambda: listener.get_message(ignore_subscribe_messages=True, timeout=1), what="a hint"
        )

    assert wire.unpack_reply(heard["data"]).id == wire_id
    assert server.lrange(KEYS.reply(wire_id), 0, -1) == [heard["data"]]
