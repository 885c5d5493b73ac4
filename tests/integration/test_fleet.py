"""The whole fleet as a user starts it: HTTP in, stream, batches, replies, and its quiet."""

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import onnxruntime
import psutil
import pytest

from npufleet import AsyncClient
from tests.support.fleets import RunningFleet, running_fleet

REQUESTS = 1000


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("state")) as fleet:
        yield fleet


def worker_metrics(fleet: RunningFleet) -> str:
    """The page of the one worker, whose port its log names."""
    match = re.search(r"worker serves.* pages=(http://\S+)", fleet.log.read_text())
    assert match, fleet.log.read_text()
    with urllib.request.urlopen(f"{match[1]}/metrics", timeout=10) as page:
        text: str = page.read().decode()
    return text


def sample(page: str, name: str, **labels: str) -> float:
    pattern = re.escape(name) + r"\{([^}]*)\} (\S+)"
    for found, value in re.findall(pattern, page):
        if all(f'{key}="{label}"' in found for key, label in labels.items()):
            return float(value)
    raise AssertionError(f"no {name} with {labels}")


async def test_a_thousand_http_requests_at_once_get_the_answers_to_their_own_questions(
    fleet: RunningFleet, models: Path
) -> None:
    """Value by value as the model alone gives them, without an error, and in batches."""
    questions = np.random.default_rng(1).normal(size=(REQUESTS, 4)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(models / "double/1/model.onnx"))
    expected = session.run(None, {"x": questions})[0]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask(row: Any) -> Any:
            asked = {"inputs": {"x": [row.tolist()]}}
            async with http.post(f"{fleet.url}/v1/models/double/infer", json=asked) as answer:
                assert answer.status == 200, await answer.text()
                return (await answer.json())["predictions"][0]

        answers = await asyncio.gather(*map(ask, questions))

    np.testing.assert_allclose(np.array(answers, np.float32), expected, rtol=1e-4, atol=1e-5)
    page = worker_metrics(fleet)
    batches = sample(page, "npufleet_batch_size_count", model="double")
    singles = sample(page, "npufleet_batch_size_bucket", model="double", le="1.0")
    rows = sample(page, "npufleet_batch_size_sum", model="double")
    assert rows >= REQUESTS
    assert singles < batches, "no batch larger than one was formed"


async def test_pictures_in_flight_together_are_answered_as_alone(
    fleet: RunningFleet, models: Path
) -> None:
    """The three sample pictures, 20 times each, all at once, by HTTP and by the queue."""
    folder = models / "efficientnet-lite0"
    wanted = json.loads((folder / "expected.json").read_text())
    names = sorted(wanted) * 20

    async def by_http(http: aiohttp.ClientSession, name: str) -> Any:
        data = (folder / "images" / name).read_bytes()
        kind = "image/jpeg" if name.endswith("jpg") else "image/png"
        url = f"{fleet.url}/v1/models/efficientnet-lite0/infer"
        async with http.post(url, data=data, headers={"Content-Type": kind}) as answer:
            assert answer.status == 200, await answer.text()
            return (await answer.json())["prediction"]

    async with aiohttp.ClientSession() as http:
        answers = await asyncio.gather(*(by_http(http, name) for name in names))
    async with AsyncClient(fleet.redis_url) as client:
        results = await asyncio.gather(
            *(client.infer("efficientnet-lite0", folder / "images" / name) for name in names)
        )

    for name, answer in zip(
        [*names, *names], [*answers, *(r.prediction for r in results)], strict=True
    ):
        assert [row["label"] for row in answer] == [row["label"] for row in wanted[name]]
        for row, want in zip(answer, wanted[name], strict=True):
            assert row["probability"] == pytest.approx(want["probability"], abs=1e-3)


@pytest.mark.slow
def test_idle_costs_nothing(fleet: RunningFleet) -> None:
    """Without traffic all processes together use less than a hundredth of a core."""
    processes = [psutil.Process(fleet.process.pid), *fleet.family()]
    time.sleep(1)  # whatever the tests before this one have left to settle

    def used_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before_s, began_s = used_s(), time.monotonic()
    time.sleep(15)
    share = (used_s() - before_s) / (time.monotonic() - began_s)

    assert len(processes) >= 6
    assert share < 0.01, f"{share:.2%} of a core"
