"""Version 1 of the wire: there and back, and nothing but our errors for what is not it."""

import contextlib
import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet import wire
from npufleet.errors import (
    InvalidEntry,
    InvalidId,
    InvalidParameter,
    ModelFailed,
    NpufleetError,
    RemoteError,
    UnsupportedVersion,
)
from npufleet.wire import Body, Entry, Reply

BODIES = "npufleet:{m}:body:"
IDS = st.text("abcXYZ019_.:-", min_size=1, max_size=128)
NAMES = st.text("abcXYZ019_.-", min_size=1, max_size=128)
TEXT = st.text(max_size=20)


def sent(entry: Entry) -> list[bytes]:
    """The entry's fields as a server gives them back: all of them bytes."""
    return [f if isinstance(f, bytes) else str(f).encode() for f in wire.entry_fields(entry)]


def fields(**changes: bytes | None) -> list[bytes]:
    """The fields of a small good entry, some replaced or (None) left out."""
    all_fields = {"v": b"1", "id": b"a1", "body": b"x", **changes}
    return [part for k, v in all_fields.items() if v is not None for part in (k.encode(), v)]


@given(
    st.builds(
        Entry,
        id=IDS,
        body=st.binary(),
        timeout_ms=st.none() | st.integers(1, wire.MAX_TIMEOUT_MS),
        reply_ttl_s=st.none() | st.integers(1, 10**9),
        notify=st.none() | NAMES,
        tenant=st.none() | TEXT,
        traceparent=st.none() | TEXT,
        version=st.none() | TEXT,
        brought=st.booleans(),
    )
)
def test_every_entry_survives(entry: Entry) -> None:
    """All fields, the absent ones absent."""
    assert wire.parse_entry(sent(entry), body_prefix=BODIES) == entry

    moved = dataclasses.replace(entry, body=None, body_key=BODIES + entry.id)
    assert wire.parse_entry(sent(moved), body_prefix=BODIES) == moved


def test_the_least_entry_has_an_id_a_version_and_a_body() -> None:
    """Nothing else is required, and there is no deadline unless one is asked for."""
    assert wire.parse_entry(fields(), body_prefix=BODIES) == Entry("a1", b"x")
    assert wire.entry_fields(Entry("a1", b"x")) == ["v", 1, "id", "a1", "body", b"x"]


def test_unknown_fields_are_ignored() -> None:
    """A later release may send more, binary names included."""
    more = [*fields(), b"later", b"\xff", b"\xff\xfe", b"1"]

    assert wire.parse_entry(more, body_prefix=BODIES) == Entry("a1", b"x")


def test_a_deadline_has_a_ceiling() -> None:
    """A week, so that a wrong unit does not keep a request for ever."""
    entry = wire.parse_entry(fields(timeout_ms=b"9" * 18), body_prefix=BODIES)

    assert entry.timeout_ms == wire.MAX_TIMEOUT_MS


BAD: dict[str, tuple[list[bytes], type[NpufleetError], str]] = {
    "no version": (fields(v=None), UnsupportedVersion, "''"),
    "later version": (fields(v=b"2"), UnsupportedVersion, "v = 1"),
    "version text": (fields(v=b"one"), UnsupportedVersion, "'one'"),
    "version binary": (fields(v=b"\xff" * 99), UnsupportedVersion, "v = 1"),
    "no id": (fields(id=None), InvalidEntry, "no field 'id'"),
    "empty id": (fields(id=b""), InvalidId, "1 to 128"),
    "huge id": (fields(id=b"x" * 10**6), InvalidId, "1000000 characters"),
    "control id": (fields(id=b"a\r\nb"), InvalidId, "1 to 128"),
    "binary id": (fields(id=b"\xff\xfe"), InvalidEntry, "'id' is not UTF-8"),
    "no body": (fields(body=None), InvalidEntry, "exactly one"),
    "two bodies": (fields(body_key=BODIES.encode() + b"a1"), InvalidEntry, "exactly one"),
    "foreign body": (
        fields(body=None, body_key=b"npufleet:{other}:body:a1"),
        InvalidEntry,
        "must start with 'npufleet:{m}:body:'",
    ),
    "binary body_key": (fields(body=None, body_key=b"\xff"), InvalidEntry, "not UTF-8"),
    "deadline of 0": (fields(timeout_ms=b"0"), InvalidEntry, "'timeout_ms'"),
    "negative": (fields(timeout_ms=b"-1"), InvalidEntry, "whole number from 1"),
    "fraction": (fields(timeout_ms=b"1.5"), InvalidEntry, "'1.5'"),
    "empty number": (fields(reply_ttl_s=b""), InvalidEntry, "'reply_ttl_s'"),
    "other digits": (fields(timeout_ms="\u0661".encode()), InvalidEntry, "whole number"),
    "huge number": (fields(timeout_ms=b"9" * 5000), InvalidEntry, "whole number"),
    "notify a channel": (fields(notify=b"a:b"), InvalidEntry, "notify"),
    "notify binary": (fields(notify=b"\xff"), InvalidEntry, "'notify' is not UTF-8"),
    "version binary text": (fields(version=b"\xff"), InvalidEntry, "'version' is not UTF-8"),
}


@pytest.mark.parametrize(("raw", "error", "said"), BAD.values(), ids=BAD)
def test_a_bad_entry_says_what_is_wrong(
    raw: list[bytes], error: type[NpufleetError], said: str
) -> None:
    """By its own code, in a message of bounded length."""
    with pytest.raises(error) as caught:
        wire.parse_entry(raw, body_prefix=BODIES)
    assert type(caught.value) is error
    assert said in caught.value.message
    assert len(caught.value.message) < 300


def test_a_bad_entry_with_a_good_id_is_answered_under_it() -> None:
    """Its sender waits there; only where there is no such id is the stream's own taken."""
    assert wire.usable_id(fields(v=b"2")) == "a1"
    assert wire.usable_id(fields(body=None, timeout_ms=b"x")) == "a1"
    for bad in (None, b"", b"a b", b"\xff"):
        assert wire.usable_id(fields(id=bad)) is None


@given(
    st.dictionaries(
        st.sampled_from([f.name.encode() for f in dataclasses.fields(Entry)] + [b"v"])
        | st.binary(max_size=8),
        st.sampled_from([b"1", b"0", b"a1", BODIES.encode()]) | st.binary(max_size=12),
    )
)
def test_no_entry_can_raise_anything_but_our_errors(found: dict[bytes, bytes]) -> None:
    """Whatever somebody adds to the lane."""
    try:
        entry = wire.parse_entry([x for pair in found.items() for x in pair], body_prefix=BODIES)
    except NpufleetError:
        return
    assert (entry.body is None) != (entry.body_key is None)


def test_a_body_survives() -> None:
    """Tensors, images and parameters."""
    tensor = {"dtype": "FP32", "shape": [1, 1], "data": b"\0\0\x80\x3f"}
    body = Body({"x": tensor, "image": {"image": b"\xff\xd8"}}, {"top_k": 3, "deep": {"a": [1.5]}})

    assert wire.unpack_body(wire.pack_body(body)) == body
    assert wire.unpack_body(memoryview(wire.pack_body(Body({})))) == Body({})


@pytest.mark.parametrize(
    "value", [object(), 1 << 70, "\ud800"], ids=["object", "huge", "surrogate"]
)
def test_a_parameter_that_cannot_be_sent_is_the_callers_fault(value: object) -> None:
    """And none of msgpack's own exceptions."""
    with pytest.raises(InvalidParameter):
        wire.pack_body(Body({}, {"p": value}))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


BAD_BODIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not valid msgpack"),
    "json": (b'{"inputs": {}}', "not valid msgpack"),
    "cut": (msgpack.packb({"inputs": {"x": b"12345"}})[:-2], "not valid msgpack"),
    "trailing": (msgpack.packb({"inputs": {}}) + b"\x01", "not valid msgpack"),
    "deep": (b"\x91" * 100_000, "not valid msgpack"),
    "length lies": (b"\xdd\xff\xff\xff\xff", "not valid msgpack"),
    "bin length lies": (b"\x81\xa6inputs\xc6\xff\xff\xff\xff", "not valid msgpack"),
    "key a number": (msgpack.packb({1: {}}), "not valid msgpack"),
    "text not utf-8": (b"\x81\xa6inputs\xa2\xff\xfe", "not UTF-8"),
    "a list": (msgpack.packb([1]), "must be a msgpack map"),
    "no inputs": (msgpack.packb({"input": {}}), "must be a msgpack map"),
    "inputs a list": (msgpack.packb({"inputs": []}), "must be a msgpack map"),
    "tensor a list": (msgpack.packb({"inputs": {"x": [1]}}), "names to tensors"),
    "name binary": (b"\x81\xa6inputs\x81\xc4\x01x\x80", "names to tensors"),
    "parameters a list": (msgpack.packb({"inputs": {}, "parameters": []}), "must be a map"),
    "deep parameters": (
        msgpack.packb({"inputs": {}, "parameters": {"p": nested(100)}}),
        "nest deeper",
    ),
}


@pytest.mark.parametrize(("raw", "said"), BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_bad_body_says_what_is_wrong(raw: bytes, said: str) -> None:
    """One code for all that cannot be read, and a message of bounded length."""
    with pytest.raises(InvalidEntry) as caught:
        wire.unpack_body(raw)
    assert said in caught.value.message
    assert len(caught.value.message) < 300


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
    | st.binary(max_size=8) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["inputs", "id", "ok", "error", "code"]) | TEXT, inner),
    max_leaves=8,
)  # fmt: skip  # ruff would give each alternative a line


@given(st.binary(max_size=64) | JUNK.map(msgpack.packb))
def test_no_bytes_can_raise_anything_but_our_errors(raw: bytes) -> None:
    """As a body and as a reply."""
    for unpack in (wire.unpack_body, wire.unpack_reply):
        with contextlib.suppress(NpufleetError):
            unpack(raw)


def test_a_right_reply_survives() -> None:
    """With everything that a worker tells."""
    reply = Reply(
        id="a1",
        model="m",
        version=2,
        outputs={"y": {"dtype": "FP32", "shape": [1], "data": b"\0\0\x80\x3f"}},
        predictions=[[{"label": "cat", "index": 1, "probability": 0.5}]],
        timing_ms={"queued": 0.25},
        batch_size=4,
        worker="w1",
        attempt=1,
    )

    assert wire.unpack_reply(wire.pack_reply(reply)) == reply
    assert reply.ok
    assert msgpack.unpackb(wire.pack_reply(reply))["final"] is True


def test_an_error_reply_survives_as_its_class() -> None:
    """Known codes come back typed, unknown ones with their own word."""
    back = wire.unpack_reply(wire.pack_reply(Reply("a1", error=ModelFailed("it broke"))))
    assert not back.ok
    assert type(back.error) is ModelFailed
    assert str(back.error) == "it broke"

    later = RemoteError("later", "soon", retryable=True)
    again = wire.unpack_reply(wire.pack_reply(Reply("a1", error=later))).error
    assert isinstance(again, RemoteError)
    assert (again.code, again.message, again.retryable) == ("later", "soon", True)


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"id": 5, "ok": True},
        {"id": "a", "ok": True, "outputs": []},
        {"id": "a"},
        {"id": "a", "ok": False},
        {"id": "a", "ok": False, "error": "x"},
        {"id": "a", "ok": False, "error": {}},
    ],
    ids=str,
)
def test_what_is_no_reply_is_refused(content: object) -> None:
    """Above all, nothing without ok = true is ever taken for a right answer."""
    with pytest.raises(InvalidEntry):
        wire.unpack_reply(msgpack.packb(content))


def test_ids_cannot_be_guessed_or_shared() -> None:
    """Random ones differ; derived ones are stable, and tell tenants apart."""
    assert wire.new_id() != wire.new_id()
    assert len(wire.new_id()) == 32
    assert wire.derived_id("", "order-17") == "b2ece2dcadc0b4cea61501bb047fe4be"
    assert wire.derived_id("a", "order-17") != wire.derived_id("b", "order-17")
    assert wire.derived_id("a", "b") != wire.derived_id("", "a:b")
    with pytest.raises(InvalidId):
        wire.derived_id("a", "b\0c")


def test_bodies_are_told_apart() -> None:
    """By a digest that depends on the content alone."""
    assert wire.digest(b"a") == wire.digest(memoryview(b"a")) != wire.digest(b"b")
