"""The Lua scripts on a real server: what each promises, also against a second owner."""

from typing import Any

import msgpack
import pytest
import redis

from npufleet import wire
from npufleet.keys import GROUP, RATE_FIELD, RETURNED, FleetKeys, ModelKeys
from npufleet.scripts import (
    BEAT,
    CANCEL,
    CLAIM,
    FINISH,
    GIVE_BACK,
    REAP,
    RENEW,
    SUBMIT,
    TAKE,
    Script,
)


class Lanes:
    """One model's keys on a real server, with the scripts as methods."""

    def __init__(self, client: redis.Redis, keys: ModelKeys) -> None:
        self.client: Any = client  # redis-py's own types are unions of everything
        self.keys = keys
        for lane in keys.lanes:
            client.xgroup_create(lane, GROUP, id="0", mkstream=True)

    def run(self, script: Script, keys: list[str], args: list[Any]) -> Any:
        return self.client.eval(script.text.decode(), len(keys), *keys, *args)

    def add(self, wire_id: str, lane: str = "normal", **fields: Any) -> str:
        entry: bytes = self.client.xadd(
            self.keys.lane(lane), {"v": 1, "id": wire_id, "body": b"x", **fields}
        )
        return entry.decode()

    def take(self, consumer: str, room: int = 10) -> list[Any]:
        order = [n for lane in (1, 2, 3) for n in (lane, room)]
        args = [GROUP, consumer, RETURNED, room, *order]
        _, missing, taken = self.run(TAKE, [*self.keys.lanes, self.keys.cancelled], args)
        assert missing == []
        return list(taken)

    def finish(
        self, consumer: str, entry: str, kind: str, reply: bytes = b"reply", channel: str = ""
    ) -> str:
        keys = [*self.keys.lanes, self.keys.dead, self.keys.cancelled, self.keys.reply("a")]
        item = [kind, 2, entry, "a", 6, 60_000, 0, 0, channel, reply, "model_failed", "it broke"]
        (word,) = self.run(FINISH, keys, [GROUP, consumer, 16_384, 100, 1000, 1, *item])
        return str(word, "ascii")

    def owners(self) -> dict[str, tuple[str, int]]:
        rows = self.client.xpending_range(self.keys.lane("normal"), GROUP, "-", "+", 100)
        return {
            row["message_id"].decode(): (row["consumer"].decode(), row["times_delivered"])
            for row in rows
        }


@pytest.fixture
def lanes(redis_client: redis.Redis, prefix: str) -> Lanes:
    return Lanes(redis_client, FleetKeys(prefix).model("m"))


def test_take_has_one_room_over_all_lanes_and_serves_high_first(lanes: Lanes) -> None:
    """Three lanes never give more than the room, and high comes before normal before low."""
    for n in range(4):
        for lane in ("low", "normal", "high"):
            lanes.add(f"{lane}{n}", lane)

    taken = lanes.take("w", room=6)

    assert [row[0] for row in taken] == [1, 1, 1, 1, 2, 2]
    assert all(row[2] == 1 for row in taken), "a first delivery counts as one"


def test_take_tells_of_cancelled_ids(lanes: Lanes) -> None:
    """An id that was marked before it was taken comes with the mark; others without."""
    lanes.add("a")
    lanes.add("b")
    lanes.run(CANCEL, [lanes.keys.cancelled], [60_000, 100, "b"])

    assert [row[3] for row in lanes.take("w")] == [0, 1]


def test_take_names_the_lanes_that_lost_their_group(lanes: Lanes) -> None:
    """A lane without its group is reported, not an error for the others."""
    lanes.client.delete(lanes.keys.lane("normal"))
    lanes.add("a", "low")

    _, missing, taken = lanes.run(
        TAKE,
        [*lanes.keys.lanes, lanes.keys.cancelled],
        [GROUP, "w", RETURNED, 5, 1, 5, 2, 5, 3, 5],
    )

    assert missing == [2]
    assert len(taken) == 1


def test_first_success_wins_and_the_second_makes_no_reply(lanes: Lanes) -> None:
    """Two workers that both finished an entry leave one reply, and nothing pending."""
    entry = lanes.add("a")
    lanes.take("w1")

    assert lanes.finish("w1", entry, "ok") == "ok"
    assert lanes.finish("w2", entry, "ok") == "gone"
    assert lanes.client.lrange(lanes.keys.reply("a"), 0, -1) == [b"reply"]
    assert 0 < lanes.client.pttl(lanes.keys.reply("a")) <= 60_000
    assert lanes.client.xlen(lanes.keys.lane("normal")) == 0
    assert lanes.owners() == {}


@pytest.mark.parametrize("kind", ["error", "dead"])
def test_a_zombie_cannot_turn_an_answer_into_an_error(lanes: Lanes, kind: str) -> None:
    """Errors need ownership: who lost the entry neither replies nor buries."""
    entry = lanes.add("a")
    lanes.take("zombie")
    lanes.client.xclaim(lanes.keys.lane("normal"), GROUP, "heir", 0, [entry])

    assert lanes.finish("zombie", entry, kind) == "lost"
    assert lanes.client.exists(lanes.keys.reply("a"), lanes.keys.dead) == 0
    assert lanes.finish("heir", entry, "ok") == "ok"


def test_a_buried_entry_keeps_its_bytes_and_its_reason_and_is_answered(lanes: Lanes) -> None:
    """A dead letter is the original entry with the error on top of it, beside an error reply."""
    entry = lanes.add("a", tenant="t")
    lanes.take("w")

    assert lanes.finish("w", entry, "dead") == "ok"

    ((_, letter),) = lanes.client.xrange(lanes.keys.dead)
    assert (letter[b"id"], letter[b"body"], letter[b"tenant"]) == (b"a", b"x", b"t")
    assert letter[b"dead_code"] == b"model_failed"
    assert letter[b"dead_message"] == b"it broke"
    assert letter[b"dead_entry"] == entry.encode()
    assert letter[b"dead_deliveries"] == b"1"
    assert lanes.client.lrange(lanes.keys.reply("a"), 0, -1) == [b"reply"]


def test_an_entry_of_ten_thousand_fields_is_buried_and_answered(lanes: Lanes) -> None:
    """More than Lua passes on in one call: its letter is cut, its reply is there."""
    fields: dict[str, Any] = {f"f{n}": n for n in range(10_000)}
    entry = lanes.add("a", **fields)
    lanes.take("w")

    assert lanes.finish("w", entry, "dead") == "ok"

    ((_, letter),) = lanes.client.xrange(lanes.keys.dead)
    assert (letter[b"id"], letter[b"dead_code"]) == (b"a", b"model_failed")
    assert lanes.client.lrange(lanes.keys.reply("a"), 0, -1) == [b"reply"]


def test_marks_of_cancelled_ids_do_not_outlive_their_time(lanes: Lanes) -> None:
    """Also the last one goes, though no other ever comes to trim it."""
    lanes.run(CANCEL, [lanes.keys.cancelled], [60_000, 100, "b"])

    assert 0 < lanes.client.pttl(lanes.keys.cancelled) <= 60_000


@pytest.mark.parametrize(("size", "wire_id"), [(20, "a"), (20_000, "a")])
def test_a_hint_carries_a_small_reply_and_names_a_large_one(
    lanes: Lanes, size: int, wire_id: str
) -> None:
    """One message per gateway and batch: the reply itself up to 16 KB, else its id."""
    channel = lanes.keys.base + "test-channel"
    entry = lanes.add(wire_id)
    lanes.take("w")
    reply = wire.pack_reply(wire.Reply(id=wire_id, outputs={"y": {"data": b"." * size}}))

    with lanes.client.pubsub() as pubsub:
        pubsub.subscribe(channel)
        assert pubsub.get_message(timeout=5)["type"] == "subscribe"
        lanes.finish("w", entry, "ok", reply, channel)
        message = pubsub.get_message(timeout=5)

    hint = msgpack.unpackb(message["data"])
    assert hint == (msgpack.unpackb(reply) if size < 16_384 else wire_id)


def test_renewal_never_takes_an_entry_back(lanes: Lanes) -> None:
    """Who still owns an entry keeps it; who lost it is told and stays without."""
    kept, lost = lanes.add("a"), lanes.add("b")
    lanes.take("w1")
    lanes.client.xclaim(lanes.keys.lane("normal"), GROUP, "w2", 0, [lost])

    answer = lanes.run(RENEW, list(lanes.keys.lanes), [GROUP, "w1", 2, kept, 2, lost])

    assert answer == [2, lost.encode()]
    assert lanes.owners() == {kept: ("w1", 1), lost: ("w2", 2)}


def test_entries_given_back_are_taken_first_and_the_delivery_does_not_count(lanes: Lanes) -> None:
    """A drained worker leaves its entries as if it had never read them."""
    entry = lanes.add("a")
    lanes.take("w1")
    lanes.add("b")

    args = [GROUP, "w1", RETURNED, lanes.keys.control, 100]
    assert lanes.run(GIVE_BACK, list(lanes.keys.lanes), args) == 1

    assert [(row[1], row[2]) for row in lanes.take("w2", room=1)] == [(entry.encode(), 1)]


def test_entries_of_a_dead_owner_are_claimed_and_those_of_a_live_one_are_not(lanes: Lanes) -> None:
    """The lease is over and the heartbeat gone: only then an entry changes hands."""
    dead = lanes.add("a")
    lanes.take("crashed")
    alive = lanes.add("b")
    lanes.take("slow")
    lanes.run(BEAT, [lanes.keys.workers], ["slow"])
    lane = lanes.keys.lane("normal")
    for owner, entry in (("crashed", dead), ("slow", alive)):
        lanes.client.xclaim(lane, GROUP, owner, 0, [entry], idle=60_000, justid=True)

    cursor, claimed = lanes.run(
        CLAIM, [lane, lanes.keys.workers], [GROUP, "heir", RETURNED, 30_000, 10, "-"]
    )

    assert cursor == b"-"
    assert [(row[0], row[1]) for row in claimed] == [(dead.encode(), 2)]
    assert lanes.owners()[alive][0] == "slow"


def test_only_consumers_without_pending_entries_are_forgotten(lanes: Lanes) -> None:
    """Deleting a consumer drops what it holds, so that one with entries stays."""
    lanes.add("a")
    lanes.take("holds")
    # By hand: whether a read that finds nothing makes a consumer differs between servers.
    lanes.client.xgroup_createconsumer(lanes.keys.lane("normal"), GROUP, "idle")

    keys = [*lanes.keys.lanes, lanes.keys.workers, lanes.keys.signature]
    lanes.run(BEAT, [lanes.keys.workers], ["gone"])
    lanes.client.hset(lanes.keys.signature, mapping={"rate:gone": 5, "version": 1})

    assert lanes.run(REAP, keys, [GROUP, RETURNED, -1, RATE_FIELD]) >= 1
    assert lanes.client.hgetall(lanes.keys.signature) == {b"version": b"1"}

    names = {row["name"] for row in lanes.client.xinfo_consumers(lanes.keys.lane("normal"), GROUP)}
    assert names == {b"holds"}


class TestSubmit:
    """The submit script: bound, brought ids and large bodies in one step."""

    def submit(self, lanes: Lanes, *, digest: str = "", body: bytes = b"", bound: int = 10) -> Any:
        seen, body_key = lanes.keys.seen("a"), lanes.keys.body("a")
        fields = ["v", 1, "id", "a", "body", b"x"]
        args = [bound, 1, 2 if digest else 0, digest, 60_000, 3 if body else 0, 60_000, body]
        keys = [lanes.keys.lane("normal"), seen, body_key]
        _, ((word, *detail),) = lanes.run(SUBMIT, keys, [*args, len(fields), *fields])
        return word.decode(), *detail

    def test_a_full_lane_refuses_and_stores_nothing(self, lanes: Lanes) -> None:
        """At the bound nothing is added, and no body is left behind."""
        lanes.add("other")

        assert self.submit(lanes, body=b"large", bound=1) == ("full", 1)
        assert lanes.client.exists(lanes.keys.body("a")) == 0
        assert lanes.client.xlen(lanes.keys.lane("normal")) == 1

    def test_a_brought_id_is_added_once(self, lanes: Lanes) -> None:
        """The same id and body again joins the first; another body is a conflict."""
        word, entry = self.submit(lanes, digest="aa")

        assert word == "added"
        assert self.submit(lanes, digest="aa") == ("queued", entry)
        assert self.submit(lanes, digest="bb")[0] == "conflict"
        assert lanes.client.xlen(lanes.keys.lane("normal")) == 1

    def test_a_large_body_lies_under_its_key_with_a_life(self, lanes: Lanes) -> None:
        """The body is stored together with the entry, and expires after it."""
        assert self.submit(lanes, body=b"large")[0] == "added"
        assert lanes.client.get(lanes.keys.body("a")) == b"large"
        assert lanes.client.pttl(lanes.keys.body("a")) > 0
