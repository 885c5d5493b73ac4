"""The model repository: what a folder means, and what is said of a broken one."""

from pathlib import Path

import pytest

from npufleet.errors import ConfigurationError
from npufleet.signature import TensorSpec
from npufleet_worker.repository import (
    Found,
    ModelConfig,
    fit,
    load_model,
    load_repository,
    signature_of,
)

PICTURE = TensorSpec("image", "UINT8", (-1, 224, 224, 3))
SCORES = TensorSpec("scores", "FP32", (-1, 3))


def make_model(
    root: Path, toml: str = "", *, name: str = "m", files: tuple[str, ...] = ("1/model.onnx",)
) -> Path:
    folder = root / name
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"a model")
    folder.mkdir(exist_ok=True)
    if toml:
        (folder / "model.toml").write_text(toml)
    return folder


def complaint(folder: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_model(folder)
    return caught.value.message


def test_a_folder_with_only_a_model_file_serves_with_the_defaults(tmp_path: Path) -> None:
    """The promise of the README: drop in 1/model.onnx, and that is all."""
    config = load_model(make_model(tmp_path))
    assert (config.name, config.version, config.path.name) == ("m", 1, "model.onnx")
    assert (config.batching.max_batch_size, config.batching.max_wait_ms) == (32, 10.0)
    assert config.batching.gears == ()
    assert config.limits.max_batch_size == 32
    assert (config.image, config.classification, config.fallback) == (None, None, None)


def test_the_sample_repository_has_no_problems(models: Path) -> None:
    """What the product ships is read whole, labels included."""
    found = load_repository(models)
    assert found.problems == {}
    names = {config.name: config for config in found.configs}
    picture = names["efficientnet-lite0"]
    assert picture.image is not None
    assert picture.image.row_shape == (224, 224, 3)
    assert picture.classification is not None
    assert picture.classification.labels[967] == "espresso"
    assert names["double"].batching.max_wait_ms == 5


def test_a_broken_model_does_not_keep_its_neighbours_from_serving(tmp_path: Path) -> None:
    """Problems come per folder, beside the models that are well; hidden folders are no models."""
    make_model(tmp_path, name="good")
    make_model(tmp_path, "batching = 3", name="bad")
    make_model(tmp_path, name=".git")
    make_model(tmp_path, name="__pycache__")
    found = load_repository(tmp_path)
    assert isinstance(found, Found)
    assert [config.name for config in found.configs] == ["good"]
    assert list(found.problems) == ["bad"]


def test_a_missing_repository_is_named(tmp_path: Path) -> None:
    """The one error that concerns all models."""
    with pytest.raises(ConfigurationError, match="nowhere cannot be read"):
        load_repository(tmp_path / "nowhere")


def test_the_highest_version_is_served(tmp_path: Path) -> None:
    """By number and not by spelling; folders that are no numbers do not count."""
    files = ("2/model.onnx", "10/model.onnx", "old/model.onnx", "0/model.onnx")
    config = load_model(make_model(tmp_path, files=files))
    assert (config.version, config.path.parent.name) == (10, "10")


@pytest.mark.parametrize(
    ("toml", "wanted"),
    [
        ("[batching]\nmax_batch_sise = 3", "did you mean batching.max_batch_size?"),
        ("[bathing]\nmax_batch_size = 3", "bathing is not a key; did you mean batching?"),
        ("qqqqqq = 3", "qqqqqq is not a key; remove it"),
        ("[batching]\nmax_batch_size = 0", "batching.max_batch_size"),
        ("[batching]\nmax_batch_size = '8'", "batching.max_batch_size"),
        ("[batching]\nmax_batch_size = true", "batching.max_batch_size"),
        ("[batching]\nmax_wait_ms = -1", "batching.max_wait_ms"),
        ("[batching]\npolicy = 'eager'", "batching.policy"),
        ("[batching]\ngear_choice = 'next'", "batching.gear_choice"),
        ("[batching]\ngears = [8, 4, 4]", r"write \[4, 8\]"),
        ("[batching]\ngears = [0, 4]", "batching.gears.0"),
        ("[batching]\ngears = [1, 4]\nmax_batch_size = 5", "largest gear is 4"),
        ("[batching]\nmin_batch_size = 33", "above max_batch_size"),
        ("[image]\nsize = [1, 2, 3]", "image.size"),
        ("[image]\nsize = [8, 8]\ncrop = 0", "image.crop"),
        ("[image]\nsize = [8, 8]\ncrop = 1.01", "image.crop"),
        ("[image]\nsize = [8, 8]\nstd = [1, 0, 1]", "image.std"),
        ("[image]\ncrop = 1", "image.size: Field required"),
        ("[classification]\nlabels = 'nope.txt'", "nope.txt does not exist"),
        ("[executor]\nbackend = 'tensorflow'", "use one of acl, onnx, sim, torch, or module:Class"),
        ("[executor]\nbackend = 'acl'", "put one of model.om there"),
        ("[fallback]\nmodel = 'm'", "the model itself"),
        ("[fallback]\nmodel = 'a b'", "a model name is"),
        ("[batching", "is not valid TOML"),
    ],
)
def test_every_mistake_in_the_file_is_named_with_its_fix(
    tmp_path: Path, toml: str, wanted: str
) -> None:
    """The message carries the file (or folder) and the key."""
    folder = make_model(tmp_path, toml)
    with pytest.raises(ConfigurationError, match=wanted) as caught:
        load_model(folder)
    assert str(folder) in caught.value.message or "executor.backend" in caught.value.message


def test_gears_alone_set_the_largest_batch(tmp_path: Path) -> None:
    """Who writes gears does not have to write their maximum again; the limits know it too."""
    config = load_model(make_model(tmp_path, "[batching]\ngears = [1, 2, 64]"))
    assert config.batching.max_batch_size == 64
    assert config.limits.max_batch_size == 64


def test_a_folder_without_a_version_says_where_the_file_goes(tmp_path: Path) -> None:
    """The commonest mistake of a first model."""
    assert "put the model file at" in complaint(make_model(tmp_path, files=("model.onnx",)))


def test_two_model_files_are_refused_unless_the_backend_decides(tmp_path: Path) -> None:
    """A version compiled from .onnx to .om may hold both; weights beside the file do not count."""
    files = ("1/model.onnx", "1/model.om", "1/model.onnx.data")
    assert "model.om, model.onnx" in complaint(make_model(tmp_path, files=files))
    config = load_model(make_model(tmp_path, "[executor]\nbackend = 'onnx'", files=files))
    assert config.path.name == "model.onnx"


def test_a_backend_of_ones_own_may_do_without_a_model_file(tmp_path: Path) -> None:
    """It is given the version folder then."""
    folder = make_model(tmp_path, "[executor]\nbackend = 'mine:Backend'", files=("3/readme",))
    assert load_model(folder).path == folder / "3"


def test_a_folder_whose_name_no_model_can_have_is_refused(tmp_path: Path) -> None:
    """Model names stand in keys and URLs."""
    assert "rename the folder" in complaint(make_model(tmp_path, name="a b"))


def test_labels_keep_their_line_numbers(tmp_path: Path) -> None:
    """An empty line is a class without a name, not a shift of all others."""
    folder = make_model(tmp_path, "[classification]\noutput = 'scores'")
    (folder / "labels.txt").write_text("ant\n\n  bee \n")
    config = load_model(folder)
    assert config.classification is not None
    assert config.classification.labels == ("ant", "", "bee")


def configured(tmp_path: Path, toml: str) -> ModelConfig:
    return load_model(make_model(tmp_path, toml))


def test_a_file_compiled_for_fixed_batches_bounds_the_batch(tmp_path: Path) -> None:
    """A model exported with a fixed batch axis serves without a word of configuration."""
    fitted = fit(configured(tmp_path, ""), (8, 1, 4))
    assert fitted.batching.gears == (1, 4, 8)
    assert fitted.batching.max_batch_size == fitted.limits.max_batch_size == 8
    narrow = fit(configured(tmp_path, "[batching]\nmax_batch_size = 5"), (1, 4, 8))
    assert narrow.batching.max_batch_size == 5


@pytest.mark.parametrize(
    ("toml", "wanted"),
    [
        ("gears = [1, 3]", r"take \[3\] out of batching.gears"),
        ("max_batch_size = 9", "lower batching.max_batch_size"),
        ("min_batch_size = 9", "lower batching.min_batch_size"),
    ],
)
def test_a_batch_size_that_the_file_cannot_run_is_refused(
    tmp_path: Path, toml: str, wanted: str
) -> None:
    """At load, not at the first request."""
    with pytest.raises(ConfigurationError, match=wanted):
        fit(configured(tmp_path, f"[batching]\n{toml}"), (1, 4, 8))


def test_the_signature_takes_the_first_input_and_output_by_default(tmp_path: Path) -> None:
    """A model with one input needs no names in its file."""
    config = configured(tmp_path, "[image]\nsize = [224, 224]\n[classification]\ntop_k = 2")
    signature = signature_of(config, [PICTURE], [SCORES])
    assert (signature.image_input, signature.classifies) == ("image", True)


@pytest.mark.parametrize(
    ("toml", "wanted"),
    [
        ("[image]\nsize = [32, 32]", "correct image.size"),
        ("[image]\nsize = [224, 224]\nlayout = 'NCHW'", "image.layout"),
        ("[image]\nsize = [224, 224]\ninput = 'photo'", "image.input is 'photo'"),
        ("[image]\nsize = [224, 224]\nmean = [1, 2, 3]", "for float inputs"),
        ("[classification]\noutput = 'logits'", "classification.output is 'logits'"),
    ],
)
def test_a_file_that_contradicts_its_configuration_is_refused(
    tmp_path: Path, toml: str, wanted: str
) -> None:
    """Before the model takes traffic."""
    with pytest.raises(ConfigurationError, match=wanted):
        signature_of(configured(tmp_path, toml), [PICTURE], [SCORES])


def test_labels_must_be_as_many_as_the_classes(tmp_path: Path) -> None:
    """Labels shifted by one are worse than none."""
    folder = make_model(tmp_path, "[classification]\ntop_k = 1")
    (folder / "labels.txt").write_text("a\nb\n")
    with pytest.raises(ConfigurationError, match="2 labels, but output 'scores' has 3 classes"):
        signature_of(load_model(folder), [PICTURE], [SCORES])
