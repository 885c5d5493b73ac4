"""A journal of results: one JSON line per file, so that a run can be taken up where it stopped.

A line that a crash has torn is dropped; a file that failed counts as not done. Knows nothing of
models and queues.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from npufleet.errors import ConfigurationError

_BEGIN = b'{"file": "'


class Journal:
    """The file at `path`, held by one process at a time. Use it as a context manager.

    Entering raises ConfigurationError when the file cannot be written, when another process has
    it, or when it holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self.done: set[str] = set()
        """The files whose last line says that they went well."""

    def __enter__(self) -> Self:
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self._close()
            raise ConfigurationError(f"another run writes to {self._path}") from None
        except OSError as error:
            self._close()
            raise ConfigurationError(f"cannot write to {self._path}: {error.strerror}") from None
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def append(self, record: Mapping[str, Any]) -> None:
        """One line, with the system when this returns."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        raw = line.encode(errors="surrogateescape")
        assert raw.startswith(_BEGIN), "a record names its file first"
        try:
            os.write(self._descriptor, raw)
        except OSError as error:
            raise ConfigurationError(f"cannot write to {self._path}: {error.strerror}") from None

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self) -> None:
        whole_bytes = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n") and _is_torn(line):
                    break
                self._note(line, number)
                whole_bytes += len(line)
        os.ftruncate(self._descriptor, whole_bytes)

    def _note(self, line: bytes, number: int) -> None:
        try:
            record = json.loads(line.decode(errors="surrogateescape"))
            file, ok = record["file"], record["ok"]
        except (ValueError, TypeError, KeyError):
            raise ConfigurationError(
                f"{self._path}, line {number}, is no result of an earlier run: choose another file"
            ) from None
        if ok:
            self.done.add(file)
        else:
            self.done.discard(file)


def _is_torn(line: bytes) -> bool:
    """Whether a last line without an end is what a crash left of ours, and not another file's."""
    return line[: len(_BEGIN)] == _BEGIN[: len(line)] or not line.strip(b"\0")
