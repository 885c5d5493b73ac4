"""`npufleet demo`: a fleet of its own classifies the sample pictures, by HTTP and by the queue."""

import asyncio
import collections
import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from npufleet.settings import Settings

_MODEL = "efficientnet-lite0"
_TOLERANCE = 0.0005  # equal to three decimals
_LIMIT_S = 60.0

Classes = Sequence[Mapping[str, Any]]
"""The likeliest classes of one picture, as `{"label", "index", "probability"}`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one picture through one door."""

    picture: str
    door: str
    classes: Classes
    took_ms: float


def demo(
    models: Annotated[
        Path | None, typer.Option(help="Folder of the sample models (default: models).")
    ] = None,
) -> None:
    """Start a fleet, classify the sample pictures, check every answer, stop.

    The pictures go in by HTTP and, with the Python client, straight onto the queue. The fleet is
    apart from any other: a free port and a temporary folder.

    Exit code: 0 when all answers are as expected, 1 otherwise.

    Examples:

      npufleet demo
    """
    from npufleet.errors import ConfigurationError, NpufleetError
    from npufleet.settings import load

    with tempfile.TemporaryDirectory(prefix="npufleet-demo-") as folder:
        overrides = {"models": models, "state": Path(folder), "host": "127.0.0.1", "port": 0}
        settings = load({**overrides, "workers": 1, "gateways": 1, "worker_http_port": 0})
        settings = settings.model_copy(update={"redis_url": None, "redis_port": None})
        samples = settings.models / _MODEL
        if not (samples / "expected.json").is_file():
            raise ConfigurationError(
                f"{samples} is not the sample model: run this in npufleet's repository, or name "
                "its models with --models"
            )
        expected: Mapping[str, Classes] = json.loads((samples / "expected.json").read_text())
        begun = time.monotonic()
        answers = asyncio.run(_ask_a_fleet(settings, sorted(expected)))
    _print_table(answers, expected)
    wrong = [fault for answer in answers if (fault := difference(answer, expected))]
    if wrong:
        raise NpufleetError("; ".join(wrong))
    print(f"{len(answers)} answers, all as expected, in {time.monotonic() - begun:.1f} s")


def difference(answer: Answer, expected: Mapping[str, Classes]) -> str | None:
    """What is wrong with an answer: other classes, or a probability that differs."""
    wanted = expected[answer.picture]
    where = f"{answer.picture} by {answer.door}"
    if [c["index"] for c in answer.classes] != [c["index"] for c in wanted]:
        got = ", ".join(c["label"] for c in answer.classes)
        return f"{where}: expected {', '.join(c['label'] for c in wanted)}; got {got}"
    for got_class, want in zip(answer.classes, wanted, strict=True):
        if abs(got_class["probability"] - want["probability"]) > _TOLERANCE:
            got, should = got_class["probability"], want["probability"]
            return f"{where}: {want['label']} should be {should:.4f}, and is {got:.4f}"
    return None


async def _ask_a_fleet(settings: "Settings", pictures: Sequence[str]) -> list[Answer]:
    """Answers of a fleet that lives for this call; what its parts said is shown if it fails."""
    from npufleet.errors import NpufleetError
    from npufleet.fleet import Fleet, free_port

    said: collections.deque[str] = collections.deque(maxlen=200)
    port = free_port(settings)
    fleet = Fleet(settings, port=port, on_line=lambda name, line: said.append(f"{name} | {line}"))
    asking: list[asyncio.Task[list[Answer]]] = []

    def on_ready() -> None:
        print("asking it", file=sys.stderr)
        asking.append(asyncio.create_task(_ask(settings, pictures, fleet.redis_url, port)))
        asking[0].add_done_callback(lambda _task: fleet.stop())

    print("starting a queue, a worker and a gateway", file=sys.stderr)
    try:
        await fleet.run(on_ready)
        if not asking or not asking[0].done():
            raise NpufleetError("interrupted")
        return asking[0].result()
    except (NpufleetError, OSError) as error:
        print("\n".join(said), file=sys.stderr)
        raise NpufleetError(f"no demo: {str(error) or type(error).__name__}") from error


async def _ask(
    settings: "Settings", pictures: Sequence[str], redis_url: str, port: int
) -> list[Answer]:
    from npufleet.aio import AsyncClient

    folder, answers = settings.models / _MODEL / "images", []
    url = f"http://{settings.host}:{port}/v1/models/{_MODEL}/infer"
    async with (
        asyncio.timeout(_LIMIT_S),
        AsyncClient(redis_url, prefix=settings.prefix) as client,
    ):
        for picture in pictures:
            begun = time.monotonic()
            classes = await asyncio.to_thread(_post, url, (folder / picture).read_bytes())
            answers.append(Answer(picture, "HTTP", classes, 1000 * (time.monotonic() - begun)))
        for picture in pictures:
            begun = time.monotonic()
            result = await client.infer(_MODEL, folder / picture)
            took_ms = 1000 * (time.monotonic() - begun)
            answers.append(Answer(picture, "queue", result.prediction, took_ms))
    return answers


def _post(url: str, picture: bytes) -> Classes:
    from npufleet.errors import NpufleetError

    content = {"Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, picture, content)
    try:
        with urllib.request.urlopen(request, timeout=_LIMIT_S) as response:
            prediction: Classes = json.load(response)["prediction"]
    except urllib.error.HTTPError as error:
        with error:
            raise NpufleetError(f"{error}: {error.read().decode(errors='replace')}") from None
    return prediction


def _print_table(answers: Sequence[Answer], expected: Mapping[str, Classes]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("picture", "asked by", "prediction")
    for title in ("probability", "expected", "ms"):
        table.add_column(title, justify="right")
    for answer in answers:
        top = answer.classes[0]
        table.add_row(
            answer.picture,
            answer.door,
            top["label"],
            f"{top['probability']:.4f}",
            f"{expected[answer.picture][0]['probability']:.4f}",
            f"{answer.took_ms:.0f}",
        )
    Console().print(table)
