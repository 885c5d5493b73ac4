"""Bad input through HTTP: each gets its own clear error, and the gateway goes on."""

import asyncio
import base64
import gzip
import io
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import pytest

from tests.support.gateway import PNG, Running, running_gateway

JSON = {"Content-Type": "application/json"}
RAW = {"Content-Type": "application/octet-stream"}
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
GOOD = [1, 2, 3, 4]
DOUBLE = "/v1/models/double/infer"
PHOTO = "/v1/models/photo/infer"


def x(value: object, **other: object) -> bytes:
    return json.dumps({"inputs": {"x": value}, **other}).encode()


def form(*parts: tuple[str, bytes]) -> bytes:
    body = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), raw)
        for name, raw in parts
    )
    return body + b"--b--\r\n"


class Bad(NamedTuple):
    """A request, and the answer that it must get: `fragment` stands in the sentence."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    status: int
    code: str
    fragment: str


BAD: dict[str, Bad] = {
    # JSON itself
    "empty": Bad(DOUBLE, JSON, b"", 400, "invalid_json", "the body is empty"),
    "cut short": Bad(DOUBLE, JSON, b'{"inputs": [1, 2', 400, "invalid_json", "not valid JSON"),
    "not UTF-8": Bad(
        DOUBLE, JSON, b'{"inputs": "\xff\xfe"}', 400, "invalid_json", "not valid JSON"
    ),
    "a list": Bad(
        DOUBLE, JSON, b"[1, 2]", 400, "invalid_json", "must be a JSON object, got a list"
    ),
    "NaN": Bad(DOUBLE, JSON, b'{"inputs": [NaN, 1, 2, 3]}', 400, "invalid_json", "not valid JSON"),
    "Infinity": Bad(
        DOUBLE, JSON, b'{"inputs": [-Infinity]}', 400, "invalid_json", "not valid JSON"
    ),
    "1e999": Bad(DOUBLE, JSON, b'{"inputs": [1e999, 1, 2, 3]}', 400, "invalid_json", "infinity"),
    "nesting of 2000": Bad(
        DOUBLE,
        JSON,
        b'{"inputs": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        400,
        "invalid_json",
        "nests too deep",
    ),
    "nesting of 100": Bad(
        DOUBLE,
        JSON,
        b'{"inputs": ' + b"[" * 100 + b"]" * 100 + b"}",
        400,
        "invalid_shape",
        "deeper than 16",
    ),
    "a million empty lists": Bad(
        DOUBLE,
        JSON,
        b'{"inputs": [' + b"[]," * (1 << 20) + b"[]]}",
        400,
        "invalid_json",
        "lists and objects",
    ),
    # fields
    "unknown field": Bad(
        DOUBLE,
        JSON,
        x(GOOD, prioritty="low"),
        400,
        "unknown_field",
        "'prioritty'; did you mean 'priority'?",
    ),
    "neither content": Bad(DOUBLE, JSON, b"{}", 400, "invalid_parameter", "exactly one of"),
    "both contents": Bad(
        DOUBLE,
        JSON,
        x(GOOD, image_base64=""),
        400,
        "invalid_parameter",
        "exactly one of image_base64 and inputs",
    ),
    "unknown priority": Bad(
        DOUBLE,
        JSON,
        x(GOOD, priority="urgent"),
        400,
        "invalid_parameter",
        "one of high, normal, low, got 'urgent'",
    ),
    "timeout of 0": Bad(DOUBLE, JSON, x(GOOD, timeout_ms=0), 400, "invalid_parameter", "from 1 to"),
    "timeout too long": Bad(
        DOUBLE,
        JSON,
        x(GOOD, timeout_ms=10**12),
        400,
        "invalid_parameter",
        "timeout_ms must be a whole number",
    ),
    "timeout true": Bad(
        DOUBLE, JSON, x(GOOD, timeout_ms=True), 400, "invalid_parameter", "got true"
    ),
    "timeout 1.5": Bad(DOUBLE, JSON, x(GOOD, timeout_ms=1.5), 400, "invalid_parameter", "got 1.5"),
    "id too long": Bad(
        DOUBLE, JSON, x(GOOD, request_id="a" * 500), 400, "invalid_id", "(500 characters)"
    ),
    "id with control characters": Bad(
        DOUBLE, JSON, x(GOOD, request_id="a\r\nX-Evil: 1"), 400, "invalid_id", "an id is 1 to 128"
    ),
    "id empty": Bad(DOUBLE, JSON, x(GOOD, request_id=""), 400, "invalid_id", "(0 characters)"),
    "id a number": Bad(
        DOUBLE, JSON, x(GOOD, request_id=7), 400, "invalid_parameter", "must be text"
    ),
    "version 0": Bad(DOUBLE, JSON, x(GOOD, version=0), 400, "invalid_parameter", "number from 1"),
    "parameters a list": Bad(
        DOUBLE, JSON, x(GOOD, parameters=[]), 400, "invalid_parameter", "an object of at most 64"
    ),
    "parameters nested": Bad(
        DOUBLE,
        JSON,
        x(GOOD, parameters={"a": {}}),
        400,
        "invalid_parameter",
        "'a' must be text, a number",
    ),
    "two models": Bad(
        DOUBLE,
        JSON,
        x(GOOD, model="photo"),
        400,
        "invalid_parameter",
        "'double' and the request 'photo'",
    ),
    "options beside the body": Bad(
        DOUBLE + "?priority=low", JSON, x(GOOD), 400, "unknown_field", "stand in the body"
    ),
    # models
    "unknown model": Bad(
        "/v1/models/doubel/infer", JSON, x(GOOD), 404, "model_not_found", "models: double, flags"
    ),
    "impossible model": Bad(
        "/v1/models/%20x/infer", JSON, x(GOOD), 404, "model_not_found", "a model name is"
    ),
    "no model named": Bad("/v1/infer", JSON, x(GOOD), 400, "invalid_parameter", "models: double"),
    # names, dtypes, shapes, data
    "wrong input name": Bad(
        DOUBLE,
        JSON,
        json.dumps({"inputs": {"z": GOOD}}).encode(),
        400,
        "invalid_input",
        "no input 'z'; it takes 'x' (FP32 [N, 4])",
    ),
    "no inputs": Bad(DOUBLE, JSON, b'{"inputs": {}}', 400, "invalid_input", "'x' is missing"),
    "one of two inputs": Bad(
        "/v1/models/pair/infer",
        JSON,
        b'{"inputs": {"a": [1, 2]}}',
        400,
        "invalid_input",
        "input 'n' is missing",
    ),
    "a list for two inputs": Bad(
        "/v1/models/pair/infer",
        JSON,
        b'{"inputs": [1]}',
        400,
        "invalid_input",
        "one member per input",
    ),
    "rows disagree": Bad(
        "/v1/models/pair/infer",
        JSON,
        b'{"inputs": {"a": [[1, 2], [3, 4]], "n": [1]}}',
        400,
        "invalid_shape",
        "same number of rows",
    ),
    "no rows": Bad(
        DOUBLE, JSON, x({"shape": [0, 4], "data": []}), 400, "invalid_shape", "at least one row"
    ),
    "three columns": Bad(
        DOUBLE,
        JSON,
        x([[1, 2, 3]]),
        400,
        "invalid_shape",
        "input 'x': expected shape [N, 4], got [1, 3]",
    ),
    "ragged": Bad(
        DOUBLE,
        JSON,
        x([[1, 2, 3, 4], [1, 2]]),
        400,
        "invalid_shape",
        "lists of 2 and of 4",
    ),
    "ragged mix": Bad(DOUBLE, JSON, x([GOOD, 5]), 400, "invalid_shape", "ragged"),
    "a list among numbers": Bad(DOUBLE, JSON, x([1, [2], 3, 4]), 400, "invalid_shape", "ragged"),
    "rank 3": Bad(DOUBLE, JSON, x([[[1, 2, 3, 4]]]), 400, "invalid_shape", "got [1, 1, 4]"),
    "text for numbers": Bad(
        DOUBLE,
        JSON,
        x(["1", 2, 3, 4]),
        400,
        "invalid_data",
        "expected numbers of FP32, got '1' (value 0)",
    ),
    "null for a number": Bad(DOUBLE, JSON, x([1, None, 3, 4]), 400, "invalid_data", "got null"),
    "true for a number": Bad(
        DOUBLE, JSON, x([True, 2, 3, 4]), 400, "invalid_data", "expected FP32, got true or false"
    ),
    "text for a list": Bad(DOUBLE, JSON, x("1,2,3,4"), 400, "invalid_data", "got '1,2,3,4'"),
    "too large for FP32": Bad(
        DOUBLE, JSON, x([1e39, 2, 3, 4]), 400, "invalid_data", "got 1e+39 (value 0)"
    ),
    "fraction for INT64": Bad(
        "/v1/models/pair/infer",
        JSON,
        b'{"inputs": {"a": [1,2], "n": 1.5}}',
        400,
        "invalid_data",
        "expected a value of INT64, got 1.5",
    ),
    "300 for INT8": Bad("/v1/models/free/infer", JSON, x([[300]]), 400, "invalid_data", "of INT8"),
    "1 for BOOL": Bad(
        "/v1/models/flags/infer",
        JSON,
        b'{"inputs": [1, 0]}',
        400,
        "invalid_data",
        "expected true or false, got 1 (value 0)",
    ),
    "number for text": Bad(
        "/v1/models/words/infer",
        JSON,
        b'{"inputs": [1]}',
        400,
        "invalid_data",
        "expected text, got 1",
    ),
    "data shorter than its shape": Bad(
        DOUBLE,
        JSON,
        x({"shape": [1, 4], "data": [1, 2, 3]}),
        400,
        "invalid_data",
        "[1, 4] takes 4 values, got 3",
    ),
    "data longer than its shape": Bad(
        DOUBLE,
        JSON,
        x({"shape": [1, 4], "data": [1] * 5}),
        400,
        "invalid_data",
        "takes 4 values, got 5",
    ),
    "data not a list": Bad(
        DOUBLE,
        JSON,
        x({"shape": [1, 4], "data": "1234"}),
        400,
        "invalid_data",
        "must be a flat list",
    ),
    "negative shape": Bad(
        DOUBLE, JSON, x({"shape": [-1, 4], "data": []}), 400, "invalid_shape", "got -1"
    ),
    "shape that overflows": Bad(
        DOUBLE, JSON, x({"shape": [2**62, 4], "data": []}), 400, "invalid_shape", "2^40"
    ),
    "shape whose product overflows": Bad(
        DOUBLE,
        JSON,
        x({"shape": [2**30, 2**30, 2**30], "data": []}),
        400,
        "invalid_shape",
        "more than 2^40 elements",
    ),
    "shape of text": Bad(
        DOUBLE, JSON, x({"shape": "1,4", "data": []}), 400, "invalid_shape", "a list of integers"
    ),
    "no shape": Bad(DOUBLE, JSON, x({"data": GOOD}), 400, "invalid_shape", "shape is missing"),
    "wrong dtype": Bad(
        DOUBLE,
        JSON,
        x({"dtype": "INT32", "shape": [1, 4], "data": GOOD}),
        400,
        "invalid_dtype",
        "expected FP32, got 'INT32'",
    ),
    "unknown member": Bad(
        DOUBLE,
        JSON,
        x({"shape": [1, 4], "dat": GOOD}),
        400,
        "unknown_field",
        "did you mean 'data'?",
    ),
    "base64 of too few bytes": Bad(
        DOUBLE,
        JSON,
        x({"shape": [1, 4], "base64": "AAAA"}),
        400,
        "invalid_data",
        "takes 16 bytes, got 3",
    ),
    # pictures
    "wrong base64": Bad(
        PHOTO, JSON, b'{"image_base64": "!!!!"}', 400, "invalid_base64", "not valid"
    ),
    "base64 without padding": Bad(
        PHOTO, JSON, b'{"image_base64": "AAA"}', 400, "invalid_base64", "padding"
    ),
    "base64 beyond ASCII": Bad(
        PHOTO, JSON, '{"image_base64": "é"}'.encode(), 400, "invalid_base64", "outside ASCII"
    ),
    "base64 a number": Bad(PHOTO, JSON, b'{"image_base64": 1}', 400, "invalid_base64", "got 1"),
    "data URL without base64": Bad(
        PHOTO,
        JSON,
        b'{"image_base64": "data:image/png,x"}',
        400,
        "invalid_base64",
        "a data URL must",
    ),
    "empty base64 image": Bad(PHOTO, JSON, b'{"image_base64": ""}', 400, "invalid_image", "empty"),
    "0-byte image": Bad(PHOTO, {"Content-Type": "image/png"}, b"", 400, "invalid_image", "0 bytes"),
    "image for a tensor model": Bad(
        DOUBLE, {"Content-Type": "image/png"}, PNG, 400, "invalid_input", "takes no image"
    ),
    "image inside a tensor's input": Bad(
        DOUBLE,
        JSON,
        x({"image_base64": base64.b64encode(PNG).decode()}),
        400,
        "invalid_input",
        "takes a tensor, not an encoded image",
    ),
    "neither picture nor tensor": Bad(
        PHOTO, RAW, b"GIF89a", 400, "invalid_data", "no JPEG, PNG, WebP or BMP"
    ),
    # raw tensors
    "raw of no whole rows": Bad(
        DOUBLE,
        RAW,
        bytes(17),
        400,
        "invalid_data",
        "takes 16 bytes, so the body must be a multiple of that; got 17 bytes",
    ),
    "raw of nothing": Bad(DOUBLE, RAW, b"", 400, "invalid_data", "got 0 bytes"),
    "raw for two inputs": Bad(
        "/v1/models/pair/infer", RAW, bytes(8), 400, "invalid_input", "single input"
    ),
    "raw of unknown shape": Bad(
        "/v1/models/free/infer", RAW, bytes(3), 400, "invalid_data", "?shape=2,3"
    ),
    "raw shape of words": Bad(
        "/v1/models/free/infer?shape=a,b", RAW, bytes(3), 400, "invalid_shape", "got 'a,b'"
    ),
    "raw shape that lies": Bad(
        "/v1/models/free/infer?shape=2,2",
        RAW,
        bytes(3),
        400,
        "invalid_data",
        "takes 4 bytes, got 3",
    ),
    "raw with an unknown option": Bad(
        DOUBLE + "?priorty=low", RAW, bytes(16), 400, "unknown_field", "did you mean 'priority'?"
    ),
    "raw BYTES whose lengths lie": Bad(
        "/v1/models/words/infer?shape=1",
        RAW,
        b"\xff\xff\xff\xff",
        400,
        "invalid_data",
        "length-prefixed",
    ),
    "raw answer of two outputs": Bad(
        "/v1/models/pair/infer",
        {**JSON, "Accept": RAW["Content-Type"]},
        b'{"inputs": {"a": [1, 2], "n": 1}}',
        406,
        "not_acceptable",
        "sum, n",
    ),
    # content types, forms, paths
    "no content type": Bad(DOUBLE, {}, x(GOOD), 415, "unsupported_media_type", "got none"),
    "unknown content type": Bad(
        DOUBLE,
        {"Content-Type": "text/plain"},
        x(GOOD),
        415,
        "unsupported_media_type",
        "application/json, ",
    ),
    "curl's default": Bad(
        DOUBLE,
        {"Content-Type": "application/x-www-form-urlencoded"},
        x(GOOD),
        415,
        "unsupported_media_type",
        "add -H 'Content-Type: application/json'",
    ),
    "form without image": Bad(
        PHOTO, FORM, form(("model", b"photo")), 400, "invalid_parameter", "no field 'image'"
    ),
    "form with an unknown field": Bad(
        PHOTO,
        FORM,
        form(("image", PNG), ("modle", b"")),
        400,
        "unknown_field",
        "did you mean 'model'?",
    ),
    "form with a field twice": Bad(
        PHOTO, FORM, form(("image", PNG), ("image", PNG)), 400, "invalid_parameter", "'image' twice"
    ),
    "form of text that is none": Bad(
        PHOTO, FORM, form(("image", PNG), ("priority", b"\xff")), 400, "invalid_data", "not UTF-8"
    ),
    "form without boundary": Bad(
        PHOTO,
        {"Content-Type": "multipart/form-data"},
        b"--b",
        400,
        "bad_request",
        "the form cannot be read",
    ),
    "form cut short": Bad(
        PHOTO, FORM, form(("image", PNG))[:60], 400, "bad_request", "the form cannot be read"
    ),
    "no such path": Bad("/v2/infer", JSON, x(GOOD), 404, "not_found", "GET / names what is"),
    "POST to a page": Bad("/health", JSON, x(GOOD), 405, "method_not_allowed", "takes GET, HEAD"),
    "gzip that is none": Bad(
        DOUBLE, {**JSON, "Content-Encoding": "gzip"}, x(GOOD), 400, "bad_request", "cannot be read"
    ),
}


@pytest.fixture
async def fleet(redis_url: str, prefix: str) -> AsyncIterator[Running]:
    async with running_gateway(redis_url, prefix, max_request_mb=4) as running:
        yield running


async def test_each_bad_input_gets_its_own_clear_error(fleet: Running) -> None:
    """Status, code and sentence of every row; nothing reaches the queue; neighbours are served."""
    wrong: dict[str, Any] = {}
    for name, bad in BAD.items():
        async with fleet.http.post(
            bad.path,
            data=io.BytesIO(bad.body),
            headers=bad.headers,
            skip_auto_headers=["Content-Type"],
        ) as response:
            answer = await response.json()
        got = (response.status, answer["code"], answer["error"])
        if got[:2] != bad[3:5] or bad.fragment not in got[2]:
            wrong[name] = got
        assert response.headers["X-Request-Id"] == answer["request_id"]
        assert set(answer) == {"error", "code", "request_id"}
        assert len(answer["error"]) < 600, name
    assert wrong == {}
    assert fleet.worker.entries == []
    async with fleet.http.post(DOUBLE, json={"inputs": GOOD}) as response:
        assert (await response.json())["prediction"] == [3, 5, 7, 9]


def test_the_table_is_as_long_as_promised() -> None:
    """At least forty ways to be wrong."""
    assert len(BAD) >= 40


async def test_a_body_too_large_is_refused_from_its_header(fleet: Running) -> None:
    """Before it is sent: also to a client that asks first with Expect."""
    for expect in (b"", b"Expect: 100-continue\r\n"):
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n%s" % (
            DOUBLE.encode(),
            expect,
        )
        answer = await _talk(fleet, head + b"Content-Type: application/json\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 "), answer
        assert b'"code":"payload_too_large"' in answer
        assert b"may have 4194304 bytes, got 99999999 bytes" in answer


async def test_a_body_without_a_length_is_counted(fleet: Running) -> None:
    """Chunked bodies stop at the same bound, whatever their type."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield bytes(1 << 19)

    for headers in (JSON, RAW):
        async with fleet.http.post(DOUBLE, data=chunks(), headers=headers) as response:
            assert response.status == 413
            assert (await response.json())["code"] == "payload_too_large"


async def test_a_form_too_large_is_counted_over_its_parts(fleet: Running) -> None:
    """Many parts are no way around the bound."""

    async def chunks() -> AsyncIterator[bytes]:
        yield form(("image", bytes(3 << 20)), ("model", bytes(3 << 20)))

    async with fleet.http.post(PHOTO, data=chunks(), headers=FORM) as response:
        assert response.status == 413


async def test_a_compressed_body_counts_as_what_it_becomes(fleet: Running) -> None:
    """A bomb of zeros is refused like any other body that is too large."""
    bomb = gzip.compress(bytes(64 << 20))
    headers = {**RAW, "Content-Encoding": "gzip"}
    async with fleet.http.post(DOUBLE, data=bomb, headers=headers) as response:
        assert response.status == 413


async def test_a_client_that_asks_first_is_told_to_go_on(fleet: Running) -> None:
    """As curl does for every body above a megabyte."""
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 16\r\n" % DOUBLE.encode()
    head += b"Content-Type: application/octet-stream\r\nExpect: 100-continue\r\n\r\n"
    answer = await _talk(fleet, head, bytes(16))

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"predictions":[[1.0,1.0,1.0,1.0]]' in answer


async def test_an_unknown_expectation_is_refused_in_the_same_form(fleet: Running) -> None:
    """Even what is answered before any handler has code and request id."""
    async with fleet.http.post(DOUBLE, json={}, headers={"Expect": "miracles"}) as response:
        answer = await response.json()

    assert (response.status, answer["code"]) == (400, "bad_request")


async def test_a_fault_of_our_own_says_nothing_of_itself(
    fleet: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets an id, the log the reason under that id."""

    async def fail(*_: object, **__: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(fleet.exchange, "infer", fail)
    async with fleet.http.post(DOUBLE, json={"inputs": GOOD}) as response:
        answer = await response.json()

    assert (response.status, answer["code"]) == (500, "internal")
    assert "secret" not in answer["error"]
    (record,) = [entry for entry in caplog.records if entry.name.startswith("npufleet_gateway")]
    assert record.__dict__["request_id"] == answer["request_id"]


async def _talk(fleet: Running, request: bytes, body: bytes = b"") -> bytes:
    """What the gateway answers to these bytes; `body` is sent once it says 100."""
    port = int(fleet.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        if body and head.startswith(b"HTTP/1.1 100 "):
            writer.write(body)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        return head + await asyncio.wait_for(reader.readuntil(b"}"), 10)
    finally:
        writer.close()
        await writer.wait_closed()
