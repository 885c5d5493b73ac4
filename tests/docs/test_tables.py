"""The tables in docs/ say what the code says."""

import dataclasses
import re
import tomllib
from pathlib import Path

from npufleet import errors, wire
from npufleet.keys import MAX_ID_LENGTH, FleetKeys
from npufleet.tensors import DTYPES, MAX_RANK
from npufleet_worker.repository import load_model
from tests.docs.examples import ROOT, blocks

PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")

HTTP_ONLY = {
    "bad_request",
    "configuration",
    "invalid_base64",
    "invalid_json",
    "method_not_allowed",
    "not_acceptable",
    "not_found",
    "unknown_field",
    "unsupported_media_type",
}
"""Codes that neither a worker nor the client gives."""


def section(title: str) -> str:
    return PROTOCOL.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_table_of_errors_is_the_error_tree() -> None:
    """Every code that a producer can meet, with its status and whether to try again."""
    table = {row[0].strip("`"): row for row in rows(section("Errors"))}

    assert set(table) == set(errors.BY_CODE) - HTTP_ONLY
    for code, (_, status, _, again) in table.items():
        cls = errors.BY_CODE[code]
        assert int(status) == cls.status, code
        assert (again != "no") == cls.retryable, code


def test_the_table_of_entry_fields_is_what_the_worker_reads() -> None:
    """No field more, no field less."""
    named = [re.findall(r"`(\w+)`", row[0])[0] for row in rows(section("The entry"))]

    assert sorted(named) == sorted(["v", *(f.name for f in dataclasses.fields(wire.Entry))])
    assert f"1 to {MAX_ID_LENGTH} of" in section("The entry")


def test_the_table_of_reply_keys_is_what_the_worker_writes() -> None:
    """The fields of a reply, and those that only the bytes have."""
    named = {key for row in rows(section("The reply")) for key in re.findall(r"`(\w+)`", row[0])}

    assert named == {"v", "ok", "final", *(f.name for f in dataclasses.fields(wire.Reply))}


def test_the_table_of_keys_is_what_the_code_uses() -> None:
    """Spelt the same."""
    keys = FleetKeys("npufleet").model("m")
    table = section("Keys")

    for key in (keys.lanes[0], keys.reply("<id>"), keys.body("<id>"), keys.seen("<id>")):
        assert f"`{key}`" in table
    for key in (keys.cancelled, keys.dead, keys.signature, keys.workers):
        assert f"`{key}`" in table
    for key in (FleetKeys("npufleet").models, FleetKeys("npufleet").notify("<name>")):
        assert f"`{key}`" in table


def test_the_dtypes_and_limits_are_those_of_the_code() -> None:
    """What the section on bodies promises."""
    body = section("The body")

    assert f"`{' '.join([*DTYPES, 'BYTES'])}`" in body
    assert f"1 to {MAX_RANK} integers" in body
    assert wire.INLINE_BODY_BYTES == 64 << 10
    assert "64 KB" in body or "64 KB" in section("The entry")


def test_the_model_toml_of_the_documentation_is_accepted(tmp_path: Path) -> None:
    """All its keys exist."""
    [example] = blocks("docs/models.md", "toml")
    folder = tmp_path / "example"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").touch()
    (folder / "model.toml").write_text(example, encoding="utf-8")
    (folder / "labels.txt").write_text("cat\ndog\n", encoding="utf-8")

    config = load_model(folder)

    assert config.batching.gears == tuple(tomllib.loads(example)["batching"]["gears"])
