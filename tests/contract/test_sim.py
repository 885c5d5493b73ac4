"""The simulated device: its answers are its rows, and its runs take their time and no CPU."""

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from npufleet.errors import ConfigurationError
from npufleet_worker.backends import Gathering, open_backend
from npufleet_worker.repository import Batching, ModelConfig, load_model
from tests.support.executors import bench

LIMIT_S = 60.0


def simulated(folder: Path, text: str = "a_ms = 5.0") -> Path:
    path = folder / "1" / "model.sim"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def rows(count: int, first: int = 0) -> Gathering:
    return Gathering(
        count, count, {"x": [np.arange(first, first + count, dtype=np.float32)[:, None]]}
    )


def test_a_folder_with_a_simulated_model_is_a_model(tmp_path: Path) -> None:
    """The suffix finds the backend, as for files of real models."""
    simulated(tmp_path / "m")
    assert load_model(tmp_path / "m").path.name == "model.sim"


async def test_rows_come_back_as_they_were_and_runs_never_overlap(tmp_path: Path) -> None:
    """Through a real executor, one batch ahead: the log has each run, exactly a + b * gear long."""
    log = tmp_path / "runs.log"
    path = simulated(
        tmp_path, f"a_ms = 4.0\nb_ms = 0.5\nshape = [3]\ngears = [4, 8]\nlog = '{log}'"
    )
    config = ModelConfig("m", 1, path, Batching(max_batch_size=8, gears=(4, 8)))
    first, second = (np.full((n, 3), n, np.float32) + np.arange(3) for n in (3, 5))
    first, second = first.astype(np.float32), second.astype(np.float32)
    async with bench() as device:
        executor = await device.start(config)
        warm_ups = len(log.read_text().splitlines())
        answers = [
            device.submit(executor, [first], gear=4),
            device.submit(executor, [second], gear=8),
        ]
        for answer, sent in zip(answers, (first, second), strict=True):
            result = await asyncio.wait_for(answer, LIMIT_S)
            np.testing.assert_array_equal(result.outputs["y"], sent)
            result.release()
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [(line[3], line[4]) for line in lines[warm_ups:]] == [("3", "4"), ("5", "8")]
    for _, start, end, _, gear in lines:
        assert float(end) - float(start) == pytest.approx(0.004 + 0.0005 * int(gear), abs=5e-6)
    for before, after in pairwise(lines):
        assert float(after[1]) >= float(before[2])


def test_a_run_goes_on_while_the_next_batch_is_staged(tmp_path: Path) -> None:
    """Its time counts from the launch: staging meanwhile, like waiting late, adds nothing to it."""
    device = open_backend(simulated(tmp_path, "a_ms = 100.0"))
    device.stage(0, rows(2))
    device.launch(0)
    over_s = time.monotonic() + 0.1
    device.stage(1, rows(2, first=5))
    while time.monotonic() < over_s:
        pass
    device.wait(0, timeout_s=0.0)
    np.testing.assert_array_equal(device.fetch(0)["y"], [[0], [1]])
    device.launch(1)
    device.wait(1, LIMIT_S)
    np.testing.assert_array_equal(device.fetch(1)["y"], [[5], [6]])
    device.close()
    device.close()


def test_waiting_uses_no_cpu(tmp_path: Path) -> None:
    """What the simulated device does for a second costs less than a tenth of one."""
    device = open_backend(simulated(tmp_path, "a_ms = 10.0"))
    begun_s, used_s = time.monotonic(), time.thread_time()
    for _ in range(100):
        device.stage(0, rows(1))
        device.launch(0)
        device.wait(0, LIMIT_S)
        device.fetch(0)
    assert time.monotonic() - begun_s >= 1.0
    assert time.thread_time() - used_s < 0.1


def test_a_wait_that_is_too_short_says_so(tmp_path: Path) -> None:
    """As a device does whose kernel hangs."""
    device = open_backend(simulated(tmp_path, "a_ms = 60000.0"))
    device.stage(0, rows(1))
    device.launch(0)
    with pytest.raises(TimeoutError, match="s more"):
        device.wait(0, timeout_s=0.01)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "a_ms: Field required"),
        ("a_ms = -1", "a_ms"),
        ("a_ms = 1\nb = 2", "b: Extra inputs"),
        ("a_ms = 1\nshape = [0]", "shape.0"),
        ("a_ms = 1\ndtype = 'FLOAT'", "dtype is one of BOOL"),
        ("a_ms", "is not a simulated model"),
    ],
)
def test_a_wrong_file_is_refused_with_its_mistake(tmp_path: Path, text: str, wanted: str) -> None:
    """At load, in words."""
    with pytest.raises(ConfigurationError, match=wanted):
        open_backend(simulated(tmp_path, text))
