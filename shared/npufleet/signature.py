"""What a model takes and gives, as its workers publish it and its callers check against it.

A signature travels as JSON in the registry hash of the model. Knows nothing of model files, Redis
or how a model runs.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from npufleet import tensors
from npufleet.errors import InvalidDtype, InvalidInput, InvalidShape


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output: OIP dtype name; shape with -1 for "any", `shape[0]` the batch axis."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def row_bytes(self) -> int | None:
        """Bytes of one row; None where a dimension or the element size varies."""
        dtype = tensors.DTYPES.get(self.dtype)
        if dtype is None or any(size < 0 for size in self.row_shape):
            return None
        return dtype.itemsize * math.prod(self.row_shape)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model allows: milliseconds, requests and bytes; queue bounds are per lane."""

    timeout_ms: int = 30_000
    max_queue: int = 10_000
    max_queue_bytes: int = 512 << 20
    max_batch_size: int = 32
    allow_nan: bool = True


@dataclass(frozen=True, slots=True)
class Signature:
    """One model as its callers see it. `image_input` names the input that may be a picture."""

    model: str
    version: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    image_input: str | None = None
    classifies: bool = False
    limits: Limits = field(default_factory=Limits)

    def input(self, name: str) -> TensorSpec:
        """The input of that name; InvalidInput names those that exist."""
        for spec in self.inputs:
            if spec.name == name:
                return spec
        raise InvalidInput(f"{self.model} has no input {name[:80]!r}; it takes {self.described()}")

    def described(self) -> str:
        """The inputs in words, for error messages."""
        return ", ".join(
            f"{s.name!r} ({s.dtype} {shape_text(s.shape)}"
            + (" or an encoded image)" if s.name == self.image_input else ")")
            for s in self.inputs
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Signature":
        """The signature again; fields that this release does not know are left out."""
        raw = json.loads(text)
        specs = {
            key: tuple(TensorSpec(s["name"], s["dtype"], tuple(s["shape"])) for s in raw[key])
            for key in ("inputs", "outputs")
        }
        known = {k: v for k, v in raw.get("limits", {}).items() if k in Limits.__slots__}
        return cls(
            model=raw["model"],
            version=raw["version"],
            image_input=raw.get("image_input"),
            classifies=raw.get("classifies", False),
            limits=Limits(**known),
            **specs,
        )


def shape_text(shape: Sequence[int]) -> str:
    """`[N, 224, ?]`: N rows, ? any size."""
    rest = ["?" if size < 0 else str(size) for size in shape[1:]]
    return "[" + ", ".join(["N" if shape and shape[0] < 0 else str(*shape[:1]), *rest]) + "]"


def check_inputs(signature: Signature, inputs: Mapping[str, Any]) -> int:
    """The number of rows of a request's inputs, every one of them checked against the signature.

    `inputs` maps names to wire tensors, or to `{"image": bytes}` for the image input (one row). No
    byte of the data is read, but for the lengths inside BYTES. Raises InvalidInput, InvalidDtype,
    InvalidShape or InvalidData, naming what was expected and what was got.
    """
    for name in inputs:
        signature.input(name)
    missing = [spec.name for spec in signature.inputs if spec.name not in inputs]
    if missing:
        raise InvalidInput(
            f"input {', '.join(map(repr, missing))} is missing; "
            f"{signature.model} takes {signature.described()}"
        )
    rows = {
        spec.name: _check_input(signature, spec, inputs[spec.name]) for spec in signature.inputs
    }
    counts = set(rows.values())
    if len(counts) > 1:
        raise InvalidShape(f"all inputs must have the same number of rows (shape[0]), got {rows}")
    count = counts.pop() if counts else 0
    if count < 1:
        raise InvalidShape("a request must have at least one row, got 0")
    return count


def _check_input(signature: Signature, spec: TensorSpec, value: Any) -> int:
    label = f"input {spec.name!r}"
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{label} must be a tensor, got {type(value).__name__}")
    if "image" in value:
        return _check_image(signature, spec, value)
    header = tensors.check(value, label)
    if header.dtype != spec.dtype:
        raise InvalidDtype(f"{label}: expected {spec.dtype}, got {header.dtype}")
    fits = len(header.shape) == len(spec.shape) and all(
        want in (-1, got) for want, got in zip(spec.row_shape, header.shape[1:], strict=True)
    )
    if not fits:
        raise InvalidShape(
            f"{label}: expected shape {shape_text(spec.shape)}, got {list(header.shape)}"
        )
    return header.shape[0]


def _check_image(signature: Signature, spec: TensorSpec, value: Mapping[str, Any]) -> int:
    if spec.name != signature.image_input:
        raise InvalidInput(f"input {spec.name!r} takes a tensor, not an encoded image")
    if not isinstance(value["image"], bytes | bytearray | memoryview):
        raise InvalidInput(
            f"input {spec.name!r}: image must be binary, got {type(value['image']).__name__}"
        )
    return 1
