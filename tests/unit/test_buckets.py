"""Inputs whose length varies, padded on their way into memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet.errors import ConfigurationError, InvalidShape
from npufleet.signature import Signature, TensorSpec
from npufleet.tensors import Array, encode
from npufleet.wire import Body, pack_body
from npufleet_worker.arena import Arena
from npufleet_worker.buckets import Bucket
from npufleet_worker.decoder import Decoder, Request
from npufleet_worker.repository import load_model, signature_of

TOKENS = TensorSpec("tokens", "INT32", (-1, 2, -1))
SIGNATURE = Signature("m", 1, (TOKENS,), ())
BUCKETS = {"tokens": Bucket(axis=2, sizes=(4, 8), pad=-1)}


def placed(arena: Arena, tokens: Array) -> Request:
    decoder = Decoder(SIGNATURE, arena, image=None, max_pixels=1, buckets=BUCKETS)
    request = decoder.place(*decoder.read(pack_body(Body({"tokens": encode(tokens)}))))
    assert request is not None
    decoder.fill(request)
    return request


@given(rows=st.integers(1, 5), length=st.integers(0, 8))
def test_rows_are_padded_to_the_next_size(rows: int, length: int) -> None:
    """What was sent stands at the beginning of each row, and the padding is the whole rest."""
    arena = Arena(1 << 12)
    tokens = np.arange(rows * 2 * length, dtype=np.int32).reshape(rows, 2, length)
    request = placed(arena, tokens)
    size = 4 if length <= 4 else 8
    assert request.shapes == ((2, size),)
    (block,) = request.placed.blocks
    got = arena.array(block, np.int32, (rows, 2, size))
    np.testing.assert_array_equal(got[:, :, :length], tokens)
    assert (got[:, :, length:] == -1).all()
    arena.close()


def test_what_is_longer_than_the_largest_is_refused_and_takes_no_memory() -> None:
    """The caller learns the sizes."""
    arena = Arena(1 << 12)
    with pytest.raises(InvalidShape, match=r"'tokens' is 9 long in axis 2.*sizes: 4, 8"):
        placed(arena, np.zeros((1, 2, 9), np.int32))
    assert arena.free_bytes == arena.size_bytes
    arena.close()


def load(folder: Path, toml: str) -> Any:
    (folder / "m/1").mkdir(parents=True)
    (folder / "m/1/model.onnx").touch()
    (folder / "m/model.toml").write_text(f"[buckets]\n{toml}")
    return signature_of(load_model(folder / "m"), [TOKENS], [])


def test_buckets_that_fit_the_model_are_taken(tmp_path: Path) -> None:
    """As docs/models.md writes them."""
    load(tmp_path, "tokens = {axis = 2, sizes = [32, 64, 128], pad = 0}")


@pytest.mark.parametrize(
    ("toml", "wanted"),
    [
        ("tokens = {axis = 2, sizes = []}", "buckets.tokens.sizes"),
        ("tokens = {axis = 2, sizes = [8, 4, 4]}", r"ascend without doubles: \[4, 8\]"),
        ("tokens = {axis = 0, sizes = [8]}", "buckets.tokens.axis"),
        ("tokens = {axes = 2, sizes = [8]}", "did you mean buckets.tokens.axis?"),
        ("tokens = {axis = 1, sizes = [8]}", r"leaves no length open there: \[N, 2, \?\]"),
        ("tokens = {axis = 3, sizes = [8]}", "leaves no length open"),
        ("token = {axis = 2, sizes = [8]}", "can have buckets are 'tokens'"),
        ("tokens = {axis = 2, sizes = [8], pad = 0.5}", "which no INT32 can be"),
        ("tokens = {axis = 2, sizes = [8], pad = 3000000000}", "which no INT32 can be"),
        ("tokens = {axis = 2, sizes = [8], pad = nan}", "which no INT32 can be"),
    ],
)
def test_buckets_that_do_not_fit_are_refused_at_load(
    tmp_path: Path, toml: str, wanted: str
) -> None:
    """With the key and what is wrong."""
    with pytest.raises(ConfigurationError, match=wanted):
        load(tmp_path, toml)
