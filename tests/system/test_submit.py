"""`npufleet submit` on a whole fleet: real pictures, a real model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fleets import running_fleet

ROOT = Path(__file__).parents[2]
SUBMIT = (sys.executable, "-m", "npufleet", "submit", "efficientnet-lite0")


def test_pictures_are_classified_by_the_fleet_of_this_folder(tmp_path: Path) -> None:
    """Nothing needs naming but the model and the pictures; a broken one fails alone."""
    pictures = ROOT / "models" / "efficientnet-lite0"
    expected = json.loads((pictures / "expected.json").read_text())
    broken = tmp_path / "broken.png"
    broken.write_bytes((pictures / "images" / "coffee.png").read_bytes()[:1000])

    with running_fleet(tmp_path / ".npufleet"):
        done = subprocess.run(
            [*SUBMIT, str(pictures / "images"), "broken.png", "--json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert done.returncode == 1, done.stderr
    found = {Path(r["file"]).name: r for r in map(json.loads, done.stdout.splitlines())}
    assert found.pop("broken.png")["code"] == "invalid_image"
    assert set(found) == set(expected)
    for name, classes in expected.items():
        [got] = found[name]["predictions"]
        assert [c["label"] for c in got] == [c["label"] for c in classes]
        for ours, theirs in zip(got, classes, strict=True):
            assert ours["probability"] == pytest.approx(theirs["probability"], abs=5e-4)


def test_without_a_fleet_it_says_what_to_do(tmp_path: Path) -> None:
    """In words, not in a traceback."""
    done = subprocess.run(
        [*SUBMIT, "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 1
    assert "npufleet up" in done.stderr
    assert "--redis" in done.stderr
    assert "Traceback" not in done.stderr
