"""A model's signature: across the registry and against a request's inputs."""

import json
from typing import Any

import pytest

from npufleet.errors import InvalidData, InvalidDtype, InvalidInput, InvalidShape, NpufleetError
from npufleet.signature import Limits, Signature, TensorSpec, check_inputs, shape_text

TWO = Signature(
    "two",
    3,
    (TensorSpec("x", "FP32", (-1, 2, -1)), TensorSpec("words", "BYTES", (-1, 1))),
    (TensorSpec("y", "FP32", (-1, 2)),),
    limits=Limits(timeout_ms=5, max_batch_size=4),
)
PICTURE = Signature(
    "picture",
    1,
    (TensorSpec("image", "FP32", (-1, 2, 2, 3)),),
    (TensorSpec("p", "FP32", (-1, 10)),),
    image_input="image",
    classifies=True,
)


def x(rows: int, width: int = 1, **changes: Any) -> dict[str, Any]:
    return {"dtype": "FP32", "shape": [rows, 2, width], "data": bytes(8 * rows * width), **changes}


def words(rows: int) -> dict[str, Any]:
    return {"dtype": "BYTES", "shape": [rows, 1], "data": bytes(4 * rows)}


@pytest.mark.parametrize("signature", [TWO, PICTURE], ids=["tensors", "image"])
def test_a_signature_survives_the_registry(signature: Signature) -> None:
    """Published as JSON, read back equal."""
    assert Signature.from_json(signature.to_json()) == signature
    assert Signature.from_json(signature.to_json().encode()) == signature


def test_a_later_release_may_publish_more() -> None:
    """Fields and limits that this release does not know are left out; missing ones default."""
    raw = json.loads(TWO.to_json())
    raw["colour"] = "blue"
    raw["inputs"][0]["unit"] = "mm"
    raw["limits"]["later"] = 1
    assert Signature.from_json(json.dumps(raw)) == TWO

    del raw["limits"], raw["image_input"], raw["classifies"]
    assert Signature.from_json(json.dumps(raw)).limits == Limits()


def test_the_rows_of_a_request_are_counted() -> None:
    """shape[0] of every input; an encoded image is one row."""
    assert check_inputs(TWO, {"x": x(3, width=7), "words": words(3)}) == 3
    assert check_inputs(PICTURE, {"image": {"image": b"not looked at here"}}) == 1


BAD: dict[str, tuple[Signature, dict[str, Any], type[NpufleetError], str]] = {
    "unknown name": (TWO, {"x": x(1), "z": x(1)}, InvalidInput, "no input 'z'; it takes 'x' (FP32"),
    "missing": (TWO, {"x": x(1)}, InvalidInput, "'words' is missing"),
    "nothing": (TWO, {}, InvalidInput, "'x', 'words' is missing"),
    "not a map": (TWO, {"x": [1], "words": words(1)}, InvalidInput, "must be a tensor, got list"),
    "dtype": (TWO, {"x": words(1), "words": words(1)}, InvalidDtype, "expected FP32, got BYTES"),
    "inner size": (
        TWO,
        {"x": x(1, shape=[1, 1, 2]), "words": words(1)},
        InvalidShape,
        "expected shape [N, 2, ?], got [1, 1, 2]",
    ),
    "rank": (TWO, {"x": x(1, shape=[1, 2]), "words": words(1)}, InvalidShape, "got [1, 2]"),
    "rows differ": (TWO, {"x": x(2), "words": words(1)}, InvalidShape, "'x': 2, 'words': 1"),
    "no row": (TWO, {"x": x(0), "words": words(0)}, InvalidShape, "at least one row"),
    "data": (TWO, {"x": x(1, data=b""), "words": words(1)}, InvalidData, "8 bytes, got 0"),
    "image for a tensor": (
        TWO,
        {"x": {"image": b""}, "words": words(1)},
        InvalidInput,
        "takes a tensor, not an encoded image",
    ),
    "image as text": (PICTURE, {"image": {"image": "x"}}, InvalidInput, "must be binary, got str"),
}


@pytest.mark.parametrize(("signature", "inputs", "error", "said"), BAD.values(), ids=BAD)
def test_inputs_that_do_not_fit_are_refused(
    signature: Signature, inputs: dict[str, Any], error: type[NpufleetError], said: str
) -> None:
    """Naming the input, what was expected and what was got."""
    with pytest.raises(error) as caught:
        check_inputs(signature, inputs)
    assert type(caught.value) is error
    assert said in caught.value.message


def test_specs_describe_themselves() -> None:
    """Bytes of a row where they are known, and shapes as people write them."""
    assert TensorSpec("a", "FP16", (-1, 3, 2)).row_bytes == 12
    assert TensorSpec("a", "FP16", (-1,)).row_bytes == 2
    assert TensorSpec("a", "FP16", (-1, -1)).row_bytes is None
    assert TensorSpec("a", "BYTES", (-1, 1)).row_bytes is None
    assert shape_text((-1, 224, -1)) == "[N, 224, ?]"
    assert shape_text((1, 2)) == "[1, 2]"
    assert "or an encoded image" in PICTURE.described()
