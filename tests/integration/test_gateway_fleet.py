"""The whole path under load: many callers at once, the real worker, good and bad side by side."""

import asyncio
import json
import re
import urllib.request
import zlib
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.support.fleets import ROOT, RunningFleet, running_fleet

MODEL = ROOT / "models" / "efficientnet-lite0"
LIMIT = aiohttp.ClientTimeout(total=60)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("state")) as fleet:
        yield fleet


def _batches(fleet: RunningFleet) -> tuple[float, float]:
    """How many batches the worker has run of `double`, and the rows in them."""
    told = fleet.output.read_text() + fleet.log.read_text()
    pages = re.search(r"pages=(http://\S+)", told)
    assert pages, told
    with urllib.request.urlopen(f"{pages[1]}/metrics", timeout=10) as response:
        text = response.read().decode()
    count, rows = (
        re.search(rf'npufleet_batch_size_{name}{{model="double"}} (\S+)', text)
        for name in ("count", "sum")
    )
    return (float(count[1]) if count else 0, float(rows[1]) if rows else 0)


async def test_a_thousand_callers_at_once_get_their_own_answers_in_batches(
    fleet: RunningFleet,
) -> None:
    """Every value of every answer is right, and the model ran for many of them at a time."""
    batches_before, rows_before = _batches(fleet)

    async def ask(http: aiohttp.ClientSession, n: int) -> list[float]:
        question = {"inputs": {"x": [[n, n + 0.5, -n, n * 1000]]}}
        async with http.post("/v1/models/double/infer", json=question) as response:
            answer = await response.json()
            assert response.status == 200, answer
            assert len(answer["predictions"]) == 1
            return list(answer["predictions"][0])

    connector = aiohttp.TCPConnector(limit=0)  # a connection for each
    async with aiohttp.ClientSession(fleet.url, connector=connector, timeout=LIMIT) as http:
        answers = await asyncio.gather(*(ask(http, n) for n in range(1000)))

    assert answers == [[2 * n + 1, 2 * n + 2, 1 - 2 * n, 2000 * n + 1] for n in range(1000)]
    batches, rows = _batches(fleet)
    assert rows - rows_before == 1000
    assert batches - batches_before < 500


async def test_bad_pictures_fail_alone_among_good_ones(fleet: RunningFleet) -> None:
    """Each with its own error; the good get the answers they get alone; no process restarts."""
    good = (MODEL / "images" / "coffee.png").read_bytes()
    jpeg = (MODEL / "images" / "rocket.jpg").read_bytes()
    bad = {
        "cut short": jpeg[: len(jpeg) // 2],
        "no picture": b"this is no picture",
        "a head alone": good[:40],
        "a bomb": _png_head(60_000, 60_000) + good[33:],
    }
    expected = json.loads((MODEL / "expected.json").read_text())["coffee.png"]
    processes = {process.pid for process in fleet.family()}

    async def ask(http: aiohttp.ClientSession, picture: bytes) -> tuple[int, Any]:
        headers = {"Content-Type": "image/png"}
        path = "/v1/models/efficientnet-lite0/infer"
        async with http.post(path, data=picture, headers=headers) as response:
            return response.status, await response.json()

    async with aiohttp.ClientSession(fleet.url, timeout=LIMIT) as http:
        asked = [picture for wrong in bad.values() for picture in (good, wrong)]
        answers = await asyncio.gather(*(ask(http, picture) for picture in asked))

    for status, answer in answers[::2]:
        assert status == 200, answer
        assert [best["label"] for best in answer["prediction"]] == [e["label"] for e in expected]
        probabilities = [best["probability"] for best in answer["prediction"]]
        assert probabilities == pytest.approx([e["probability"] for e in expected], abs=5e-4)
    refusals = dict(zip(bad, answers[1::2], strict=True))
    codes = {name: (status, answer["code"]) for name, (status, answer) in refusals.items()}
    assert codes == dict.fromkeys(bad, (400, "invalid_image"))
    assert "pixels" in refusals["a bomb"][1]["error"]
    assert {process.pid for process in fleet.family()} == processes


def _png_head(width: int, height: int) -> bytes:
    """The signature and IHDR of a PNG of that size."""
    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    checksum = zlib.crc32(header).to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big") + header + checksum
