"""The `[batching]` section of a model.toml, written in place. Knows nothing of other sections."""

import os
import tempfile
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError

from npufleet.errors import ConfigurationError

SECTION = "batching"


def write(path: Path, *, max_batch_size: int, max_wait_ms: float) -> None:
    """Set the two keys, and leave all else as it is, comments and order included.

    The file need not exist. Replaced at once, so that no reader finds half of it. Raises
    ConfigurationError where it cannot be read or written.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        _replace(path, _changed(text, max_batch_size, max_wait_ms))
    except (OSError, UnicodeDecodeError, TOMLKitError) as error:
        raise ConfigurationError(f"{path} cannot be changed: {error}") from None


def _changed(text: str, max_batch_size: int, max_wait_ms: float) -> str:
    document = tomlkit.parse(text)
    if SECTION not in document:
        if document:
            document.add(tomlkit.nl())
        document[SECTION] = tomlkit.table()
    section = document.item(SECTION)
    assert isinstance(section, tomlkit.items.AbstractTable), "checked when the model was loaded"
    section["max_batch_size"] = max_batch_size
    section["max_wait_ms"] = int(max_wait_ms) if max_wait_ms.is_integer() else max_wait_ms
    return tomlkit.dumps(document)


def _replace(path: Path, text: str) -> None:
    target = path.resolve()  # a link stays a link
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".model.toml-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
