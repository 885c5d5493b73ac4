"""Files sent to a model, and what became of each: the matter of `npufleet submit`.

Knows nothing of command lines, terminals and where records are kept.
"""

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from npufleet.errors import InvalidInput, NpufleetError
from npufleet.result import Result
from npufleet.signature import Signature
from npufleet.tensors import Array

Record = dict[str, Any]
"""One file's result as JSON has it."""

_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_ARRAYS = (".npy",)


class Submission:
    """What was sent and what came of it; each file's record goes to `put`."""

    def __init__(
        self, signature: Signature, put: Callable[[Record], None], *, skipped: int
    ) -> None:
        self._signature = signature
        self._put = put
        self._skipped = skipped
        self._sent: list[str] = []
        self.good = 0
        self.failed = 0

    def __str__(self) -> str:
        text = f"{self.good} done, {self.failed} failed"
        return f"{text}, {self._skipped} were there already" if self._skipped else text

    def values(self, files: Iterable[str]) -> Iterator[Any]:
        """The inputs to send; a file that is none is recorded as failed, and passed over."""
        for file in files:
            try:
                value = _value(file, self._signature)
            except NpufleetError as error:
                self._note(file, Result(id="", model=self._signature.model, error=error))
                continue
            self._sent.append(file)
            yield value

    def answered(self, index: int, result: Result) -> None:
        """Records the result of the value number `index`."""
        self._note(self._sent[index], result)

    def _note(self, file: str, result: Result) -> None:
        self._put(record(file, result))
        self.good += result.ok
        self.failed += not result.ok


def record(file: str, result: Result) -> Record:
    """The JSON line of one file. `predictions` has one element per row."""
    head: Record = {"file": file, "ok": result.ok, "model": result.model}
    if result.error is not None:
        return {**head, "code": result.error.code, "error": result.error.message}
    rows = result.predictions if result.predictions is not None else _rows(result.outputs)
    return {**head, "version": result.version, "predictions": rows}


def _rows(outputs: Mapping[str, Array]) -> list[Any]:
    """The rows of tensors: nested lists where there is one output, else maps by name."""
    lists = {name: _plain(array).tolist() for name, array in outputs.items()}
    if len(lists) == 1:
        return list(*lists.values())
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _plain(array: Array) -> Array:
    """With nothing in it that JSON has not: null for what is not finite, text for bytes."""
    plain: Array = array
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        plain = array.astype(object)
        plain[~np.isfinite(array)] = None
    elif array.dtype.kind == "O":
        plain = np.frompyfunc(lambda item: item.decode(errors="replace"), 1, 1)(array)
    return plain


def suffixes(signature: Signature) -> tuple[str, ...]:
    """The names of files that hold inputs of the model end so."""
    return _ARRAYS if signature.image_input is None else (*_IMAGES, *_ARRAYS)


def find(names: Sequence[str], endings: tuple[str, ...]) -> list[str]:
    """The files that names of files, folders and patterns stand for, each once, in order.

    Folders are searched for names with one of the endings. Raises FileNotFoundError naming what
    matches nothing.
    """
    files: dict[str, None] = {}
    for name in names:
        matches = [name] if Path(name).exists() else sorted(glob.glob(name, recursive=True))
        found = [file for match in matches for file in _inside(Path(match), endings)]
        if not found:
            raise FileNotFoundError(f"no file for {name!r}")
        files |= dict.fromkeys(map(str, found))
    return list(files)


def _inside(path: Path, endings: tuple[str, ...]) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.suffix.lower() in endings and p.is_file())
    return [path] if path.is_file() else []


def _value(file: str, signature: Signature) -> Any:
    """The input that a file holds; InvalidInput where it holds none."""
    if Path(file).suffix.lower() in _ARRAYS:
        try:
            array = np.load(file, allow_pickle=False)
        except OSError as error:
            raise InvalidInput(f"cannot read {file}: {error.strerror or error}") from None
        except (ValueError, EOFError):  # numpy's own words recommend pickle
            raise InvalidInput(f"{file} is no .npy file of numbers or text") from None
        if not isinstance(array, np.ndarray):
            raise InvalidInput(f"{file} is an archive of arrays, not one array")
        return array
    if signature.image_input is None:
        raise InvalidInput(f"{signature.model} takes arrays: .npy files")
    return {signature.image_input: Path(file)}
