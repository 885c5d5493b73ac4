"""`npufleet tune`: real executor processes, measured, simulated, proven, and written down."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from npufleet.cli import main
from npufleet_worker.repository import load_model

QUICK = ("--window-s=0.02", "--limit-s=1", "--requests=200", "--agreement=100")
"""Any three windows agree, however busy the machine of the tests is."""

SIMULATED = "a_ms = 4.5\nb_ms = 0.05\n"


def simulated(folder: Path, text: str = SIMULATED, *, toml: str | None = None) -> Path:
    """A repository with the model `m`, whose device is simulated."""
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "1" / "model.sim").write_text(text)
    if toml is not None:
        (folder / "m" / "model.toml").write_text(toml)
    return folder


def tune(models: Path, model: str, *options: str) -> int:
    """The exit code."""
    try:
        main(["tune", model, "--models", str(models), *QUICK, *options])
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return end.code or 0
    return 0


def tuned(
    capsys: pytest.CaptureFixture[str], models: Path, model: str, *options: str
) -> tuple[int, dict[str, Any]]:
    """The exit code and the document."""
    code = tune(models, model, "--json", *options)
    return code, json.loads(capsys.readouterr().out)


def test_the_setting_is_written_and_serves(
    capsys: pytest.CaptureFixture[str], models: Path, tmp_path: Path
) -> None:
    """The sample model, measured in earnest: what the file says loads again, comments and all."""
    shutil.copytree(models / "double", tmp_path / "double")
    file = tmp_path / "double" / "model.toml"
    before = file.read_text()
    chart = tmp_path / "curve.svg"
    code, document = tuned(
        capsys, tmp_path, "double", "--slo-p99-ms=5000", "--rehearse-s=0", f"--chart={chart}"
    )

    assert code == 0
    assert [time["gear"] for time in document["gears"]] == [1, 2, 4, 8, 16, 32]
    assert all(time["batch_ms"] > 0 for time in document["gears"])
    assert document["written"] == str(file)
    chosen = document["chosen"]
    batching = load_model(tmp_path / "double").batching
    assert batching.max_batch_size == chosen["max_batch_size"]
    assert batching.max_wait_ms == chosen["max_wait_ms"]
    assert file.read_text().splitlines()[0] == before.splitlines()[0]
    root = ElementTree.fromstring(chart.read_text())
    assert "double/1: latency over throughput" in "".join(root.itertext())


def test_the_setting_is_proven_in_real_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Through the batcher and an executor, at the rate that the simulation found."""
    models = simulated(tmp_path)
    options = ("--slo-p99-ms=8000", "--max-rows=4", "--rehearse-s=0.3", "--dry-run")
    code, document = tuned(capsys, models, "m", *options)

    assert code == 0
    confirmed = document["rehearsal"]["confirmed"]
    assert confirmed["sustained"]
    assert confirmed["p99_ms"] >= 4.5, "no answer is quicker than the device"
    assert confirmed["mean_batch"] > 1
    assert document["written"] is None
    assert not (models / "m" / "model.toml").exists(), "--dry-run"


def test_a_bound_that_cannot_be_met_is_said_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A run takes 4.5 ms and more; the caller learns what is within reach."""
    toml = "[batching]\nmax_batch_size = 2\n"
    models = simulated(tmp_path, toml=toml)
    code, document = tuned(capsys, models, "m", "--slo-p99-ms=2", "--max-rows=2")

    assert code == 1
    assert (document["chosen"], document["written"]) == (None, None)
    assert document["best_within_reach"]["points"][0]["p99_ms"] is None or (
        document["best_within_reach"]["points"][0]["p99_ms"] >= 4.5
    )
    assert (models / "m" / "model.toml").read_text() == toml

    assert tune(models, "m", "--slo-p99-ms=2", "--max-rows=2") == 1
    assert "no setting keeps p99 within 2 ms" in capsys.readouterr().out


def test_only_gears_of_the_file_are_tried(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A compiled model runs no other sizes, and its gears stay as they are."""
    models = simulated(tmp_path, f"{SIMULATED}gears = [2, 3, 16]\n")
    options = ("--slo-p99-ms=5000", "--rehearse-s=0", "--max-rows=8")
    code, document = tuned(capsys, models, "m", *options)

    assert code == 0
    assert [time["gear"] for time in document["gears"]] == [2, 3]
    assert load_model(models / "m").batching.max_batch_size in (2, 3)


def test_windows_that_never_agree_count_for_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No setting is chosen by figures that were not stable."""
    models = simulated(tmp_path)
    options = ("--agreement=0", "--limit-s=0.1", "--max-rows=1", "--slo-p99-ms=5000")
    assert tune(models, "m", *options) == 1
    said = capsys.readouterr().out
    assert "left out, since no three windows agreed: [1]" in said
    assert "no setting was chosen" in said
    assert not (models / "m" / "model.toml").exists()


def test_the_extra_that_is_missing_is_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is not named like the extra that brings it."""
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with pytest.raises(SystemExit, match=r"npufleet\[worker\]"):
        main(["tune", "m", "--slo-p99-ms=1"])
