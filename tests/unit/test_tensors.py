"""Tensors on the wire: numpy in, numpy out, and every lie about them found."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from npufleet import tensors
from npufleet.errors import InvalidData, InvalidDtype, InvalidShape, NpufleetError
from npufleet.tensors import DTYPES

FIXED = st.sampled_from(sorted(DTYPES)).map(lambda name: np.dtype(DTYPES[name].numpy))


@given(hnp.arrays(FIXED, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4)))
def test_every_array_of_a_wire_dtype_survives(array: Any) -> None:
    """Bit for bit, NaN payloads and empty arrays included."""
    wire = tensors.encode(array)
    back = tensors.decode({**wire, "data": bytes(wire["data"])})

    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_bytes_tensors_survive(items: list[bytes]) -> None:
    """Any bytes, zeros and empty elements included."""
    array = np.empty(len(items), dtype=object)
    array[:] = items

    assert tensors.decode(tensors.encode(array)).tolist() == items


def test_text_becomes_utf8() -> None:
    """Strings of numpy and of Python alike."""
    wire = tensors.encode(np.array([["ä", "b"]]))

    assert wire == {"dtype": "BYTES", "shape": [1, 2], "data": b"\x02\0\0\0\xc3\xa4\x01\0\0\0b"}


def test_layout_and_byte_order_of_the_sender_do_not_matter() -> None:
    """The wire is little-endian in C order, whatever the array is in memory."""
    array = np.arange(6, dtype=">i4").reshape(2, 3).T

    back = tensors.decode(tensors.encode(array))

    assert back.dtype == np.dtype("<i4")
    np.testing.assert_array_equal(back, array)


def test_a_plain_array_is_not_copied_and_a_decoded_one_cannot_be_written() -> None:
    """Encoding shares memory; decoding gives a view of the message, which is nobody's to change."""
    array = np.zeros((2, 2), np.float32)
    wire = tensors.encode(array)
    array[0, 0] = 1

    assert bytes(wire["data"])[:4] == np.float32(1).tobytes()
    assert not tensors.decode(wire).flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(1, np.complex64),
        np.zeros(1, "M8[s]"),
        np.zeros(1, [("a", "i4")]),
        np.zeros(1, np.longdouble),
    ],
    ids=["complex", "datetime", "struct", "longdouble"],
)
def test_a_dtype_without_a_wire_name_is_refused(array: Any) -> None:
    """The error names what there is."""
    with pytest.raises(InvalidDtype, match="FP32"):
        tensors.encode(array)


@pytest.mark.parametrize("item", [None, 5, 1.5, ["a"], "\ud800"], ids=repr)
def test_an_object_array_may_hold_text_and_bytes_alone(item: object) -> None:
    """A number must not turn into that many zero bytes."""
    array = np.empty(1, dtype=object)
    array[0] = item

    with pytest.raises(InvalidData, match="element of BYTES"):
        tensors.encode(array)


FOUR = b"\0" * 16
BAD: dict[str, tuple[dict[str, Any], type[NpufleetError], str]] = {
    "no dtype": ({"shape": [4], "data": FOUR}, InvalidDtype, "got None"),
    "numpy's name": ({"dtype": "float32", "shape": [4], "data": FOUR}, InvalidDtype, "'float32'"),
    "dtype a list": ({"dtype": ["FP32"], "shape": [4], "data": FOUR}, InvalidDtype, "FP32"),
    "no shape": ({"dtype": "FP32", "data": FOUR}, InvalidShape, "list of integers"),
    "shape a number": ({"dtype": "FP32", "shape": 4, "data": FOUR}, InvalidShape, "got 4"),
    "no dimension": ({"dtype": "FP32", "shape": [], "data": FOUR}, InvalidShape, "got 0"),
    "rank 17": ({"dtype": "FP32", "shape": [1] * 17, "data": FOUR}, InvalidShape, "got 17"),
    "negative": ({"dtype": "FP32", "shape": [-4], "data": FOUR}, InvalidShape, "got -4"),
    "float": ({"dtype": "FP32", "shape": [4.0], "data": FOUR}, InvalidShape, "got 4.0"),
    "bool": ({"dtype": "FP32", "shape": [True], "data": FOUR}, InvalidShape, "got True"),
    "huge": ({"dtype": "FP32", "shape": [1 << 62], "data": FOUR}, InvalidShape, "2^40"),
    "overflow": ({"dtype": "FP32", "shape": [1 << 33] * 3, "data": FOUR}, InvalidShape, "2^40"),
    "overflow to 0": ({"dtype": "FP32", "shape": [1 << 32] * 2, "data": b""}, InvalidShape, "2^40"),
    "hidden by a 0": (
        {"dtype": "FP32", "shape": [0, 1 << 40, 1 << 40], "data": b""},
        InvalidShape,
        "2^40",
    ),
    "no data": ({"dtype": "FP32", "shape": [4]}, InvalidData, "NoneType"),
    "data text": ({"dtype": "FP32", "shape": [4], "data": "x" * 16}, InvalidData, "str"),
    "data a list": ({"dtype": "FP32", "shape": [4], "data": [0, 0]}, InvalidData, "list"),
    "short": ({"dtype": "FP32", "shape": [5], "data": FOUR}, InvalidData, "20 bytes, got 16"),
    "long": ({"dtype": "FP32", "shape": [3], "data": FOUR}, InvalidData, "12 bytes, got 16"),
    "BYTES cut": ({"dtype": "BYTES", "shape": [1], "data": b"\5\0\0\0ab"}, InvalidData, "read 0"),
    "BYTES too many": ({"dtype": "BYTES", "shape": [1], "data": bytes(8)}, InvalidData, "read 1"),
    "BYTES too few": ({"dtype": "BYTES", "shape": [3], "data": bytes(8)}, InvalidData, "read 2"),
    "BYTES length cut": ({"dtype": "BYTES", "shape": [1], "data": b"\0\0"}, InvalidData, "byte 0"),
}


@pytest.mark.parametrize(("tensor", "error", "words"), BAD.values(), ids=BAD)
def test_a_tensor_that_lies_is_refused(
    tensor: dict[str, Any], error: type[NpufleetError], words: str
) -> None:
    """By its own kind of error, which names the tensor and what was got."""
    with pytest.raises(error) as caught:
        tensors.check(tensor, "input 'x'")
    assert type(caught.value) is error
    assert "input 'x'" in caught.value.message
    assert words in caught.value.message
    with pytest.raises(error):
        tensors.decode(tensor)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from([*DTYPES, "BYTES"]) | JUNK,
            "shape": st.lists(st.integers(-2, 5), max_size=4) | JUNK,
            "data": st.binary(max_size=64) | JUNK,
        },
    )
)
def test_no_tensor_can_raise_anything_but_our_errors(tensor: dict[str, Any]) -> None:
    """Whatever msgpack can carry in the three fields."""
    try:
        array = tensors.decode(tensor)
    except NpufleetError:
        return
    assert list(array.shape) == list(tensor["shape"])
