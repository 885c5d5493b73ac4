"""Named fields as callers send them: which are known, and one option of each kind checked.

Knows nothing of HTTP, of models or of where the fields came from.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from npufleet.errors import InvalidParameter, UnknownField

_SHOWN_LENGTH = 60


def refuse_unknown(given: Iterable[str], known: tuple[str, ...], *, where: str) -> None:
    """UnknownField for the first name that is not known, naming the nearest one and all others."""
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(name[:_SHOWN_LENGTH], known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownField(
            f"{where} has the unknown field {shown(name)}{hint} (known: {', '.join(known)})"
        )


def text(fields: Mapping[str, Any], name: str) -> str | None:
    """The text of a field, or None where it is absent; InvalidParameter for anything else."""
    value = fields.get(name)
    if value is None and name not in fields:
        return None
    if not isinstance(value, str):
        raise InvalidParameter(f"{name} must be text, got {shown(value)}")
    return value


def whole(fields: Mapping[str, Any], name: str, *, least: int, most: int) -> int | None:
    """A whole number within bounds, also from its decimal digits, as queries and forms carry it."""
    value = fields.get(name)
    if value is None and name not in fields:
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        value = int(value)
    if type(value) is not int or not least <= value <= most:  # bool is an int to Python
        raise InvalidParameter(
            f"{name} must be a whole number from {least} to {most}, got {shown(value)}"
        )
    return value


def shown(value: Any) -> str:
    """A value as an error message may show it: in JSON's words, and short."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and len(value) > _SHOWN_LENGTH:
        return f"{value[:_SHOWN_LENGTH]!r}… ({len(value)} characters)"
    return repr(value)
