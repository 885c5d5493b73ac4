"""One input's value in JSON, to a wire tensor: nested lists, `{"shape", "data"}` or base64.

Numbers go to bytes through a cached `struct.Struct`, a third of numpy's price for lists. Knows the
input's spec, and nothing of documents or HTTP.
"""

import binascii
import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

from npufleet import tensors
from npufleet.errors import InvalidBase64, InvalidData, InvalidDtype, InvalidImage, InvalidShape
from npufleet.signature import TensorSpec, shape_text
from npufleet_gateway import fields

DESCRIBED = ("shape", "data", "dtype", "base64", "image_base64")
"""The members of an input that is given as an object."""


def tensor(spec: TensorSpec, value: Any, *, booleans: bool) -> tuple[dict[str, Any], bool]:
    """The wire form of an input, and whether it was one row given without the batch axis.

    `booleans` says whether the document has any `true` or `false`: only then the numbers are
    searched for them. Raises InvalidData, InvalidShape, InvalidDtype, InvalidBase64, InvalidImage
    or UnknownField, each naming the input.
    """
    label = f"input {spec.name!r}"
    if isinstance(value, dict):
        return _described(spec, value, label, booleans=booleans)
    if not isinstance(value, list) and len(spec.shape) != 1:
        raise InvalidData(
            f"{label}: expected lists of {spec.dtype} of shape {shape_text(spec.shape)}, "
            f"got {fields.shown(value)}"
        )
    flat, shape = _flattened(value, label)
    one_row = len(shape) == len(spec.shape) - 1
    if one_row:
        shape = [1, *shape]
    elif len(shape) != len(spec.shape):
        raise InvalidShape(f"{label}: expected shape {shape_text(spec.shape)}, got {shape}")
    data = _packed(spec.dtype, flat, label, booleans=booleans)
    return {"dtype": spec.dtype, "shape": shape, "data": data}, one_row


def image(text: Any, label: str) -> dict[str, Any]:
    """An encoded picture from its base64 text; it is not decoded here."""
    data = from_base64(text, label)
    if not data:
        raise InvalidImage(f"{label}: the image is empty (0 bytes)")
    return {"image": data}


def from_base64(text: Any, label: str) -> bytes:
    """The bytes of strict base64, with or without a `data:` URL's head; else InvalidBase64."""
    if not isinstance(text, str):
        raise InvalidBase64(f"{label} must be base64 text, got {fields.shown(text)}")
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidBase64(f"{label}: a data URL must have the form data:<type>;base64,<text>")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        reason = "it has characters outside ASCII" if not text.isascii() else str(error)
        raise InvalidBase64(f"{label} is not valid base64: {reason}") from None


def _described(
    spec: TensorSpec, value: Mapping[str, Any], label: str, *, booleans: bool
) -> tuple[dict[str, Any], bool]:
    fields.refuse_unknown(value, DESCRIBED, where=label)
    if "image_base64" in value:
        if len(value) > 1:
            raise InvalidData(f"{label}: image_base64 stands alone, without {_others(value)}")
        return image(value["image_base64"], label), True
    dtype = value.get("dtype", spec.dtype)
    if dtype != spec.dtype:
        raise InvalidDtype(f"{label}: expected {spec.dtype}, got {fields.shown(dtype)}")
    if "shape" not in value:
        raise InvalidShape(f"{label}: shape is missing; expected {shape_text(spec.shape)}")
    shape = tensors.check_shape(value["shape"], label)
    if ("data" in value) == ("base64" in value):
        raise InvalidData(f"{label}: give exactly one of data and base64")
    if "base64" in value:
        data = from_base64(value["base64"], label)
    else:
        data = _packed(dtype, _flat(value["data"], shape, label), label, booleans=booleans)
    return {"dtype": dtype, "shape": list(shape), "data": data}, False


def _others(value: Mapping[str, Any]) -> str:
    return ", ".join(name for name in value if name != "image_base64")


def _flat(data: Any, shape: tuple[int, ...], label: str) -> list[Any]:
    if not isinstance(data, list):
        raise InvalidData(f"{label}: data must be a flat list, got {fields.shown(data)}")
    if len(data) != math.prod(shape):
        raise InvalidData(
            f"{label}: shape {list(shape)} takes {math.prod(shape)} values, got {len(data)}"
        )
    return data


def _flattened(value: Any, label: str) -> tuple[list[Any], list[int]]:
    """The leaves of nested lists and the shape they nest to; InvalidShape where they are ragged."""
    level: list[Any] = [value]
    shape: list[int] = []
    while level and isinstance(level[0], list):
        if len(shape) == tensors.MAX_RANK:
            raise InvalidShape(f"{label}: lists nest deeper than {tensors.MAX_RANK}")
        stray = set(map(type, level)) - {list}
        if stray:
            raise InvalidShape(f"{label}: ragged: lists and single values at depth {len(shape)}")
        sizes = set(map(len, level))
        if len(sizes) > 1:
            raise InvalidShape(
                f"{label}: ragged: lists of {min(sizes)} and of {max(sizes)} values at depth "
                f"{len(shape)}"
            )
        shape += sizes
        level = list(chain.from_iterable(level)) if len(level) > 1 else level[0]
    return level, shape


def _packed(dtype: str, flat: list[Any], label: str, *, booleans: bool) -> bytes:
    """The little-endian bytes of a flat list; InvalidData naming the first value that is wrong."""
    if dtype == tensors.BYTES:
        _require(str, flat, label, "text")
        return tensors.pack_bytes(flat)
    code = tensors.DTYPES[dtype].struct_code
    if code == "?":  # struct takes anything for a truth value
        _require(bool, flat, label, "true or false")
    elif booleans and bool in set(map(type, flat)):  # and True for the number 1
        raise InvalidData(f"{label}: expected {dtype}, got true or false")
    try:
        return _packer(f"<{len(flat)}{code}").pack(*flat)
    except (struct.error, OverflowError, TypeError):
        raise _wrong_value(dtype, flat, label) from None


@lru_cache(maxsize=256)
def _packer(layout: str) -> struct.Struct:
    return struct.Struct(layout)


def _require(wanted: type, flat: list[Any], label: str, words: str) -> None:
    for at, item in enumerate(flat):
        if type(item) is not wanted:
            raise InvalidData(f"{label}: expected {words}, got {fields.shown(item)} (value {at})")


def _wrong_value(dtype: str, flat: list[Any], label: str) -> InvalidData | InvalidShape:
    packer = _packer(f"<1{tensors.DTYPES[dtype].struct_code}")
    for at, item in enumerate(flat):
        if isinstance(item, list):
            return InvalidShape(f"{label}: ragged: a list where value {at} should be")
        try:
            packer.pack(item)
        except (struct.error, OverflowError, TypeError):
            kind = "a value" if isinstance(item, int | float) else "numbers"
            return InvalidData(
                f"{label}: expected {kind} of {dtype}, got {fields.shown(item)} (value {at})"
            )
    return InvalidData(f"{label}: the values do not fit {dtype}")
