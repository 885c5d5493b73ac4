"""Request bodies to rows in shared memory, where the executor gathers them into batches.

Three steps, so that only the last one may run in a thread: `read` checks, `place` takes memory,
`fill` decodes and copies. Knows nothing of Redis, batches or devices.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from npufleet import tensors, wire
from npufleet.errors import InvalidData, InvalidParameter, InvalidShape, PayloadTooLarge
from npufleet.signature import Signature, TensorSpec, check_inputs
from npufleet.tensors import DTYPES
from npufleet.wire import Body
from npufleet_worker import images
from npufleet_worker.arena import Arena, Block, aligned
from npufleet_worker.buckets import Bucket
from npufleet_worker.device import Placed
from npufleet_worker.images import ImageSpec

_DETERMINISTIC = "deterministic"

MAX_PARTS = 64
"""A request may have so many times `max_batch_size` rows. It runs in as many batches, ahead of all
that came later: more would hold up everybody else for longer than they may be ready to wait."""

_NO_BUCKETS: Mapping[str, Bucket] = MappingProxyType({})

_COPY_INLINE_BYTES = 256 << 10
"""Tensors up to this are copied on the event loop: a thread's wake-up costs more than the copy."""


@dataclass(frozen=True, slots=True)
class Request:
    """A checked body and the memory of its rows; `shapes` are the row shapes of the inputs."""

    body: Body
    placed: Placed
    shapes: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        return self.placed.rows

    @property
    def deterministic(self) -> bool:
        """The parameter of that name: the same gear, whatever runs beside it."""
        return self.body.parameters.get(_DETERMINISTIC, False) is True

    @property
    def slow(self) -> bool:
        """Whether `fill` belongs into a thread: pictures, and tensors of some size."""
        if any("image" in value for value in self.body.inputs.values()):
            return True
        return sum(block.nbytes for block in self.placed.blocks) > _COPY_INLINE_BYTES


class Decoder:
    """The bodies of one model version."""

    def __init__(
        self,
        signature: Signature,
        arena: Arena,
        *,
        image: ImageSpec | None,
        max_pixels: int,
        buckets: Mapping[str, Bucket] = _NO_BUCKETS,
    ) -> None:
        self._signature = signature
        self._arena = arena
        self._image = image
        self._max_pixels = max_pixels
        self._buckets = buckets

    def read(self, raw: bytes) -> tuple[Body, int]:
        """The body and its number of rows; a RequestError where it does not fit the model."""
        body = wire.unpack_body(raw)
        pinned = body.parameters.get(_DETERMINISTIC, False)
        if not isinstance(pinned, bool):
            raise InvalidParameter(
                f"parameter {_DETERMINISTIC!r} must be true or false, got {str(pinned)[:40]!r}"
            )
        rows = check_inputs(self._signature, body.inputs)
        batch = self._signature.limits.max_batch_size
        if rows > MAX_PARTS * batch:
            raise InvalidShape(
                f"the request has {rows} rows; {self._signature.model} takes at most "
                f"{MAX_PARTS * batch} in one ({MAX_PARTS} times its max_batch_size, {batch})"
            )
        return body, rows

    def place(self, body: Body, rows: int) -> Request | None:
        """Memory for the rows; None while there is none free.

        Raises PayloadTooLarge for what never fits, and InvalidShape beyond the largest bucket.
        """
        shapes = tuple(self._row_shape(spec, body) for spec in self._signature.inputs)
        sizes = [
            rows * math.prod(shape) * DTYPES[spec.dtype].itemsize
            for spec, shape in zip(self._signature.inputs, shapes, strict=True)
        ]
        if sum(map(aligned, sizes)) > self._arena.size_bytes:
            raise PayloadTooLarge(
                f"the inputs take {sum(sizes)} bytes; the worker has room for "
                f"{self._arena.size_bytes}"
            )
        blocks: list[Block] = []
        for size in sizes:
            block = self._arena.allocate(size)
            if block is None:
                for taken in blocks:
                    self._arena.free(taken)
                return None
            blocks.append(block)
        return Request(body, Placed(rows, tuple(blocks)), shapes)

    def fill(self, request: Request) -> None:
        """Writes the rows into their memory; InvalidImage or InvalidData where they are bad."""
        for spec, block, shape in zip(
            self._signature.inputs, request.placed.blocks, request.shapes, strict=True
        ):
            target = self._arena.array(block, DTYPES[spec.dtype].numpy, (request.rows, *shape))
            value = request.body.inputs[spec.name]
            if "image" in value:
                assert self._image is not None, "the signature has an image input"
                images.decode(
                    value["image"], self._image, out=target[0], max_pixels=self._max_pixels
                )
            else:
                self._copy(spec, value, target)

    def release(self, request: Request) -> None:
        """Gives the memory back."""
        for block in request.placed.blocks:
            self._arena.free(block)

    def _row_shape(self, spec: TensorSpec, body: Body) -> tuple[int, ...]:
        value = body.inputs[spec.name]
        if "image" in value:
            assert self._image is not None, "the signature has an image input"
            return self._image.row_shape
        bucket = self._buckets.get(spec.name)
        shape = value["shape"]
        return tuple(bucket.padded(shape, f"input {spec.name!r}") if bucket else shape)[1:]

    def _copy(self, spec: TensorSpec, value: Mapping[str, Any], target: tensors.Array) -> None:
        source = tensors.decode(value)
        if not self._signature.limits.allow_nan and source.dtype.kind == "f":
            bad = int(source.size - np.count_nonzero(np.isfinite(source)))
            if bad:
                raise InvalidData(
                    f"input {spec.name!r} has {bad} values that are NaN or infinite; "
                    f"{self._signature.model} takes finite numbers only"
                )
        if source.shape != target.shape:
            self._buckets[spec.name].fill(target, source)
        else:
            np.copyto(target, source)
