"""The golden vectors, read by npufleet and by a decoder that shares no code with it."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from npufleet import wire

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "v1.json").read_text(encoding="utf-8")
)


def of(kind: str) -> pytest.MarkDecorator:
    chosen = [v for v in VECTORS if v["kind"] == kind]
    return pytest.mark.parametrize("vector", chosen, ids=[v["name"] for v in chosen])


NUMBER_FORMS = (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q")  # from 0xca
SIZES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


class Decoder:
    """msgpack by the book: https://github.com/msgpack/msgpack/blob/master/spec.md."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def take(self, size: int) -> bytes:
        part = self.raw[self.at : self.at + size]
        assert len(part) == size, "cut short"
        self.at += size
        return part

    def size(self, code: int) -> int:
        return int.from_bytes(self.take(SIZES[code]), "big")

    def value(self) -> Any:
        code = self.take(1)[0]
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code < 0x90 or code in (0xDE, 0xDF):
            size = code & 15 if code < 0x90 else self.size(code)
            return {self.value(): self.value() for _ in range(size)}
        if code < 0xA0 or code in (0xDC, 0xDD):
            size = code & 15 if code < 0xA0 else self.size(code)
            return [self.value() for _ in range(size)]
        if code < 0xC0 or code in (0xD9, 0xDA, 0xDB):
            return self.take(code & 31 if code < 0xC0 else self.size(code)).decode()
        if code in (0xC4, 0xC5, 0xC6):
            return self.take(self.size(code))
        if 0xCA <= code <= 0xD3:
            form = NUMBER_FORMS[code - 0xCA]
            return struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return {0xC0: None, 0xC2: False, 0xC3: True}[code]


def decoded(raw: bytes) -> Any:
    decoder = Decoder(raw)
    value = decoder.value()
    assert decoder.at == len(raw), "bytes left over"
    return value


def meant(value: Any) -> Any:
    """The vector's JSON with its binaries."""
    if isinstance(value, dict):
        if set(value) == {"$bin"}:
            return bytes.fromhex(value["$bin"])
        return {key: meant(item) for key, item in value.items()}
    return [meant(item) for item in value] if isinstance(value, list) else value


@of("body")
def test_a_body_reads_the_same_for_everybody(vector: dict[str, Any]) -> None:
    """By the book, by npufleet, and again after npufleet wrote it."""
    raw, meaning = bytes.fromhex(vector["hex"]), meant(vector["meaning"])
    body = wire.unpack_body(raw)

    assert decoded(raw) == meaning
    assert body == wire.Body(meaning["inputs"], meaning.get("parameters", {}))
    assert decoded(wire.pack_body(body)) == meaning


@of("reply")
def test_a_reply_reads_the_same_for_everybody(vector: dict[str, Any]) -> None:
    """Nothing that the vector holds is lost in what npufleet writes, but unknown fields."""
    raw, meaning = bytes.fromhex(vector["hex"]), meant(vector["meaning"])
    reply = wire.unpack_reply(raw)
    written = decoded(wire.pack_reply(reply))

    assert decoded(raw) == meaning
    assert written == {key: value for key, value in meaning.items() if key in written}
    assert set(meaning) - set(written) <= {"later"}
    if reply.error is not None:
        assert reply.error.code == meaning["error"]["code"]


@of("entry")
def test_an_entry_reads_as_the_vector_says(vector: dict[str, Any]) -> None:
    """Flat fields as XRANGE shows them."""
    fields = [f if isinstance(f, bytes) else f.encode() for f in meant(vector["fields"])]

    entry = wire.parse_entry(fields, body_prefix="npufleet:{double}:body:")

    assert entry == wire.Entry(**meant(vector["meaning"]))
    known = [p for p in zip(fields[::2], fields[1::2], strict=True) if p[0] != b"later"]
    written = [f if isinstance(f, bytes) else str(f).encode() for f in wire.entry_fields(entry)]
    assert written == [part for pair in known for part in pair]


@of("id")
def test_a_brought_id_becomes_the_same_wire_id_for_everybody(vector: dict[str, Any]) -> None:
    """The first 16 bytes of SHA-256 over tenant, zero byte, id."""
    assert wire.derived_id(vector["tenant"], vector["caller_id"]) == vector["meaning"]
