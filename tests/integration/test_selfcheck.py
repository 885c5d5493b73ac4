"""`npufleet selfcheck`: real executor processes, models that keep their rows apart and others."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npufleet.cli import main
from tests.support import onnx_models

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def findable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors do not look into the working folder."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def uneven(folder: Path, backend: str) -> Path:
    """A repository with the model `m`, run by one of tests.support.uneven_backends."""
    (folder / "m" / "1").mkdir(parents=True)
    toml = f'[executor]\nbackend = "tests.support.uneven_backends:{backend}"\n'
    (folder / "m" / "model.toml").write_text(toml)
    return folder


def selfcheck(models: Path, model: str, *options: str) -> int:
    """The exit code."""
    try:
        main(["selfcheck", model, "--models", str(models), *options])
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return end.code or 0
    return 0


def checked(
    capsys: pytest.CaptureFixture[str], models: Path, model: str, *options: str
) -> tuple[int, dict[str, Any]]:
    """The exit code and the document."""
    code = selfcheck(models, model, "--json", *options)
    return code, json.loads(capsys.readouterr().out)


def test_a_model_that_keeps_its_rows_apart_passes(
    capsys: pytest.CaptureFixture[str], models: Path
) -> None:
    """Every row in every position of every power of two, twice, beside others each time."""
    code, document = checked(capsys, models, "double", "--rows", "5")

    assert code == 0
    assert document["good"]
    compared = {finding["gear"]: finding["compared"] for finding in document["gears"]}
    assert compared == {gear: 2 * 5 * gear for gear in (1, 2, 4, 8, 16, 32)}
    assert all(finding["alone"]["outside"] == 0 for finding in document["gears"])


def test_real_pictures_may_be_given(models: Path) -> None:
    """The sample model with its sample pictures, and the words for a person."""
    images = models / "efficientnet-lite0" / "images"
    samples = [f"--samples={images / name}" for name in ("chelsea.png", "coffee.png")]
    assert selfcheck(models, "efficientnet-lite0", *samples) == 0


def test_rows_that_depend_on_their_neighbours_are_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With the size of the difference; alone there is none."""
    models = uneven(tmp_path, "Neighbourly")
    code, document = checked(capsys, models, "m")

    assert code == 1
    verdicts = {finding["gear"]: finding["good"] for finding in document["gears"]}
    assert verdicts == {1: True, 2: False, 4: False}
    assert 0 < document["gears"][2]["neighbours"]["absolute"] < 0.1
    assert document["gears"][2]["padding"]["outside"] > 0

    assert selfcheck(models, "m") == 1
    assert "rows DEPEND on neighbours" in capsys.readouterr().out


def test_a_tolerance_is_taken_at_its_word(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The same model passes where its caller can live with it."""
    models = uneven(tmp_path, "Neighbourly")
    code, document = checked(capsys, models, "m", "--tolerance", "0", "1")
    assert (code, document["good"]) == (0, True)
    assert document["gears"][2]["alone"]["absolute"] > 0


def test_a_single_bad_position_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And not blamed on neighbours."""
    code, document = checked(capsys, uneven(tmp_path, "Positional"), "m", "--rows", "3")

    assert code == 1
    verdicts = {finding["gear"]: finding["good"] for finding in document["gears"]}
    assert verdicts == {1: True, 2: True, 4: False}
    worst = document["gears"][2]
    assert worst["alone"]["absolute"] == pytest.approx(0.5)
    assert worst["alone"]["outside"] == 2 * 3 * 3, "each row was there twice, three numbers each"
    assert worst["neighbours"]["absolute"] == 0


def test_nan_is_counted_and_no_difference_where_it_always_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One number of each row."""
    code, document = checked(capsys, uneven(tmp_path, "NotANumber"), "m", "--rows", "2")
    assert code == 0
    assert [finding["not_finite"] for finding in document["gears"]] == [4, 8, 16]


def test_open_dimensions_need_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody but the caller knows a likely length; with a file of rows it works."""
    onnx_models.save_statistics(tmp_path / "m" / "1" / "model.onnx")
    with pytest.raises(SystemExit, match=r"'a' leaves dimensions open.*--samples"):
        selfcheck(tmp_path, "m")

    dice = np.random.default_rng(1)
    rows = {name: dice.normal(size=(3, 7)).astype(np.float32) for name in "ab"}
    np.savez(tmp_path / "rows.npz", a=rows["a"], b=rows["b"])
    code, document = checked(capsys, tmp_path, "m", f"--samples={tmp_path / 'rows.npz'}")
    assert (code, document["rows"]) == (0, 3)
    assert {finding["output"] for finding in document["gears"]} == {"total", "product"}


def test_an_unknown_model_is_answered_with_those_that_exist(models: Path) -> None:
    """One line, no traceback."""
    with pytest.raises(SystemExit, match=r"no model 'dubble'.*double, efficientnet-lite0"):
        selfcheck(models, "dubble")
