"""The content of a request in each form it may come in, to the inputs that a model takes.

A content is read before the model is known and turned into inputs once it is. A picture is never
decoded here: at most its first bytes are looked at, to choose between picture and tensor. Knows
nothing of HTTP or of options.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from npufleet import wire
from npufleet.errors import InvalidData, InvalidImage, InvalidInput
from npufleet.signature import Signature, TensorSpec, check_inputs, shape_text
from npufleet_gateway import values

_BMP_RESERVED = slice(6, 10)
"""Zero in every BMP: its magic of two letters alone would claim every 20,000th tensor."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Wire tensors by name. `one_row`: the caller sent a single row, without a batch axis."""

    by_name: Mapping[str, Mapping[str, Any]]
    one_row: bool


class Content(Protocol):
    """What a caller sent, whatever its form."""

    @property
    def is_image(self) -> bool:
        """Certainly a picture, so that it may choose the model where none is named."""
        ...

    def inputs(self, signature: Signature) -> Inputs:
        """Raises a RequestError that names the input, what was expected and what was got."""
        ...


@dataclass(frozen=True, slots=True)
class Picture:
    """One encoded picture for the image input."""

    data: bytes
    is_image: bool = True

    def inputs(self, signature: Signature) -> Inputs:
        if signature.image_input is None:
            raise InvalidInput(
                f"{signature.model} takes no image; it takes {signature.described()}"
            )
        if not self.data:
            raise InvalidImage("the image is empty (0 bytes)")
        return Inputs({signature.image_input: {"image": self.data}}, one_row=True)


@dataclass(frozen=True, slots=True)
class JsonValues:
    """The `inputs` of a JSON document: values by name, or the value of the only input.

    `booleans` says whether the document has any `true` or `false`.
    """

    value: Any
    booleans: bool = True
    is_image: bool = False

    def inputs(self, signature: Signature) -> Inputs:
        found, one_row = {}, True
        for name, value in self._by_name(signature).items():
            spec = signature.input(name)
            found[name], alone = values.tensor(spec, value, booleans=self.booleans)
            one_row = one_row and alone
        return Inputs(found, one_row)

    def _by_name(self, signature: Signature) -> Mapping[str, Any]:
        only = signature.inputs[0] if len(signature.inputs) == 1 else None
        value = self.value
        if isinstance(value, dict):
            bare = only and only.name not in value and value.keys() & set(values.DESCRIBED)
            return {only.name: value} if only and bare else value
        if only is None:
            raise InvalidInput(
                f"inputs must be an object with one member per input; {signature.model} takes "
                f"{signature.described()}"
            )
        return {only.name: value}


@dataclass(frozen=True, slots=True)
class RawBytes:
    """A body without structure: the only input's little-endian data, or a picture.

    `shape` is what the caller said of it, if anything.
    """

    data: bytes
    shape: tuple[int, ...] | None = None
    is_image: bool = False

    def inputs(self, signature: Signature) -> Inputs:
        if signature.image_input is not None and self.shape is None and looks_like_image(self.data):
            return Picture(self.data).inputs(signature)
        if len(signature.inputs) != 1:
            raise InvalidInput(
                "a raw body can only be a model's single input; "
                f"{signature.model} takes {signature.described()}"
            )
        spec = signature.inputs[0]
        shape = list(self.shape) if self.shape else _inferred(spec, self.data, signature)
        tensor = {"dtype": spec.dtype, "shape": shape, "data": self.data}
        return Inputs({spec.name: tensor}, one_row=False)


def packed_body(
    content: Content, signature: Signature, parameters: Mapping[str, Any]
) -> tuple[bytes, bool]:
    """The body of the stream entry, checked against the model, and whether it was one bare row."""
    inputs = content.inputs(signature)
    check_inputs(signature, inputs.by_name)
    return wire.pack_body(wire.Body(inputs.by_name, parameters)), inputs.one_row


def looks_like_image(data: bytes) -> bool:
    """Whether the first bytes are those of a JPEG, PNG, WebP or BMP file."""
    return (
        data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"))
        or (data.startswith(b"RIFF") and data[8:12] == b"WEBP")
        or (data.startswith(b"BM") and data[_BMP_RESERVED] == bytes(4))
    )


def _inferred(spec: TensorSpec, data: bytes, signature: Signature) -> list[int]:
    """The shape that the size of raw data implies."""
    label = f"input {spec.name!r}"
    row_bytes = spec.row_bytes
    if not row_bytes:
        raise InvalidData(
            f"{label}: rows of {spec.dtype} {shape_text(spec.shape)} have no fixed size, so the "
            "shape must be given: ?shape=2,3"
        )
    rows, rest = divmod(len(data), row_bytes)
    if rest or not rows:
        picture = (
            " and the body is no JPEG, PNG, WebP or BMP image either"
            if spec.name == signature.image_input
            else ""
        )
        raise InvalidData(
            f"{label}: one row of {spec.dtype} {shape_text(spec.shape)} takes {row_bytes} bytes, "
            f"so the body must be a multiple of that; got {len(data)} bytes{picture}"
        )
    return [rows, *spec.row_shape]
