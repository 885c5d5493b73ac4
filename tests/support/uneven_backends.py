"""Backends whose rows are not independent, for the checks that must find that out."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from npufleet.signature import TensorSpec
from npufleet.tensors import Array


class _Plain:
    """x FP32 [N, 3] -> y FP32 [N, 3], in gears of 1, 2 and 4."""

    inputs = (TensorSpec("x", "FP32", (-1, 3)),)
    outputs = (TensorSpec("y", "FP32", (-1, 3)),)
    gears = (1, 2, 4)

    def __init__(self, path: Path, *, threads: int) -> None:
        pass


class Neighbourly(_Plain):
    """A row's answer has a part of its neighbours in it."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        x = inputs["x"]
        return {"y": x + np.float32(0.01) * x.mean(axis=0)}


class Positional(_Plain):
    """The third position of the largest gear is a little off, whoever stands there."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        y = inputs["x"].copy()
        y[2:3] += 0.5
        return {"y": y}


class NotANumber(_Plain):
    """The first number of each answer is NaN, alone and in company."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        y = inputs["x"].copy()
        y[:, 0] = np.nan
        return {"y": y}
