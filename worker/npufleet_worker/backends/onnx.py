"""ONNX files on ONNX Runtime's CPU provider, as a plain run(inputs) -> outputs object."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Official builds since 1.29 report models and use to their maker, from the moment of import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime  # it must come after the switch

from npufleet.errors import ConfigurationError
from npufleet.signature import TensorSpec
from npufleet.tensors import Array

_DTYPES: Mapping[str, str] = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
}

_ERRORS_ONLY = 3


class OnnxModel:
    """A session with `threads` threads inside an operator, one operator at a time.

    Raises ConfigurationError where the file cannot be loaded or served.
    """

    def __init__(self, path: Path, *, threads: int) -> None:
        self._session = _load(path, threads)
        ends = self._session.get_inputs(), self._session.get_outputs()
        self.inputs, self.outputs = (tuple(_spec(path, end) for end in side) for side in ends)
        self.gears = _fixed_batch(path, ends[0])
        self._names = [spec.name for spec in self.outputs]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(self._names, self._session.run(self._names, inputs), strict=True))


def _load(path: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = _ERRORS_ONLY
    # Threads that spin between two batches would burn a core while nothing is asked.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(
            str(path), sess_options=options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # noqa: BLE001 - the runtime's errors share no other base class
        message = " ".join(str(error).split())
        raise ConfigurationError(f"{path} cannot be loaded as ONNX: {message}") from None


def _spec(path: Path, end: Any) -> TensorSpec:
    dtype = _DTYPES.get(end.type)
    if dtype is None:
        raise ConfigurationError(
            f"{path}: {end.name!r} is {end.type}, which is not served; export the model with "
            f"numeric tensors only ({', '.join(_DTYPES.values())})"
        )
    if not end.shape:
        raise ConfigurationError(
            f"{path}: {end.name!r} has shape {end.shape}; the first axis of every input and output "
            "must be the batch: export the model with one"
        )
    inner = (size if isinstance(size, int) and size >= 0 else -1 for size in end.shape[1:])
    return TensorSpec(end.name, dtype, (-1, *inner))


def _fixed_batch(path: Path, inputs: Sequence[Any]) -> tuple[int, ...]:
    """The one batch size of a file whose batch axis is a number, as many exporters write it."""
    sizes = {end.shape[0] for end in inputs if isinstance(end.shape[0], int)}
    if not inputs or len(sizes) > 1:
        raise ConfigurationError(
            f"{path}: the inputs must share their first axis, the batch; "
            f"got {[list(end.shape) for end in inputs]}"
        )
    return tuple(sizes)
