"""Structured logs on stderr: text for people (colours on a terminal only) or JSON lines.

Records are the standard library's; what a caller passes as `extra={...}` becomes fields. Knows
nothing of what is logged.
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

_STANDARD = frozenset(
    [*vars(logging.LogRecord("", 0, "", 0, "", None, None)), "message", "asctime", "taskName"]
)
_COLOURS = {"WARNING": "\033[33m", "ERROR": "\033[31m", "CRITICAL": "\033[31m"}
_DIM, _RESET = "\033[2m", "\033[0m"


def setup(
    level: str = "info",
    format: Literal["text", "json"] = "text",
    *,
    stream: TextIO | None = None,
) -> None:
    """Send the records of this process to `stream` (stderr) and drop what was set up before."""
    output = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(output)
    coloured = output.isatty() and "NO_COLOR" not in os.environ
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter(coloured=coloured))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            # A field cannot rename the line's own keys.
            **{name: value for name, value in fields(record).items() if name not in _OWN_KEYS},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


_OWN_KEYS = frozenset(["time", "level", "logger", "message", "exception"])


class TextFormatter(logging.Formatter):
    """`14:03:07.120 WARNING npufleet.fleet: a worker died  name=worker-1 exit=-9`."""

    def __init__(self, *, coloured: bool) -> None:
        super().__init__()
        self._coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        extra = " ".join(f"{name}={_shown(value)}" for name, value in fields(record).items())
        head, level = f"{time} ", f"{record.levelname:<7}"
        message = f" {record.name}: {record.getMessage()}"
        if self._coloured:
            head = f"{_DIM}{head}{_RESET}"
            level = f"{_COLOURS.get(record.levelname, '')}{level}{_RESET}"
            extra = extra and f"{_DIM}{extra}{_RESET}"
        line = head + level + message + (f"  {extra}" if extra else "")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _shown(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "\n') else text
