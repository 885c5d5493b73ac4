"""Log lines as people and programs read them."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from npufleet import logs


@pytest.fixture(autouse=True)
def _root_as_it_was() -> Iterator[None]:
    """`setup` changes the process's root logger."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_json_lines_carry_fields_and_cannot_be_broken_by_them() -> None:
    """One object a line whatever is in the fields; a field cannot pose as the message."""
    stream = io.StringIO()
    logs.setup("info", "json", stream=stream)

    logging.getLogger("a.b").info("took %d", 3, extra={"id": 'x"\ny', "time": "forged"})

    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    assert record["message"] == "took 3"
    assert record["level"] == "info"
    assert record["logger"] == "a.b"
    assert record["id"] == 'x"\ny'
    assert record["time"] != "forged"


def test_text_lines_show_fields_on_one_line() -> None:
    """Values with spaces or newlines are quoted, so that a record stays a line."""
    stream = io.StringIO()
    logs.setup("info", "text", stream=stream)

    logging.getLogger("a").warning("lost", extra={"id": "x", "why": "two\nlines"})

    assert stream.getvalue().endswith('WARNING a: lost  id=x why="two\\nlines"\n')


def test_the_level_holds() -> None:
    """What is below the level is not written."""
    stream = io.StringIO()
    logs.setup("warning", stream=stream)

    logging.getLogger("a").info("quiet")

    assert stream.getvalue() == ""


def test_colours_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file gets none, nor does a terminal under NO_COLOR."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    file, terminal, plain = io.StringIO(), Terminal(), Terminal()
    for stream in (file, terminal):
        logs.setup(stream=stream)
        logging.getLogger("a").error("x")
    monkeypatch.setenv("NO_COLOR", "1")
    logs.setup(stream=plain)
    logging.getLogger("a").error("x")

    assert "\033[" in terminal.getvalue()
    assert "\033[" not in file.getvalue() + plain.getvalue()


def test_exceptions_are_part_of_the_record() -> None:
    """A traceback stands in the JSON object, not in lines of its own."""
    stream = io.StringIO()
    logs.setup("info", "json", stream=stream)

    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("a").exception("failed")

    (line,) = stream.getvalue().splitlines()
    assert "ValueError: odd" in json.loads(line)["exception"]
