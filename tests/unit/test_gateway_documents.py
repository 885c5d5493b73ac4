"""Bodies to questions to wire bodies, without HTTP: whatever comes in, an answer or a RequestError.

The table of bad inputs stands in tests/integration/test_gateway_bad_inputs.py.
"""

import base64
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npufleet import tensors, wire
from npufleet.errors import RequestError, UnknownField
from npufleet.signature import Signature, TensorSpec
from npufleet_gateway import contents, documents
from npufleet_gateway.options import NAMES, Options


def signature(*inputs: TensorSpec, image: str | None = None) -> Signature:
    return Signature(model="m", version=1, inputs=inputs, outputs=(), image_input=image)


SIGNATURES = [
    signature(TensorSpec("x", "FP32", (-1, 4))),
    signature(TensorSpec("x", "FP16", (-1,))),
    signature(TensorSpec("x", "INT8", (-1, -1)), TensorSpec("b", "BOOL", (-1,))),
    signature(TensorSpec("x", "UINT64", (-1, 2, 2))),
    signature(TensorSpec("x", "BYTES", (-1, 1))),
    signature(TensorSpec("x", "UINT8", (-1, 2, 2, 3)), image="x"),
]
MEDIA_TYPES = [documents.JSON, documents.RAW, *documents.IMAGES, "text/plain", None]


def packed(content: contents.Content, model: Signature) -> tuple[dict[str, Any], bool]:
    """The inputs that a worker gets, and whether they were one bare row."""
    body, one_row = contents.packed_body(content, model, {})
    return dict(wire.unpack_body(body).inputs), one_row


@pytest.mark.parametrize("name", [name for name in tensors.DTYPES if name != "BOOL"])
def test_numbers_become_the_bytes_that_numpy_would_make(name: str) -> None:
    """Every dtype, at the ends of its range."""
    dtype = np.dtype(tensors.DTYPES[name].numpy)
    info: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    row = [np.array(item, dtype).item() for item in (info.min, 0, 1, info.max)]
    model = signature(TensorSpec("x", name, (-1, 4)))
    content = documents.from_json(orjson.dumps({"inputs": {"x": [row, row]}})).content

    inputs, _ = packed(content, model)

    assert np.array_equal(tensors.decode(inputs["x"]), np.array([row, row], dtype))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.lists(finite, min_size=4, max_size=4), min_size=1, max_size=5))
def test_lists_flat_data_base64_and_raw_bytes_say_the_same(rows: list[list[float]]) -> None:
    """Four ways to write a tensor, one body for the worker."""
    array = np.array(rows, "<f4")
    forms: list[Any] = [
        array.tolist(),
        {"x": array.tolist()},
        {"shape": list(array.shape), "data": array.ravel().tolist()},
        {
            "dtype": "FP32",
            "shape": list(array.shape),
            "base64": base64.b64encode(array.tobytes()).decode(),
        },
    ]
    made = [documents.from_json(orjson.dumps({"inputs": form})).content for form in forms]
    made.append(documents.from_raw(array.tobytes(), {}).content)
    made.append(documents.from_raw(array.tobytes(), {"shape": f"{len(rows)},4"}).content)

    bodies = {contents.packed_body(content, SIGNATURES[0], {})[0] for content in made}

    assert len(bodies) == 1
    inputs = wire.unpack_body(bodies.pop()).inputs
    assert np.array_equal(tensors.decode(inputs["x"]), array)


@pytest.mark.parametrize(
    ("inputs", "one_row"),
    [([1, 2, 3, 4], True), ([[1, 2, 3, 4]], False), ({"x": [1, 2, 3, 4]}, True)],
)
def test_a_row_without_batch_axis_is_known_as_one(inputs: object, one_row: bool) -> None:
    """So that its answer can be a `prediction` instead of a list of one."""
    content = documents.from_json(orjson.dumps({"inputs": inputs})).content

    found, alone = packed(content, SIGNATURES[0])

    assert alone is one_row
    assert found["x"]["shape"] == [1, 4]


def test_an_input_named_like_a_member_is_still_an_input() -> None:
    """`{"data": [[…]]}` names the input `data` of a model that has one."""
    model = signature(TensorSpec("data", "FP32", (-1, 2)))
    content = documents.from_json(b'{"inputs": {"data": [[1, 2]]}}').content

    assert packed(content, model)[0]["data"]["shape"] == [1, 2]


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"\xff\xd8\xff\xe0", True),
        (b"\x89PNG\r\n\x1a\n", True),
        (b"RIFF\x00\x00\x00\x00WEBP", True),
        (b"BM\x36\x00\x00\x00\x00\x00\x00\x00", True),
        (b"BM\x36\x00\x00\x00\x01\x02\x03\x04", False),
        (b"RIFF\x00\x00\x00\x00WAVE", False),
        (b"", False),
    ],
)
def test_pictures_are_told_from_tensors_by_their_first_bytes(head: bytes, expected: bool) -> None:
    """The four formats, and neighbours that only look alike."""
    assert contents.looks_like_image(head) is expected
    inputs, _ = packed(documents.from_raw(head.ljust(12, b"\0"), {}).content, SIGNATURES[5])
    assert ("image" in inputs["x"]) is expected


def test_a_picture_reaches_the_worker_byte_for_byte() -> None:
    """Base64, a data URL, a body and a form part are all the same bytes."""
    raw = bytes(range(256))
    text = base64.b64encode(raw).decode()
    questions = [
        documents.from_json(orjson.dumps({"image_base64": text})),
        documents.from_json(orjson.dumps({"image_base64": f"data:image/png;base64,{text}"})),
        documents.from_json(orjson.dumps({"inputs": {"x": {"image_base64": text}}})),
        documents.from_image(raw, {}),
        documents.from_form({"image": raw}, {}),
    ]
    for question in questions:
        assert packed(question.content, SIGNATURES[5]) == ({"x": {"image": raw}}, True)


def test_options_are_the_same_in_every_place() -> None:
    """JSON members, form fields and query strings."""
    texts = {
        "model": "m",
        "version": "3",
        "priority": "low",
        "timeout_ms": "250",
        "request_id": "a:1",
    }
    expected = Options(model="m", version="3", lane="low", timeout_ms=250, request_id="a:1")
    document = texts | {"version": 3, "timeout_ms": 250, "inputs": []}

    assert documents.from_json(orjson.dumps(document)).options == expected
    assert documents.from_raw(b"", texts).options == expected
    assert documents.from_image(b"", texts).options == expected
    parts = {name: text.encode() for name, text in texts.items()}
    assert documents.from_form({"image": b"", **parts}, {}).options == expected
    assert set(NAMES) == set(texts)


@pytest.mark.parametrize("text", ["auto", None])
def test_auto_and_nothing_both_ask_for_a_made_id(text: str | None) -> None:
    """`request_id` is None where the gateway is to make one."""
    given_fields = {} if text is None else {"request_id": text}
    assert Options.of(given_fields).request_id is None


def test_parameters_travel_to_the_worker() -> None:
    """As they were sent."""
    parameters = {"a": 1, "b": "x", "c": True, "d": 0.5}
    question = documents.from_json(orjson.dumps({"inputs": [1, 2, 3, 4], "parameters": parameters}))
    body, _ = contents.packed_body(question.content, SIGNATURES[0], question.parameters)

    assert wire.unpack_body(body).parameters == parameters


def test_the_nearest_field_is_named() -> None:
    """A typing error costs one look at the answer."""
    with pytest.raises(UnknownField, match="'imagebase64'; did you mean 'image_base64'"):
        documents.from_json(b'{"imagebase64": ""}')


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["AAAA", "auto", "low", "data:image/png;base64,AAAA"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(
            st.sampled_from(["x", "b", "shape", "data", "dtype", "base64", "image_base64", "?"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=30,
)
fuzzed_documents = st.dictionaries(
    st.sampled_from(["inputs", "image_base64", "parameters", *NAMES, "other"]), values, max_size=4
)
bodies = st.one_of(
    st.binary(max_size=64),
    values.map(orjson.dumps),
    fuzzed_documents.map(orjson.dumps),
    values.map(lambda value: orjson.dumps({"inputs": value})),
)
queries = st.dictionaries(
    st.sampled_from([*NAMES, "shape", "x"]), st.text("0123456789,-aµ", max_size=8), max_size=2
)


@given(bodies, st.sampled_from(MEDIA_TYPES), queries, st.sampled_from(SIGNATURES))
@example(b'{"inputs":[[[[]]]]}', documents.JSON, {}, SIGNATURES[3])
@example(b'{"inputs":{"x":{"shape":[],"data":[]}}}', documents.JSON, {}, SIGNATURES[1])
def test_nothing_but_a_request_error_comes_of_any_body(
    body: bytes, media_type: str | None, query: dict[str, str], model: Signature
) -> None:
    """And what is let through can be unpacked and fits the signature."""
    try:
        question = documents.from_body(media_type, body, query)
        got: set[str] | str = set(packed(question.content, model)[0])
    except RequestError as error:
        got = error.message
    assert got == {spec.name for spec in model.inputs} or 10 < len(got) < 600


@given(
    st.dictionaries(st.sampled_from(["image", *NAMES, "x"]), st.binary(max_size=12)),
    st.sampled_from(SIGNATURES),
)
def test_nothing_but_a_request_error_comes_of_any_form(
    parts: dict[str, bytes], model: Signature
) -> None:
    """The same for the parts of a form."""
    try:
        got: set[str] | str = set(packed(documents.from_form(parts, {}).content, model)[0])
    except RequestError as error:
        got = error.message
    assert got == {"x"} or 10 < len(got) < 600
