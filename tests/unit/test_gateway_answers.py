"""Replies to answers: what a caller reads of tensors, text, NaN and errors."""

from typing import Any

import numpy as np
import orjson
import pytest

from npufleet import tensors
from npufleet.errors import (
    DeadlineExceeded,
    NotAcceptable,
    NpufleetError,
    Overloaded,
    RequestError,
    Unavailable,
)
from npufleet.signature import Signature, TensorSpec
from npufleet.wire import Reply, pack_reply, unpack_reply
from npufleet_gateway import answers


def answer(outputs: dict[str, Any], *, one_row: bool = False) -> dict[str, Any]:
    """What a caller reads of a reply that crossed the wire."""
    wired = {name: tensors.encode(np.asarray(array)) for name, array in outputs.items()}
    reply = unpack_reply(pack_reply(Reply(id="i", model="m", version=2, outputs=wired)))
    document = answers.document(reply, request_id="r", one_row=one_row, latency_ms=1.23456)
    found: dict[str, Any] = orjson.loads(document)
    return found


@pytest.mark.parametrize("name", tensors.DTYPES)
def test_every_dtype_is_answered_as_nested_lists(name: str) -> None:
    """One element per row."""
    array = np.array([[0, 1, 1], [1, 0, 1]], tensors.DTYPES[name].numpy)

    found = answer({"y": array})

    assert found["predictions"] == array.tolist()
    assert (found["request_id"], found["model"], found["version"]) == ("r", "m", 2)
    assert found["latency_ms"] == 1.235


def test_one_bare_row_is_the_prediction_itself() -> None:
    """Of one output its row, of several a map."""
    assert answer({"y": np.array([[1, 2]], np.float32)}, one_row=True)["prediction"] == [1, 2]
    several = answer(
        {"y": np.array([[1, 2]], np.float32), "n": np.array([3], np.int64)}, one_row=True
    )
    assert several["prediction"] == {"y": [1, 2], "n": 3}
    assert "predictions" not in several


def test_text_is_text_and_other_bytes_are_base64() -> None:
    """Nothing is lost where an element is not UTF-8."""
    found = answer({"y": np.array([[b"caf\xc3\xa9"], [b"\xff\x00"]], object)})

    assert found["predictions"] == [["café"], [{"base64": "/wA="}]]


def test_nan_and_infinity_are_null() -> None:
    """JSON has neither, and an answer is always JSON."""
    assert answer({"y": np.array([[np.nan, np.inf, 1]], np.float32)})["predictions"] == [
        [None, None, 1]
    ]


def test_a_raw_answer_describes_its_bytes() -> None:
    """Name, dtype and shape in headers, the data untouched."""
    tensor = tensors.encode(np.arange(6, dtype="<i2").reshape(2, 3))
    body, headers = answers.raw(Reply(id="i", model="m", version=1, outputs={"y": tensor}))

    assert bytes(body) == np.arange(6, dtype="<i2").tobytes()
    assert headers["X-Tensor-Shape"] == "2,3"
    assert headers["X-Tensor-Dtype"] == "INT16"


def test_raw_is_refused_before_the_model_is_asked() -> None:
    """For a model whose answer cannot be one tensor."""
    outputs = tuple(TensorSpec(name, "FP32", (-1,)) for name in "ab")
    with pytest.raises(NotAcceptable, match="m has: a, b"):
        answers.refuse_raw(Signature(model="m", version=1, inputs=(), outputs=outputs))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Overloaded("full"), "1"),
        (Overloaded("full", retry_after_s=0.2), "1"),
        (Unavailable("away", retry_after_s=2.1), "3"),
        (DeadlineExceeded("late"), None),
        (RequestError("wrong"), None),
    ],
)
def test_retry_after_is_whole_seconds_where_waiting_helps(
    error: NpufleetError, expected: str | None
) -> None:
    """At least one, so that nobody comes back at once."""
    assert answers.retry_after(error) == expected
