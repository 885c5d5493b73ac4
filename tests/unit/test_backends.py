"""Backends: how one is found, what ONNX files become, and how a plain object is staged."""

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from npufleet.errors import ConfigurationError
from npufleet.signature import TensorSpec
from npufleet.tensors import DTYPES, Array
from npufleet_worker.backends import Backend, Gathering, open_backend
from tests.support import onnx_models


class Recorder:
    """A plain backend that keeps copies of what it was given."""

    inputs = (TensorSpec("x", "INT32", (-1, -1)),)
    outputs = (TensorSpec("y", "INT32", (-1, -1)),)
    gears = (4, 1)

    def __init__(self, path: Path, *, threads: int) -> None:
        self.path, self.threads = path, threads
        self.seen: list[Array] = []
        self.addresses: list[int] = []
        self.closed = 0

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.seen.append(inputs["x"].copy())
        self.addresses.append(inputs["x"].ctypes.data)
        return {"y": inputs["x"] * 10}

    def close(self) -> None:
        self.closed += 1


class Neither:
    def __init__(self, path: Path, *, threads: int) -> None:
        pass


def run(backend: Backend, batch: Gathering, slot: int = 0) -> dict[str, Array]:
    backend.stage(slot, batch)
    backend.launch(slot)
    backend.wait(slot, 10.0)
    return backend.fetch(slot)


def one(name: str, array: Any, gear: int | None = None) -> Gathering:
    part = np.asarray(array)
    return Gathering(len(part), gear or len(part), {name: [part]})


def recorder(monkeypatch: pytest.MonkeyPatch) -> tuple[Backend, Recorder]:
    made: list[Recorder] = []

    def make(path: Path, *, threads: int) -> Recorder:
        made.append(Recorder(path, threads=threads))
        return made[0]

    monkeypatch.setitem(sys.modules, "a_users_module", types.SimpleNamespace(make=make))
    backend = open_backend(Path("file"), backend="a_users_module:make", threads=3)
    return backend, made[0]


def test_a_class_of_ones_own_is_called_with_path_and_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And becomes a whole Backend, gears in order."""
    backend, plain = recorder(monkeypatch)
    assert (plain.path, plain.threads) == (Path("file"), 3)
    assert backend.gears == (1, 4)
    assert backend.inputs == Recorder.inputs
    backend.close()
    assert plain.closed == 1


def test_rows_are_gathered_in_order_and_padded_with_a_valid_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding is a copy of a real row: zeros could be a division by zero to a model."""
    backend, plain = recorder(monkeypatch)
    parts = [np.array([[1, 2]], np.int32), np.array([[3, 4], [5, 6]], np.int32)]
    out = run(backend, Gathering(3, 4, {"x": parts}))
    assert plain.seen[0].tolist() == [[1, 2], [3, 4], [5, 6], [1, 2]]
    assert out["y"].tolist() == [[10, 20], [30, 40], [50, 60], [10, 20]]


def test_a_smaller_batch_shows_nothing_of_a_larger_one_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The staging memory is reused, its old content is not."""
    backend, plain = recorder(monkeypatch)
    run(backend, one("x", np.full((4, 5), 9, np.int32)))
    run(backend, one("x", np.array([[7, 8, 9]], np.int32), gear=4))
    assert plain.seen[1].tolist() == [[7, 8, 9]] * 4
    assert plain.addresses[0] == plain.addresses[1]


def test_a_batch_may_be_staged_while_another_has_not_been_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One ahead: two slots keep apart."""
    backend, _ = recorder(monkeypatch)
    backend.stage(0, one("x", np.array([[1]], np.int32)))
    backend.launch(0)
    backend.stage(1, one("x", np.array([[2]], np.int32)))
    backend.wait(0, 1.0)
    backend.launch(1)
    assert backend.fetch(0)["y"].tolist() == [[10]]
    backend.wait(1, 1.0)
    assert backend.fetch(1)["y"].tolist() == [[20]]


@pytest.mark.parametrize(
    ("path", "backend", "wanted"),
    [
        ("m.om", None, "acl backend is not part of this release yet"),
        ("m.pt", None, "torch backend is not part of this release yet"),
        ("m.onnx", "torch", "not part of this release yet"),
        ("m.tflite", None, r"known suffixes are \.onnx"),
        ("m.onnx", "no_such_module_:C", "no module 'no_such_module_': install it"),
        ("m.onnx", "json:Nope", "module 'json' has no 'Nope'"),
        ("m.onnx", ":Nope", "module:Class"),
        ("m.onnx", "json:decoder", "is not a class"),
    ],
)
def test_a_backend_that_cannot_be_had_is_explained(
    path: str, backend: str | None, wanted: str
) -> None:
    """The sentence says what to write instead."""
    with pytest.raises(ConfigurationError, match=wanted):
        open_backend(Path(path), backend=backend)


def test_a_class_that_is_no_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At load, naming what it lacks."""
    monkeypatch.setitem(sys.modules, "a_users_module", types.SimpleNamespace(Neither=Neither))
    with pytest.raises(ConfigurationError, match="Neither has neither run"):
        open_backend(Path("m"), backend="a_users_module:Neither")


def test_a_model_of_texts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of shared memory have a fixed size."""
    texts = (TensorSpec("x", "BYTES", (-1, 1)),)
    monkeypatch.setattr(Recorder, "inputs", texts)
    with pytest.raises(ConfigurationError, match="'x' is BYTES; only numbers are served"):
        recorder(monkeypatch)


def test_an_onnx_file_tells_its_inputs_and_outputs(models: Path) -> None:
    """Names, wire dtypes and shapes, the batch axis and other free axes as -1."""
    backend = open_backend(models / "efficientnet-lite0" / "1" / "model.onnx")
    assert backend.inputs == (TensorSpec("image", "UINT8", (-1, 224, 224, 3)),)
    assert backend.outputs == (TensorSpec("probabilities", "FP32", (-1, 1000)),)
    assert backend.gears == ()


def test_a_fixed_batch_axis_is_the_only_gear(tmp_path: Path) -> None:
    """As exporters write it that were not told of a dynamic axis."""
    path = onnx_models.save_identity(tmp_path / "m.onnx", TensorProto.FLOAT, [4, 2])
    backend = open_backend(path)
    assert (backend.gears, backend.inputs[0].shape) == ((4,), (-1, 2))
    out = run(backend, one("x", np.array([[1, 2]], np.float32), gear=4))
    assert out["y"].tolist() == [[1, 2]] * 4


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (TensorProto.BOOL, "BOOL"), (TensorProto.UINT8, "UINT8"), (TensorProto.UINT16, "UINT16"),
        (TensorProto.UINT32, "UINT32"), (TensorProto.UINT64, "UINT64"), (TensorProto.INT8, "INT8"),
        (TensorProto.INT16, "INT16"), (TensorProto.INT32, "INT32"), (TensorProto.INT64, "INT64"),
        (TensorProto.FLOAT16, "FP16"), (TensorProto.FLOAT, "FP32"), (TensorProto.DOUBLE, "FP64"),
    ],
)  # fmt: skip
def test_every_numeric_dtype_passes_through_unchanged(tmp_path: Path, kind: int, name: str) -> None:
    """Bit for bit."""
    backend = open_backend(onnx_models.save_identity(tmp_path / "m.onnx", kind, ["N", 2]))
    assert backend.inputs[0].dtype == name
    rows = np.array([[1, 0], [0, 1]], DTYPES[name].numpy)
    out = run(backend, one("x", rows))["y"]
    assert (out.dtype, out.tolist()) == (rows.dtype, rows.tolist())


@pytest.mark.parametrize(
    ("kind", "shape", "wanted"),
    [
        (TensorProto.STRING, ["N", 2], r"tensor\(string\), which is not served"),
        (TensorProto.FLOAT, [], "first axis of every input and output"),
    ],
)
def test_a_file_that_cannot_be_served_says_why(
    tmp_path: Path, kind: int, shape: list[int | str], wanted: str
) -> None:
    """At load, not at the first request."""
    path = onnx_models.save_identity(tmp_path / "m.onnx", kind, shape)
    with pytest.raises(ConfigurationError, match=wanted):
        open_backend(path)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x08\x12\x04test" * 9])
def test_a_corrupt_file_is_named(tmp_path: Path, content: bytes) -> None:
    """Whatever the runtime raises."""
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"broken\.onnx cannot be loaded as ONNX"):
        open_backend(path)
