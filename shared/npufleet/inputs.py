"""What a caller hands over, as the wire's inputs: arrays, lists, and pictures as bytes or files.

Arrays are sent as they are and never cast; lists become what the model asks for. Knows nothing of
connections.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from npufleet import tensors
from npufleet.errors import InvalidData, InvalidDtype, InvalidImage, InvalidInput, InvalidShape
from npufleet.signature import Signature, TensorSpec, check_inputs
from npufleet.tensors import Array

Value = Any
"""An array of the input's rank; one of a rank less (a single row); nested lists of either; for an
image input also the encoded picture as bytes, or the path of its file as `Path` or `str`."""


def wire_inputs(signature: Signature, inputs: Mapping[str, Value] | Value) -> dict[str, Any]:
    """The inputs by name, checked against the signature. Reads the files that paths name.

    `inputs` may be the bare value where the model has one input. Raises a RequestError.
    """
    named = _named(signature, inputs)
    content = {name: _wire(signature, signature.input(name), v) for name, v in named.items()}
    check_inputs(signature, content)
    return content


def reads_files(signature: Signature, inputs: Mapping[str, Value] | Value) -> bool:
    """Whether `wire_inputs` will wait for a disk."""
    values = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    return signature.image_input is not None and any(_is_path(value) for value in values)


def _named(signature: Signature, inputs: Mapping[str, Value] | Value) -> dict[str, Value]:
    if isinstance(inputs, Mapping):
        return {str(name): value for name, value in inputs.items()}
    if len(signature.inputs) != 1:
        raise InvalidInput(
            f"{signature.model} takes {signature.described()}: pass a dict of all of them"
        )
    return {signature.inputs[0].name: inputs}


def _wire(signature: Signature, spec: TensorSpec, value: Value) -> dict[str, Any]:
    if spec.name == signature.image_input:
        if _is_path(value):
            return {"image": _content(value)}
        if isinstance(value, bytes | bytearray | memoryview):
            return {"image": value}
    array = _array(spec, value)
    if array.ndim == len(spec.shape) - 1:
        array = array[np.newaxis]
    return tensors.encode(array)


def _is_path(value: Value) -> bool:
    return isinstance(value, str | os.PathLike)


def _content(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise InvalidImage(f"cannot read the image: {error}") from None


def _array(spec: TensorSpec, value: Value) -> Array:
    if isinstance(value, bytes | bytearray | memoryview):
        raise InvalidInput(f"input {spec.name!r} takes an array, not bytes")
    if not isinstance(value, Sequence | int | float):
        return np.asarray(value)
    try:
        array = np.asarray(value)
    except ValueError:
        raise InvalidShape(f"input {spec.name!r}: the lists are ragged") from None
    wanted = tensors.DTYPES.get(spec.dtype)
    return array if wanted is None else _cast(spec, array, np.dtype(wanted.numpy))


def _cast(spec: TensorSpec, array: Array, dtype: "np.dtype[Any]") -> Array:
    """Numbers of Python's in the model's dtype, where that loses no more than precision."""
    kinds = {"b": "b", "i": "iuf", "u": "iuf", "f": "f"}.get(array.dtype.kind, "")
    if dtype.kind not in kinds and array.size:
        raise InvalidDtype(
            f"input {spec.name!r}: expected {spec.dtype}, got a list of {array.dtype}"
        )
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise InvalidData(f"input {spec.name!r}: a number does not fit into {spec.dtype}")
    with np.errstate(over="ignore"):  # too large for FP16 is infinity, as everywhere in numpy
        return array.astype(dtype)
