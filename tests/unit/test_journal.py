"""The journal of results: what a repeated run believes, and what it does not."""

import json
from pathlib import Path

import pytest

from npufleet.errors import ConfigurationError
from npufleet.journal import Journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def write(path: Path, *records: dict[str, object]) -> None:
    with Journal(path) as journal:
        for record in records:
            journal.append(record)


def test_what_went_well_is_done_and_what_failed_is_not(path: Path) -> None:
    """The last line of a file counts."""
    write(
        path,
        {"file": "a", "ok": True},
        {"file": "b", "ok": False},
        {"file": "c", "ok": False},
        {"file": "c", "ok": True},
        {"file": "grüße\udcff", "ok": True},
    )

    with Journal(path) as journal:
        assert journal.done == {"a", "c", "grüße\udcff"}


@pytest.mark.parametrize("torn", ['{"file": "b", "ok": true}', '{"file": "b', "\x00\x00", "{"])
def test_a_torn_last_line_is_dropped(path: Path, torn: str) -> None:
    """A crash in the middle of a line costs that line; the next one stands on a line of its own."""
    write(path, {"file": "a", "ok": True})
    with path.open("a", encoding="utf-8") as file:
        file.write(torn)

    write(path, {"file": "b", "ok": True})

    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["file"] for line in lines] == ["a", "b"]


@pytest.mark.parametrize("content", ["hello\n", "hello", "[1]", "[1]\n", '{"x": 1}\n', "\n"])
def test_another_file_is_not_written_into(path: Path, content: str) -> None:
    """A wrong --out must not eat somebody's data."""
    path.write_text(content, encoding="utf-8")

    with pytest.raises(ConfigurationError, match="line 1"):
        write(path, {"file": "a", "ok": True})
    assert path.read_text(encoding="utf-8") == content


def test_two_runs_cannot_write_into_one_journal(path: Path) -> None:
    """The second says so; the first goes on."""
    with Journal(path) as journal:
        with pytest.raises(ConfigurationError, match="another run"), Journal(path):
            pass
        journal.append({"file": "a", "ok": True})

    with Journal(path) as again:
        assert again.done == {"a"}


def test_a_journal_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    """A folder, or a folder that is not there."""
    for path in (tmp_path, tmp_path / "nowhere" / "x"):
        with pytest.raises(ConfigurationError, match="cannot write"), Journal(path):
            pass
