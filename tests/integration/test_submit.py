"""`npufleet submit` as a process, on a real server, with a stand-in for the worker."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npufleet.errors import ModelFailed
from tests.support.standin import StandIn, standing_in
from tests.support.waiting import wait_until


@pytest.fixture
def worker(redis_url: str, prefix: str) -> Iterator[StandIn]:
    with standing_in(redis_url, prefix) as worker:
        yield worker


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twenty pictures of 0 to 19 bytes, in two folders, and a file that is none."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for n in range(20):
        ending = ("jpg", "PNG", "webp")[n % 3]
        (folder / ("more" if n % 2 else ".") / f"{n:02}.{ending}").write_bytes(b"x" * n)
    (folder / "notes.txt").write_text("none")
    return folder


def command(worker: StandIn, *words: str) -> dict[str, Any]:
    """What subprocess takes to run `npufleet submit` on the worker's queue."""
    environ = {**os.environ, "NPUFLEET_REDIS_URL": worker.url, "NPUFLEET_PREFIX": worker.prefix}
    return {
        "args": [sys.executable, "-m", "npufleet", "submit", *words],
        "env": {**environ, "COLUMNS": "120"},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


Submit = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def submit(worker: StandIn, tmp_path: Path) -> Submit:
    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(**command(worker, *words), cwd=tmp_path, timeout=60, check=False)

    return run


def records(text: str) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in text.splitlines()]
    assert len({line["file"] for line in lines}) == len(lines), "a file twice"
    return {line["file"]: line for line in lines}


def test_a_folder_becomes_one_line_per_picture(submit: Submit, photos: Path) -> None:
    """Each with the answer to itself; what is no picture is left out."""
    done = submit("measure", "photos", "--json")

    assert done.returncode == 0, done.stderr
    found = records(done.stdout)
    assert len(found) == 20
    for name, line in found.items():
        size = int(Path(name).stem)
        assert line["predictions"] == [[{"label": "bytes", "index": size, "probability": 1.0}]]
        assert (line["ok"], line["model"], line["version"]) == (True, "measure", 2)
    assert "20 done, 0 failed" in done.stderr


def test_arrays_come_from_npy_files(submit: Submit, tmp_path: Path) -> None:
    """Rows by the first axis; what JSON cannot say is null."""
    np.save(tmp_path / "a.npy", np.array([[1, 2, 3, np.nan], [0, 0, 0, 0]], np.float32))

    done = submit("double", "a.npy", "--json")

    assert records(done.stdout)["a.npy"]["predictions"] == [[3, 5, 7, None], [1, 1, 1, 1]]


def test_a_file_that_fails_is_told_and_the_rest_goes_on(submit: Submit, tmp_path: Path) -> None:
    """With its code, and exit code 1 at the end."""
    np.save(tmp_path / "good.npy", np.zeros((1, 4), np.float32))
    np.save(tmp_path / "shape.npy", np.zeros((1, 3), np.float32))
    np.save(tmp_path / "pickled.npy", np.array([{}]), allow_pickle=True)
    np.savez(tmp_path / "archive", np.zeros(1))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    (tmp_path / "junk.npy").write_bytes(b"junk")
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "text.txt").write_text("x")

    done = submit("double", "*.npy", "text.txt", "--json")

    assert done.returncode == 1
    found = records(done.stdout)
    assert found.pop("good.npy")["ok"]
    assert found.pop("shape.npy")["code"] == "invalid_shape"
    assert {line["code"] for line in found.values()} == {"invalid_input"}
    assert len(found) == 5
    assert "1 done, 6 failed" in done.stderr


def test_a_person_sees_a_table(submit: Submit, photos: Path) -> None:
    """Without --out and --json."""
    done = submit("measure", "photos/*.jpg")

    assert "photos/06.jpg" in done.stdout
    assert "bytes 1.000" in done.stdout


def test_a_second_run_sends_what_is_missing_and_what_failed(
    submit: Submit, worker: StandIn, photos: Path, tmp_path: Path
) -> None:
    """And nothing else."""
    out = tmp_path / "out.jsonl"
    worker.refuse = lambda _entry, body: (
        ModelFailed("odd") if len(body.inputs["image"]["image"]) % 2 else None
    )
    first = submit("measure", "photos", "--out", "out.jsonl")
    assert (first.returncode, first.stdout) == (1, "")
    assert len(records(out.read_text())) == 20

    worker.refuse = lambda _entry, _body: None
    worker.served.clear()
    (photos / "new.jpg").write_bytes(b"new")
    second = submit("measure", "photos", "--out", "out.jsonl")

    assert second.returncode == 0
    assert len(worker.served) == 11
    assert "11 done, 0 failed, 10 were there already" in second.stderr
    worker.served.clear()
    assert submit("measure", "photos", "--out", "out.jsonl").returncode == 0
    assert worker.served == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_can_be_taken_up(
    submit: Submit, worker: StandIn, photos: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """After Ctrl-C or worse, every file ends with exactly one good line."""
    out = tmp_path / "out.jsonl"
    words = ("measure", "photos", "--out", "out.jsonl", "--in-flight", "2")

    def hold_at_seven(_entry: object, _body: object) -> None:
        if len(worker.served) == 7:
            worker.held.set()

    worker.refuse = hold_at_seven
    with subprocess.Popen(**command(worker, *words), cwd=tmp_path) as process:
        wait_until(lambda: out.exists() and out.read_text().count("\n") >= 5, what="five lines")
        process.send_signal(how)
        process.communicate(timeout=30)
    assert process.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    begun = out.read_text().count("\n")
    assert begun < 20

    worker.refuse = lambda _entry, _body: None
    worker.held.clear()
    assert submit(*words).returncode == 0
    found = records(out.read_text())
    assert len(found) == 20
    assert all(line["ok"] for line in found.values())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("measure", "nothing*"), 2, "nothing*"),
        (("measure", "photos/notes*/"), 2, "notes"),
        (("measure", "photos", "--priority", "urgent"), 2, "urgent"),
        (("measure", "photos", "--in-flight", "0"), 2, "in-flight"),
        (("measure",), 2, "FILES"),
        (("nothing", "photos"), 1, "models: both, double, measure"),
        (("measure", "photos", "--redis", "http://x"), 1, "not a Redis URL"),
        (("measure", "photos", "--redis", "unix:///nowhere"), 1, "/nowhere"),
        (("measure", "photos", "--out", "photos/notes.txt"), 1, "line 1"),
    ],
)
def test_wrong_usage_is_told_apart_from_failure(
    submit: Submit, photos: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    """By the exit code, with one clear message and no traceback."""
    done = submit(*words)

    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
