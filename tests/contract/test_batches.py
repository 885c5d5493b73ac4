"""A batch through a real executor process gives the rows that single requests give."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from npufleet.errors import ConfigurationError
from npufleet.tensors import Array
from npufleet_worker.device import Executor
from npufleet_worker.images import decode
from npufleet_worker.repository import Batching, ModelConfig, load_model
from tests.support import onnx_models
from tests.support.executors import Bench, bench

LIMIT_S = 60.0
GEAR_SETS: list[tuple[int, ...]] = [(), (1, 2, 4, 8), (8,), (3, 7), (1, 16)]


@pytest.fixture
async def device() -> AsyncIterator[Bench]:
    async with bench() as made:
        yield made


def statistics(folder: Path, batch: int | str = "N") -> ModelConfig:
    """A model of two inputs and two outputs, of which no row knows the others."""
    path = onnx_models.save_statistics(folder / "1" / "model.onnx", batch)
    return ModelConfig("statistics", 1, path, Batching(max_batch_size=16))


async def run(
    device: Bench, executor: Executor, *requests: list[Array], gear: int
) -> dict[str, Array]:
    result = await asyncio.wait_for(device.submit(executor, *requests, gear=gear), LIMIT_S)
    outputs = {name: array.copy() for name, array in result.outputs.items()}
    result.release()
    return outputs


def gear_of(rows: int, gears: tuple[int, ...]) -> int:
    return next((gear for gear in gears if gear >= rows), rows)


@pytest.mark.parametrize("gears", GEAR_SETS, ids=str)
async def test_a_batch_of_many_equals_many_single_requests(
    device: Bench, tmp_path: Path, gears: tuple[int, ...]
) -> None:
    """For every gear set, requests of several rows and a ragged last batch included."""
    config = statistics(tmp_path)
    executor = await device.start(
        replace(config, batching=Batching(gears=gears, max_batch_size=max(gears, default=16)))
    )
    dice = np.random.default_rng(3)
    sizes = [1, 1, 2, 1, 3, 1, 1, 2, 1, 3, 1]
    requests = [[dice.normal(size=(n, 5)).astype(np.float32) for _ in "ab"] for n in sizes]
    alone = [await run(device, executor, r, gear=gear_of(len(r[0]), gears)) for r in requests]

    most = max(gears, default=8)
    batches: list[list[int]] = [[]]
    for number, size in enumerate(sizes):
        if sum(sizes[i] for i in batches[-1]) + size > most:
            batches.append([])
        batches[-1].append(number)
    for batch in batches:
        rows = sum(sizes[i] for i in batch)
        out = await run(device, executor, *(requests[i] for i in batch), gear=gear_of(rows, gears))
        assert {name: len(array) for name, array in out.items()} == dict.fromkeys(out, rows)
        for name, array in out.items():
            wanted = np.concatenate([alone[i][name] for i in batch])
            np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-5)


async def test_padding_never_reaches_an_answer(device: Bench, tmp_path: Path) -> None:
    """One row in a gear of sixteen is one row, whatever lay there before."""
    executor = await device.start(statistics(tmp_path))
    full = [np.full((16, 4), 1e6, np.float32), np.full((16, 4), 1e6, np.float32)]
    await run(device, executor, full, gear=16)
    out = await run(
        device, executor, [np.ones((1, 4), np.float32), np.full((1, 4), 2, np.float32)], gear=16
    )
    assert out["total"].tolist() == [8.0]
    assert out["product"].tolist() == [[2.0] * 4]


async def test_requests_of_other_inner_shapes_use_the_same_memory(
    device: Bench, tmp_path: Path
) -> None:
    """Free inner dimensions: each batch brings its own."""
    executor = await device.start(statistics(tmp_path))
    for width in (1, 7, 300, 2):
        pair = [np.full((2, width), 3, np.float32), np.ones((2, width), np.float32)]
        out = await run(device, executor, pair, gear=2)
        assert out["total"].tolist() == [3.0 * width] * 2
        assert out["product"].shape == (2, width)


async def test_outputs_larger_than_ever_before_arrive_whole(device: Bench, tmp_path: Path) -> None:
    """The memory of the outputs grows while the supervisor looks at it."""
    executor = await device.start(statistics(tmp_path))
    dice = np.random.default_rng(5)
    for width in (10, 100_000, 400_000):
        pair = [dice.normal(size=(4, width)).astype(np.float32) for _ in "ab"]
        out = await run(device, executor, pair, gear=4)
        np.testing.assert_array_equal(out["product"], pair[0] * pair[1])


async def test_a_file_with_a_fixed_batch_runs_padded(device: Bench, tmp_path: Path) -> None:
    """Its one gear is what the executor reports."""
    executor = await device.start(statistics(tmp_path, batch=4))
    assert executor.gears == (4,)
    out = await run(device, executor, [np.ones((1, 3), np.float32)] * 2, gear=4)
    assert out["total"].tolist() == [3.0]


async def test_a_model_that_mixes_its_rows_is_refused(device: Bench, tmp_path: Path) -> None:
    """At load: its answers would depend on the neighbours in the batch."""
    path = onnx_models.save_batch_mean(tmp_path / "1" / "model.onnx")
    with pytest.raises(ConfigurationError, match=r"output 'y' has shape \[1, 4\]"):
        await device.start(ModelConfig("mean", 1, path))


async def test_real_pictures_are_classified_alike_in_every_batch(
    device: Bench, models: Path
) -> None:
    """The sample model: alone, together, and padded."""
    config = load_model(models / "efficientnet-lite0")
    assert config.image is not None
    executor = await device.start(config)
    folder = models / "efficientnet-lite0" / "images"
    rows = []
    for name in ("chelsea.png", "coffee.png", "rocket.jpg"):
        out = np.empty((1, *config.image.row_shape), np.uint8)
        decode((folder / name).read_bytes(), config.image, out=out[0])
        rows.append([out])
    alone = [(await run(device, executor, r, gear=1))["probabilities"] for r in rows]
    together = (await run(device, executor, *rows, gear=8))["probabilities"]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-4, atol=1e-5)
    assert together.argmax(axis=1).tolist() == [282, 967, 657]
    np.testing.assert_allclose(together.max(axis=1), [0.3851, 0.9511, 0.3196], atol=5e-4)
