"""Backends: what loads a model file and runs batches on its device, and how one is found.

Knows nothing of requests, shared memory or processes; a backend is used from one thread only.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from npufleet.errors import ConfigurationError
from npufleet.signature import TensorSpec
from npufleet.tensors import DTYPES, Array

SLOTS = 2
"""Batches that a backend holds at once: one running, the next one staged."""

BY_SUFFIX: Mapping[str, str] = {
    ".onnx": "onnx",
    ".om": "acl",
    ".pt": "torch",
    ".pth": "torch",
    ".sim": "sim",
}
"""Suffixes of model files, and the backend that takes each."""

_BUILT_IN: Mapping[str, str] = {
    "onnx": "npufleet_worker.backends.onnx:OnnxModel",
    "sim": "npufleet_worker.backends.sim:SimulatedDevice",
}
_LATER = ("acl", "torch")


@dataclass(frozen=True, slots=True)
class Gathering:
    """The rows of one batch where they lie: per input its parts in order, each (rows, *inner).

    `gear` is the number of rows to run, at least `rows`: what is beyond is padding.
    """

    rows: int
    gear: int
    parts: Mapping[str, Sequence[Array]]


class Backend(Protocol):
    """A loaded model; constructing one is loading. Every call comes from the constructing thread.

    A batch goes through stage, launch, wait, fetch in one slot (0 to SLOTS - 1). Another batch may
    be staged while one runs, but launched only after the first has been waited for. `gears` are
    the batch sizes that the file was compiled for, ascending; empty: any. `shape[0]` of every
    input and output is -1. Any call may raise: that batch has failed then, and no other.
    """

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def gears(self) -> tuple[int, ...]: ...

    def stage(self, slot: int, batch: Gathering) -> None:
        """Copy the rows to the slot, and repeat a valid row up to the gear."""
        ...

    def launch(self, slot: int) -> None:
        """Start the run of what was staged; need not wait for it."""
        ...

    def wait(self, slot: int, timeout_s: float) -> None:
        """Return when the run has ended; TimeoutError after `timeout_s` where that can be told."""
        ...

    def fetch(self, slot: int) -> dict[str, Array]:
        """The outputs by name, padding included; valid until the slot is staged again."""
        ...

    def close(self) -> None:
        """Free the device; harmless when repeated."""
        ...


@runtime_checkable
class Runnable(Protocol):
    """The plain kind of backend: one call from inputs to outputs, rows in the first axis of all.

    May have `gears` and `close()`, as in Backend. The input arrays are reused after the call.
    """

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]: ...


def open_backend(path: Path, *, backend: str | None = None, threads: int = 1) -> Backend:
    """Load `path` with the backend of that name, or of its suffix, or with `module:Class`.

    The class is called as `Class(path, threads=threads)` and gives a Backend or a Runnable. Raises
    ConfigurationError where there is no such backend or the file cannot be loaded.
    """
    # Here, since it needs what stands above.
    from npufleet_worker.backends.whole import WholeBackend

    loaded = _factory(path, backend)(path, threads=threads)
    if isinstance(loaded, Runnable):
        _check_dtypes(path, (*loaded.inputs, *loaded.outputs))
        return WholeBackend(loaded)
    missing = [name for name in ("stage", "launch", "wait", "fetch") if not hasattr(loaded, name)]
    if missing:
        raise ConfigurationError(
            f"executor.backend {backend!r}: {type(loaded).__name__} has neither run() with inputs "
            f"and outputs, nor {', '.join(missing)}()"
        )
    result: Backend = loaded
    return result


def _check_dtypes(path: Path, specs: Sequence[TensorSpec]) -> None:
    for spec in specs:
        if spec.dtype not in DTYPES:
            raise ConfigurationError(
                f"{path}: {spec.name!r} is {spec.dtype}; only numbers are served: "
                + ", ".join(DTYPES)
            )


def _factory(path: Path, backend: str | None) -> Callable[..., Any]:
    if backend is not None and ":" in backend:
        return _import(backend)
    name = backend or BY_SUFFIX.get(path.suffix)
    if name in _LATER:
        raise ConfigurationError(
            f"{path}: the {name} backend is not part of this release yet; "
            "use an .onnx file, or a backend of your own as executor.backend = 'module:Class'"
        )
    where = _BUILT_IN.get(name or "")
    if where is None:
        known = ", ".join(BY_SUFFIX)
        raise ConfigurationError(
            f"{path}: no backend for this file; known suffixes are {known}, "
            f"and executor.backend takes {', '.join(_BUILT_IN)} or module:Class"
        )
    return _import(where)


def _import(where: str) -> Callable[..., Any]:
    module_name, _, attribute = where.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        package = error.name or module_name
        fix = (
            "pip install 'npufleet[onnx]'"
            if package == "onnxruntime"
            else "install it, or put its folder on PYTHONPATH"
        )
        raise ConfigurationError(
            f"backend {where}: there is no module {package!r}: {fix}"
        ) from None
    except (AttributeError, ValueError):
        raise ConfigurationError(
            f"backend {where}: module {module_name!r} has no {attribute!r}; "
            "executor.backend is written module:Class"
        ) from None
    if not callable(found):
        raise ConfigurationError(f"backend {where}: {attribute!r} is not a class")
    result: Callable[..., Any] = found
    return result
