"""`npufleet demo` as a user runs it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


def demo(temporary: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """The command's end; whatever it keeps in files is under `temporary`."""
    return subprocess.run(
        [sys.executable, "-m", "npufleet", "demo", *words],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary), "NPUFLEET_REDIS_URL": "redis://nowhere"},
        capture_output=True,
        text=True,
        timeout=110,
    )


def family(temporary: Path) -> list[psutil.Process]:
    """Processes that were started by a demo with that folder for temporary files."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(temporary):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_the_demo_shows_right_answers_from_both_doors_and_leaves_nothing(tmp_path: Path) -> None:
    """Exit code 0, a table, no process and no file, whatever Redis the environment names."""
    done = demo(tmp_path)

    assert done.returncode == 0, done.stderr
    expected = json.loads((ROOT / "models/efficientnet-lite0/expected.json").read_text())
    for picture, classes in expected.items():
        lines = [line for line in done.stdout.splitlines() if picture in line]
        assert len(lines) == 2, done.stdout
        assert all(classes[0]["label"] in line for line in lines)
    assert "6 answers, all as expected" in done.stdout
    wait_until(lambda: not family(tmp_path), what="every process to be gone")
    assert list(tmp_path.iterdir()) == []


def test_the_demo_fails_with_the_reason_when_an_answer_is_wrong(tmp_path: Path) -> None:
    """By the third decimal."""
    models, temporary = tmp_path / "models", tmp_path / "temporary"
    temporary.mkdir()
    sample = models / "efficientnet-lite0"
    shutil.copytree(ROOT / "models" / "efficientnet-lite0", sample)
    expected = json.loads((sample / "expected.json").read_text())
    expected["coffee.png"][0]["probability"] -= 0.001
    (sample / "expected.json").write_text(json.dumps(expected))

    done = demo(temporary, "--models", str(models))

    assert done.returncode == 1
    assert "coffee.png by HTTP: espresso should be 0.9501, and is 0.9511" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_says_what_it_needs(tmp_path: Path) -> None:
    """Outside the repository there are no sample models."""
    done = demo(tmp_path, "--models", str(tmp_path))

    assert done.returncode == 1
    assert "--models" in done.stderr
    assert "Traceback" not in done.stderr
