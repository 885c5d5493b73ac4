"""A real worker process, fed straight from the stream: right answers, and every bad entry alone."""

import hashlib
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import redis

from npufleet import wire
from npufleet.keys import GROUP, FleetKeys
from npufleet.wire import Body
from tests.support.valkey import connect
from tests.support.waiting import wait_until
from tests.support.workers import Producer, RunningWorker, running_worker

PREFIX = "stream"
X = np.arange(4, dtype=np.float32)[None]


@pytest.fixture(scope="module")
def worker(redis_url: str, models: Path) -> Iterator[RunningWorker]:
    with running_worker(redis_url, PREFIX, models) as worker:
        yield worker


@pytest.fixture(scope="module")
def client(redis_url: str) -> Iterator[redis.Redis]:
    with connect(redis_url) as client:
        yield client


@pytest.fixture
def double(worker: RunningWorker, client: redis.Redis) -> Producer:
    return Producer(client, PREFIX, "double")


@pytest.fixture
def pictures(worker: RunningWorker, client: redis.Redis) -> Producer:
    return Producer(client, PREFIX, "efficientnet-lite0")


def test_a_raw_entry_is_answered_and_nothing_else_is_left(double: Producer) -> None:
    """XADD, then BLPOP: the right values, all facts of the reply, an empty lane, no key behind."""
    reply = double.reply(double.ask({"x": X}))

    assert reply.ok
    assert reply.outputs["y"]["shape"] == [1, 4]
    np.testing.assert_allclose(
        np.frombuffer(reply.outputs["y"]["data"], np.float32), 2 * X[0] + 1, rtol=1e-6
    )
    assert (reply.model, reply.version, reply.worker, reply.attempt) == ("double", 1, "w", 1)
    assert (reply.batch_size, reply.gear, reply.position) == (1, 1, 0)
    file = Path(__file__).parents[2] / "models/double/1/model.onnx"
    assert reply.model_digest == hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    assert {"queued", "executed"} <= set(reply.timing_ms)
    assert double.client.xlen(double.keys.lane("normal")) == 0
    assert double.client.xpending(double.keys.lane("normal"), GROUP)["pending"] == 0


def test_a_worker_shows_itself_in_a_hash_that_expires(
    worker: RunningWorker, client: redis.Redis
) -> None:
    """Where its pages are, which models it serves: gone soon after the worker is."""
    key = FleetKeys(PREFIX).worker("w")
    facts: Any = wait_until(lambda: client.hgetall(key), what="the worker's hash")

    assert facts[b"models"] == b"double,efficientnet-lite0"
    assert facts[b"pages"].startswith(b"http://127.0.0.1:")
    assert facts[b"pid"] == str(worker.process.pid).encode()
    assert 0 < client.ttl(key) <= 15


def test_rows_of_many_requests_come_back_to_their_own(double: Producer) -> None:
    """Requests of 1 to 32 rows in all three lanes: every reply is the answer to its request."""
    rng = np.random.default_rng(3)
    asked: dict[str, np.ndarray[Any, Any]] = {}
    for n in range(300):
        rows = rng.normal(size=(1 + n % 32, 4)).astype(np.float32)
        asked[double.ask({"x": rows}, ("high", "normal", "low")[n % 3])] = rows

    for wire_id, rows in asked.items():
        reply = double.reply(wire_id)
        got = np.frombuffer(reply.outputs["y"]["data"], np.float32).reshape(rows.shape)
        np.testing.assert_allclose(got, 2 * rows + 1, rtol=1e-4, atol=1e-5)


def test_a_deterministic_request_runs_in_the_same_gear_whatever_is_about(double: Producer) -> None:
    """Alone or among many: always the largest size, and never with those that did not ask for it.

    Parameters that nobody knows are ignored.
    """

    def ask(**parameters: Any) -> str:
        content = {"inputs": {"x": tensor()}, "parameters": parameters}
        wire_id = wire.new_id()
        double.add({"v": 1, "id": wire_id, "body": msgpack.packb(content)})
        return wire_id

    alone = double.reply(ask(deterministic=True, temperature=0.7))
    assert (alone.gear, alone.batch_size) == (32, 1)
    asked = [(n % 3 == 0, ask(deterministic=n % 3 == 0)) for n in range(90)]
    replies = [(pinned, double.reply(wire_id)) for pinned, wire_id in asked]
    assert {reply.gear for pinned, reply in replies if pinned} == {32}
    assert all(reply.gear == reply.batch_size for pinned, reply in replies if not pinned)
    assert {reply.outputs["y"]["data"] for pinned, reply in replies if pinned} == {
        alone.outputs["y"]["data"]
    }


def test_a_large_body_under_its_key_is_answered_and_the_key_is_gone(pictures: Producer) -> None:
    """`body_key` is fetched, and deleted with the entry."""
    image = Path(__file__).parents[2] / "models/efficientnet-lite0/images/coffee.png"
    body = wire.pack_body(Body({"image": {"image": image.read_bytes()}}))
    key = pictures.keys.body("big")
    pictures.client.set(key, body)
    pictures.add({"v": 1, "id": "big", "body_key": key})

    reply = pictures.reply("big")

    assert reply.predictions is not None
    assert reply.predictions[0][0]["label"] == "espresso"
    assert pictures.client.exists(key) == 0


def tensor(**changes: Any) -> dict[str, Any]:
    good = {"dtype": "FP32", "shape": [1, 4], "data": X.tobytes()}
    return {name: value for name, value in (good | changes).items() if value is not None}


def body(**inputs: Any) -> bytes:
    packed: bytes = msgpack.packb({"inputs": inputs})
    return packed


def png(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixel of it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


GOOD = body(x=tensor())

# field changes (None takes the field away), code, a fragment of the message
BAD_ENTRIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no version": ({"v": None}, "unsupported_version", "v = 1"),
    "version of tomorrow": ({"v": 2}, "unsupported_version", "'2'"),
    "version not a number": ({"v": "one"}, "unsupported_version", "'one'"),
    "huge id": ({"id": "a" * 5000}, "invalid_id", "5000 characters"),
    "empty id": ({"id": ""}, "invalid_id", "1 to 128"),
    "id with control characters": ({"id": "a\x00\x1b[31m"}, "invalid_id", "\\x00"),
    "id with braces and spaces": ({"id": "a} b{"}, "invalid_id", "A-Z"),
    "id not UTF-8": ({"id": b"\xff\xfe"}, "invalid_entry", "UTF-8"),
    "no id": ({"id": None}, "invalid_entry", "'id'"),
    "no body": ({"body": None}, "invalid_entry", "exactly one"),
    "body and body_key": ({"body_key": "stream:{double}:body:x"}, "invalid_entry", "exactly one"),
    "body_key elsewhere": ({"body": None, "body_key": "secret"}, "invalid_entry", "start with"),
    "body_key of another model": (
        {"body": None, "body_key": "stream:{other}:body:x"},
        "invalid_entry",
        "start with",
    ),
    "body_key of nothing": (
        {"body": None, "body_key": "stream:{double}:body:none"},
        "body_missing",
        "nothing under",
    ),
    "timeout negative": ({"timeout_ms": -5}, "invalid_entry", "timeout_ms"),
    "timeout a fraction": ({"timeout_ms": "1.5"}, "invalid_entry", "timeout_ms"),
    "timeout a word": ({"timeout_ms": "soon"}, "invalid_entry", "timeout_ms"),
    "timeout of forty digits": ({"timeout_ms": "9" * 40}, "invalid_entry", "timeout_ms"),
    "reply_ttl_s zero": ({"reply_ttl_s": 0}, "invalid_entry", "reply_ttl_s"),
    "notify another channel": ({"notify": "a b:c"}, "invalid_entry", "notify"),
    "version unknown": ({"version": "7"}, "version_unavailable", "not '7'"),
    "body empty": ({"body": b""}, "invalid_entry", "msgpack"),
    "body truncated": ({"body": GOOD[:-5]}, "invalid_entry", "msgpack"),
    "body with a tail": ({"body": GOOD + b"tail"}, "invalid_entry", "msgpack"),
    "body is JSON": ({"body": b'{"inputs": {}}'}, "invalid_entry", "msgpack"),
    "body nested too deeply": ({"body": nested(5000)}, "invalid_entry", "msgpack"),
    "body a list": ({"body": msgpack.packb([1])}, "invalid_entry", '"inputs"'),
    "body without inputs": ({"body": msgpack.packb({"input": {}})}, "invalid_entry", '"inputs"'),
    "body with integer names": (
        {"body": msgpack.packb({"inputs": {1: tensor()}})},
        "invalid_entry",
        "int",
    ),
    "body with text that is not UTF-8": ({"body": b"\x81\xa1\xff\x01"}, "invalid_entry", "UTF-8"),
    "body claims four gigabytes": ({"body": b"\xc6\xff\xff\xff\xff"}, "invalid_entry", "msgpack"),
    "inputs not tensors": ({"body": body(x=5)}, "invalid_entry", "maps"),
    "parameters not a map": (
        {"body": msgpack.packb({"inputs": {"x": tensor()}, "parameters": 1})},
        "invalid_entry",
        "parameters",
    ),
    "no input": ({"body": body()}, "invalid_input", "'x' is missing"),
    "unknown input": ({"body": body(x=tensor(), z=tensor())}, "invalid_input", "'z'"),
    "dtype unknown": ({"body": body(x=tensor(dtype="FLOAT32"))}, "invalid_dtype", "FLOAT32"),
    "dtype wrong": (
        {"body": body(x=tensor(dtype="FP64", data=bytes(32)))},
        "invalid_dtype",
        "expected FP32, got FP64",
    ),
    "dtype a number": ({"body": body(x=tensor(dtype=1))}, "invalid_dtype", "got 1"),
    "shape missing": ({"body": body(x=tensor(shape=None))}, "invalid_shape", "None"),
    "shape negative": ({"body": body(x=tensor(shape=[-1, 4]))}, "invalid_shape", "-1"),
    "shape a fraction": ({"body": body(x=tensor(shape=[1.0, 4]))}, "invalid_shape", "1.0"),
    "shape overflows": (
        {"body": body(x=tensor(shape=[2**40, 2**40]))},
        "invalid_shape",
        "2^40",
    ),
    "shape past 64 bits": ({"body": body(x=tensor(shape=[2**63, 4]))}, "invalid_shape", "2^40"),
    "shape of too many axes": ({"body": body(x=tensor(shape=[1] * 99))}, "invalid_shape", "99"),
    "shape of another row": (
        {"body": body(x=tensor(shape=[1, 5], data=bytes(20)))},
        "invalid_shape",
        "expected shape [N, 4]",
    ),
    "no rows": ({"body": body(x=tensor(shape=[0, 4], data=b""))}, "invalid_shape", "got 0"),
    "deterministic is a number": (
        {"body": msgpack.packb({"inputs": {"x": tensor()}, "parameters": {"deterministic": 1}})},
        "invalid_parameter",
        "true or false",
    ),
    "more rows than 64 batches": (
        {"body": body(x=tensor(shape=[2049, 4], data=bytes(2049 * 16)))},
        "invalid_shape",
        "at most 2048",
    ),
    "data short": ({"body": body(x=tensor(data=bytes(15)))}, "invalid_data", "16 bytes, got 15"),
    "data long": ({"body": body(x=tensor(data=bytes(17)))}, "invalid_data", "16 bytes, got 17"),
    "data a list": ({"body": body(x=tensor(data=[1, 2, 3, 4]))}, "invalid_data", "list"),
    "an image for a tensor": ({"body": body(x={"image": b"x"})}, "invalid_input", "not an encoded"),
}

BAD_IMAGES: dict[str, tuple[Any, str, str]] = {
    "empty": (b"", "invalid_image", "0 bytes"),
    "not a picture": (b"hello" * 100, "invalid_image", "not a JPEG"),
    "a GIF": (b"GIF89a" + bytes(50), "invalid_image", "not a JPEG"),
    "a bomb": (png(60_000, 60_000), "invalid_image", "60000 x 60000"),
    "no pixels": (png(0, 0), "invalid_image", ""),
    "a header alone": (png(64, 64), "invalid_image", "damaged"),
    "text": ("not bytes", "invalid_input", "binary"),
}


def test_every_bad_entry_gets_its_own_error_and_its_neighbours_their_answers(
    double: Producer, worker: RunningWorker
) -> None:
    """Mixed among good ones in one burst: each bad entry its code, each good one its values."""
    executors = [process.pid for process in worker.executors()]
    pipeline = double.client.pipeline()
    expected: list[tuple[str, str, str, str]] = []
    good: list[str] = []
    for number, (name, (changes, code, fragment)) in enumerate(BAD_ENTRIES.items()):
        fields: dict[str, Any] = {"v": 1, "id": f"bad-{number}", "body": GOOD} | changes
        entry = double.add({k: v for k, v in fields.items() if v is not None})
        answered_as = entry if code == "invalid_id" or "id" in name.split() else None
        expected.append((name, answered_as or f"bad-{number}", code, fragment))
        good.append(double.ask({"x": X + number}))
    pipeline.execute()

    for name, wire_id, code, fragment in expected:
        error = double.reply(wire_id).error
        assert error is not None, name
        assert (error.code, fragment in error.message) == (code, True), (name, error.message)
    for number, wire_id in enumerate(good):
        reply = double.reply(wire_id)
        got = np.frombuffer(reply.outputs["y"]["data"], np.float32)
        np.testing.assert_allclose(got, 2 * (X[0] + number) + 1, rtol=1e-6)
    assert [process.pid for process in worker.executors()] == executors, "no process restarts"
    assert worker.process.poll() is None


def test_every_bad_picture_fails_alone(pictures: Producer, worker: RunningWorker) -> None:
    """Empty, foreign, hostile and broken files among a good one: the good one is answered."""
    coffee = (
        Path(__file__).parents[2] / "models/efficientnet-lite0/images/coffee.png"
    ).read_bytes()
    images = {
        name: pictures.ask({"image": {"image": case[0]}}) for name, case in BAD_IMAGES.items()
    }
    truncated = pictures.ask({"image": {"image": coffee[: len(coffee) // 2]}})
    good = pictures.ask({"image": {"image": coffee}})

    for name, wire_id in images.items():
        error = pictures.reply(wire_id).error
        assert error is not None, name
        assert error.code == BAD_IMAGES[name][1], (name, error.message)
        assert BAD_IMAGES[name][2] in error.message, (name, error.message)
    broken = pictures.reply(truncated).error
    assert broken is not None
    assert broken.code == "invalid_image"
    predictions = pictures.reply(good).predictions
    assert predictions is not None
    assert predictions[0][0]["label"] == "espresso"


def test_an_entry_that_cannot_be_read_is_kept_as_a_dead_letter(double: Producer) -> None:
    """Its bytes, its reason and its place; an error that is its caller's own leaves no letter."""
    before = double.client.xlen(double.keys.dead)
    entry = double.add({"v": 9, "id": "tomorrow", "body": b"bytes"})
    double.reply("tomorrow")
    double.reply(double.ask({"x": X.astype(np.float64)}))

    letters: Any = double.client.xrevrange(double.keys.dead, count=1)
    assert double.client.xlen(double.keys.dead) == before + 1
    (_, letter) = letters[0]
    assert letter[b"body"] == b"bytes"
    assert letter[b"dead_entry"] == entry.encode()
    assert letter[b"dead_code"] == b"unsupported_version"


def test_an_expired_or_cancelled_request_is_answered_and_not_run(
    double: Producer, worker: RunningWorker
) -> None:
    """A deadline counts from the stream id; a mark counts until the reply."""
    worker.process.send_signal(19)  # SIGSTOP: the entries wait
    try:
        late = double.ask({"x": X}, timeout_ms=1)
        gone = double.ask({"x": X})
        now = double.client.time()
        double.client.zadd(double.keys.cancelled, {gone: now[0] * 1000})
        wait_until(lambda: double.client.time()[0] >= now[0] + 1, what="the deadline to pass")
    finally:
        worker.process.send_signal(18)

    errors = [double.reply(wire_id).error for wire_id in (late, gone)]

    assert [error and error.code for error in errors] == ["deadline_exceeded", "cancelled"]
    assert double.client.zcard(double.keys.cancelled) == 0
