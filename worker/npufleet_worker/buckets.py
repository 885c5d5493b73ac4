"""Inputs whose length varies, padded to one of a few lengths so that they can share batches.

Knows nothing of memory, requests or model files.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from npufleet.errors import ConfigurationError, InvalidShape
from npufleet.signature import TensorSpec, shape_text
from npufleet.tensors import DTYPES, Array

_Size = Annotated[int, Field(ge=1)]


class Bucket(BaseModel):
    """Lengths that an input may have along `axis` (1 is the first of a row), and the filling."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    axis: Annotated[int, Field(ge=1)] = 1
    sizes: Annotated[tuple[_Size, ...], Field(strict=False, min_length=1)]
    pad: int | float = 0

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes must ascend without doubles: {sorted(set(self.sizes))}")
        return self

    def padded(self, shape: Sequence[int], label: str) -> tuple[int, ...]:
        """The shape (rows first) with the next larger size; InvalidShape beyond the largest."""
        size = shape[self.axis]
        at = bisect.bisect_left(self.sizes, size)
        if at == len(self.sizes):
            raise InvalidShape(
                f"{label} is {size} long in axis {self.axis}; it may have at most "
                f"{self.sizes[-1]} (sizes: {', '.join(map(str, self.sizes))})"
            )
        return (*shape[: self.axis], self.sizes[at], *shape[self.axis + 1 :])

    def fill(self, target: Array, source: Array) -> None:
        """Copies the source into the beginning of the longer target, and fills the rest."""
        length = source.shape[self.axis]
        before = (slice(None),) * self.axis
        target[(*before, slice(length))] = source
        target[(*before, slice(length, None))] = self.pad


def check_buckets(
    model: str, buckets: Mapping[str, Bucket], inputs: Sequence[TensorSpec], image: str | None
) -> None:
    """ConfigurationError where a bucket is for no input or a fixed length, or its pad no value."""
    specs = {spec.name: spec for spec in inputs}
    for name, bucket in buckets.items():
        where = f"model {model}: buckets.{name}"
        spec = specs.get(name)
        if spec is None or name == image:
            known = ", ".join(repr(s.name) for s in inputs if s.name != image) or "none"
            raise ConfigurationError(f"{where}: the inputs that can have buckets are {known}")
        if bucket.axis >= len(spec.shape) or spec.shape[bucket.axis] >= 0:
            raise ConfigurationError(
                f"{where}.axis is {bucket.axis}, but the model leaves no length open there: "
                f"{shape_text(spec.shape)}"
            )
        if not _holds(spec.dtype, bucket.pad):
            raise ConfigurationError(f"{where}.pad is {bucket.pad}, which no {spec.dtype} can be")


def _holds(dtype: str, pad: int | float) -> bool:
    kind = np.dtype(DTYPES[dtype].numpy)
    if kind.kind == "f":
        return True
    if kind.kind == "b":
        return pad in (0, 1)
    limits = np.iinfo(kind)
    return math.isfinite(pad) and int(pad) == pad and limits.min <= pad <= limits.max
