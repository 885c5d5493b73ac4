"""Tensors as the wire carries them: Open Inference Protocol dtype names, little-endian, C order.

A wire tensor is a map `{"dtype", "shape", "data"}`; `shape[0]` counts the rows. `BYTES` data is
each element's length (4 bytes, little-endian) followed by that many bytes, as the Open Inference
Protocol's binary extension lays down. Knows nothing of models, msgpack or Redis.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from npufleet.errors import InvalidData, InvalidDtype, InvalidShape

Array = npt.NDArray[Any]
Buffer = bytes | bytearray | memoryview

MAX_RANK = 16
MAX_ELEMENTS = 1 << 40


@dataclass(frozen=True, slots=True)
class Dtype:
    """One dtype of the wire: `struct_code` is None where Python's struct has no such number."""

    name: str
    itemsize: int
    numpy: str
    struct_code: str | None


DTYPES: Mapping[str, Dtype] = {
    d.name: d
    for d in (
        Dtype("BOOL", 1, "bool", "?"),
        Dtype("UINT8", 1, "u1", "B"),
        Dtype("UINT16", 2, "<u2", "H"),
        Dtype("UINT32", 4, "<u4", "I"),
        Dtype("UINT64", 8, "<u8", "Q"),
        Dtype("INT8", 1, "i1", "b"),
        Dtype("INT16", 2, "<i2", "h"),
        Dtype("INT32", 4, "<i4", "i"),
        Dtype("INT64", 8, "<i8", "q"),
        Dtype("FP16", 2, "<f2", "e"),
        Dtype("FP32", 4, "<f4", "f"),
        Dtype("FP64", 8, "<f8", "d"),
    )
}
"""The dtypes of fixed size. `BYTES` is the one other dtype."""

BYTES = "BYTES"

_BY_NUMPY = {np.dtype(d.numpy): d.name for d in DTYPES.values()}


def dtype_of(array_dtype: npt.DTypeLike) -> str:
    """The wire's name of a numpy dtype; InvalidDtype where it has none."""
    dtype = np.dtype(array_dtype)
    if dtype.kind in "OSU":
        return BYTES
    name = _BY_NUMPY.get(dtype.newbyteorder("<") if dtype.itemsize > 1 else dtype)
    if name is None:
        raise InvalidDtype(f"numpy {dtype} has no wire dtype; one of {', '.join(DTYPES)}, BYTES")
    return name


def encode(array: Array) -> dict[str, Any]:
    """A wire tensor that shares the array's memory where its layout allows."""
    name = dtype_of(array.dtype)
    shape = list(array.shape)
    if name == BYTES:
        return {"dtype": name, "shape": shape, "data": pack_bytes(array.ravel().tolist())}
    flat = np.ascontiguousarray(array, dtype=DTYPES[name].numpy)
    return {"dtype": name, "shape": shape, "data": flat.reshape(-1).view(np.uint8).data}


def decode(tensor: Mapping[str, Any]) -> Array:
    """A read-only array over the tensor's own bytes (objects of `bytes` for BYTES).

    Raises InvalidDtype, InvalidShape or InvalidData.
    """
    header = check(tensor)
    if header.dtype == BYTES:
        items = np.empty(len(header), dtype=object)
        items[:] = unpack_bytes(tensor["data"], len(header))
        return items.reshape(header.shape)
    array = np.frombuffer(tensor["data"], dtype=DTYPES[header.dtype].numpy)
    array.flags.writeable = False
    return array.reshape(header.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """What a tensor says of itself, checked: `len` is the number of elements."""

    dtype: str
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return math.prod(self.shape)


def check(tensor: Mapping[str, Any], name: str = "tensor") -> Header:
    """The header of a wire tensor whose data fits it, without touching the data.

    `name` is what the errors call it. Raises InvalidDtype, InvalidShape or InvalidData.
    """
    dtype = tensor.get("dtype")
    if not isinstance(dtype, str) or (dtype not in DTYPES and dtype != BYTES):
        known = ", ".join(DTYPES)
        raise InvalidDtype(f"{name}: dtype must be one of {known}, BYTES; got {_shown(dtype)}")
    shape = check_shape(tensor.get("shape"), name)
    data = tensor.get("data")
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidData(f"{name}: data must be binary, got {type(data).__name__}")
    header = Header(dtype, shape)
    if dtype == BYTES:
        unpack_bytes(data, len(header), name)
        return header
    wanted = len(header) * DTYPES[dtype].itemsize
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size != wanted:
        raise InvalidData(
            f"{name}: {dtype} of shape {list(shape)} takes {wanted} bytes, got {size}"
        )
    return header


def check_shape(shape: Any, name: str = "tensor") -> tuple[int, ...]:
    """The shape as a tuple of non-negative integers of a sane product; else InvalidShape."""
    if not isinstance(shape, list | tuple):
        raise InvalidShape(f"{name}: shape must be a list of integers, got {_shown(shape)}")
    if not 1 <= len(shape) <= MAX_RANK:
        raise InvalidShape(
            f"{name}: shape must have 1 to {MAX_RANK} dimensions (the first counts the rows), "
            f"got {len(shape)}"
        )
    for size in shape:
        # bool is an int to Python, and never a size
        if type(size) is not int or not 0 <= size <= MAX_ELEMENTS:
            raise InvalidShape(
                f"{name}: every dimension must be an integer from 0 to 2^40, got {_shown(size)}"
            )
    # Zeros left out: numpy refuses [0, 2^40, 2^40], too
    if math.prod(size for size in shape if size) > MAX_ELEMENTS:
        raise InvalidShape(f"{name}: shape {list(shape)} has more than 2^40 elements")
    return tuple(shape)


def pack_bytes(items: Sequence[bytes | str]) -> bytes:
    """BYTES data of the elements, text as UTF-8; InvalidData for anything else."""
    parts: list[bytes] = []
    for item in items:
        try:
            raw = item.encode() if isinstance(item, str) else item
        except UnicodeEncodeError as error:
            raise InvalidData(f"an element of BYTES is not text: {error}") from None
        if not isinstance(raw, bytes):
            raise InvalidData(f"an element of BYTES is bytes or str, got {type(item).__name__}")
        parts += (len(raw).to_bytes(4, "little"), raw)
    return b"".join(parts)


def unpack_bytes(data: Buffer, count: int, name: str = "tensor") -> list[bytes]:
    """The elements of BYTES data; InvalidData unless there are exactly `count`."""
    view, at = memoryview(data).cast("B"), 0
    items: list[bytes] = []
    while at < len(view):
        size = int.from_bytes(view[at : at + 4], "little")
        end = at + 4 + size
        if at + 4 > len(view) or end > len(view) or len(items) == count:
            break
        items.append(bytes(view[at + 4 : end]))
        at = end
    if at != len(view) or len(items) != count:
        raise InvalidData(
            f"{name}: BYTES data must be exactly {count} length-prefixed elements; "
            f"read {len(items)} and stopped at byte {at} of {len(view)}"
        )
    return items


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
