"""Requests with more rows than a batch: cut, run in any order, and joined."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet.signature import Limits, Signature, TensorSpec
from npufleet.tensors import Array, encode
from npufleet.wire import Body, pack_body
from npufleet_worker.arena import Arena
from npufleet_worker.decoder import Decoder
from npufleet_worker.held import Held
from npufleet_worker.intake import Work
from npufleet_worker.outcomes import Ran
from npufleet_worker.parts import Part, Whole

SIGNATURE = Signature(
    "m",
    1,
    (TensorSpec("x", "FP32", (-1, 3)), TensorSpec("n", "INT64", (-1,))),
    (TensorSpec("y", "FP32", (-1, 3)),),
    limits=Limits(max_batch_size=4),
)


def whole_of(arena: Arena, x: Array, n: Array, *, most: int) -> Whole:
    decoder = Decoder(SIGNATURE, arena, image=None, max_pixels=1)
    body, rows = decoder.read(pack_body(Body({"x": encode(x), "n": encode(n)})))
    request = decoder.place(body, rows)
    assert request is not None
    decoder.fill(request)
    return Whole(Work(Held(2, b"1-0", 1, 0.0, 0.0), request, 0.0), most)


def run(arena: Arena, part: Part) -> dict[str, Array]:
    """What a model `y = 2 * x, m = n + 1` makes of the rows where they lie."""
    x, n = part.placed.blocks
    return {
        "y": 2 * arena.array(x, np.float32, (part.rows, 3)),
        "m": 1 + arena.array(n, np.int64, (part.rows,)),
    }


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(1 << 20)


@given(rows=st.integers(1, 100), most=st.integers(1, 40), seed=st.integers(0, 9))
def test_parts_that_ran_in_any_order_are_the_request_again(
    arena: Arena, rows: int, most: int, seed: int
) -> None:
    """No part is larger than a batch, each row runs once, and stands in its place."""
    x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    whole = whole_of(arena, x, np.arange(rows), most=max(most, -(-rows // 64)))
    order = list(whole.parts)
    random.Random(seed).shuffle(order)
    last = [
        whole.ran(part, Ran(part.rows, most, 0, float(at), at + 1.0, 2.0), run(arena, part))
        for at, part in enumerate(order)
    ]
    assert last == [False] * (len(order) - 1) + [True]
    np.testing.assert_array_equal(whole.outputs()["y"], 2 * x)
    np.testing.assert_array_equal(whole.outputs()["m"], np.arange(rows) + 1)
    summary = whole.summary()
    assert summary.batch_rows == max(part.rows for part in whole.parts)
    assert (summary.launched_s, summary.done_s) == (0.0, float(len(order)))
    assert summary.execute_ms == 2.0 * len(order)
    for block in whole.work.request.placed.blocks:
        arena.free(block)


def test_outputs_of_parts_outlive_the_memory_that_they_came_in() -> None:
    """The executor's region is written again before the last part has run."""
    arena = Arena(1 << 12)
    whole = whole_of(arena, np.ones((5, 3), np.float32), np.zeros(5, np.int64), most=3)
    region = np.ones((3, 3), np.float32)
    for part in whole.parts:
        whole.ran(part, Ran(part.rows, 3, 0, 0.0, 1.0, 1.0), {"y": region[: part.rows]})
        region += 1
    assert whole.outputs()["y"][:, 0].tolist() == [1, 1, 1, 2, 2]


def test_a_request_that_fits_a_batch_is_not_copied() -> None:
    """Nearly all are of this kind."""
    arena = Arena(1 << 12)
    whole = whole_of(arena, np.ones((4, 3), np.float32), np.zeros(4, np.int64), most=4)
    (part,) = whole.parts
    assert part.placed is whole.work.request.placed
    outputs = {"y": np.ones((4, 3), np.float32)}
    assert whole.ran(part, Ran(4, 4, 0, 0.0, 1.0, 1.0), outputs)
    assert whole.outputs()["y"] is outputs["y"]
