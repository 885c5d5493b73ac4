"""Rows to try a model with: made up from its signature, or out of files.

A sample is one row, in any form that the Python client takes. Knows nothing of how rows are run.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from npufleet.errors import ConfigurationError
from npufleet.signature import Signature, TensorSpec
from npufleet.tensors import DTYPES, Array
from npufleet_worker.images import ImageSpec

Sample = Mapping[str, Any]
"""One row, by input name: an array of one row, or the path or bytes of a picture."""

ARRAYS = (".npy", ".npz")

_BLOTCHES = 9
"""Colours along each side of a made-up picture: smooth like a photo, and no two alike."""


def made_up(
    signature: Signature, *, image: ImageSpec | None, count: int, seed: int
) -> list[Sample]:
    """`count` different rows: floats are normal, integers 0 or 1, pictures smooth noise.

    Integers are small since many models look them up in a table. Raises ConfigurationError where
    the model leaves a dimension open, which only a file can fill.
    """
    dice = np.random.default_rng(seed)
    return [
        {
            spec.name: _picture(image, dice)
            if image and spec.name == signature.image_input
            else _numbers(spec, dice)
            for spec in signature.inputs
        }
        for _ in range(count)
    ]


def from_files(signature: Signature, paths: Sequence[Path]) -> list[Sample]:
    """The rows of all files: .npy for the one input, .npz with an array per input, or pictures."""
    return [sample for path in paths for sample in _from_file(signature, path)]


def _from_file(signature: Signature, path: Path) -> Iterator[Sample]:
    if path.suffix not in ARRAYS:
        if signature.image_input is None or len(signature.inputs) > 1:
            raise ConfigurationError(
                f"{path}: {signature.model} takes {signature.described()}: "
                f"give its rows as {' or '.join(ARRAYS)}"
            )
        yield {signature.image_input: path}
        return
    arrays = _arrays(signature, path)
    rows = min((len(array) for array in arrays.values()), default=0)
    for at in range(rows):
        yield {name: array[at : at + 1] for name, array in arrays.items()}


def _arrays(signature: Signature, path: Path) -> dict[str, Array]:
    try:
        content = np.load(path, allow_pickle=False)
        arrays = dict(content) if path.suffix == ".npz" else {signature.inputs[0].name: content}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if any(array.ndim == 0 for array in arrays.values()):
        raise ConfigurationError(f"{path}: the first axis of an array must count its rows")
    return arrays


def _numbers(spec: TensorSpec, dice: np.random.Generator) -> Array:
    if any(size < 0 for size in spec.row_shape):
        raise ConfigurationError(
            f"input {spec.name!r} leaves dimensions open, so that no row can be made up: "
            f"give some with --samples ({' or '.join(ARRAYS)})"
        )
    shape, dtype = (1, *spec.row_shape), np.dtype(DTYPES[spec.dtype].numpy)
    if dtype.kind == "f":
        return dice.normal(size=shape).astype(dtype)
    return dice.integers(0, 2, size=shape).astype(dtype)


def _picture(image: ImageSpec, dice: np.random.Generator) -> bytes:
    """As a PNG, a third larger than the model wants it, so that cutting and scaling have work."""
    blotches = dice.integers(0, 256, size=(_BLOTCHES, _BLOTCHES, 3)).astype(np.uint8)
    height, width = (size * 4 // 3 + 1 for size in image.size)
    large = Image.fromarray(blotches).resize((width, height), Image.Resampling.BICUBIC)
    stored = io.BytesIO()
    large.save(stored, "PNG")
    return stored.getvalue()
