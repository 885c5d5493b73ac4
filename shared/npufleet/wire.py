"""Version 1 of the wire: stream entries, request bodies and replies, to bytes and back.

`docs/protocol.md` says the same for people without Python, and the tests hold the two together.
Knows nothing of Redis connections, clocks or models.
"""

import contextlib
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from npufleet import keys
from npufleet.errors import (
    InvalidEntry,
    InvalidParameter,
    NpufleetError,
    UnsupportedVersion,
    from_wire,
)
from npufleet.tensors import Buffer

VERSION = 1
INLINE_BODY_BYTES = 64 << 10
"""A body above this goes under `body_key` instead of into the stream."""

MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000
"""The ceiling of a deadline: a week."""

_MAX_NESTING = 32


def new_id() -> str:
    """A random wire id: 128 bits as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def derived_id(tenant: str, caller_id: str) -> str:
    """The wire id of an id that its caller chose: no tenant can meet another's keys."""
    keys.check_id(caller_id)
    return hashlib.sha256(f"{tenant}\0{caller_id}".encode()).hexdigest()[:32]


def digest(body: Buffer) -> str:
    """What tells two bodies under one brought id apart."""
    return hashlib.sha256(body).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Entry:
    """A request entry as it stands in a lane. Exactly one of `body` and `body_key` is set."""

    id: str
    body: bytes | None = None
    body_key: str | None = None
    timeout_ms: int | None = None
    reply_ttl_s: int | None = None
    notify: str | None = None
    tenant: str | None = None
    traceparent: str | None = None
    version: str | None = None
    brought: bool = False
    """The caller chose the id, so that a `seen` key stands for it."""


_TEXTS = ("notify", "tenant", "traceparent", "version")


def entry_fields(entry: Entry) -> list[str | bytes | int]:
    """The flat field-value list that XADD takes; InvalidParameter for text that is no UTF-8."""
    fields: list[str | bytes | int] = ["v", VERSION, "id", entry.id]
    if entry.timeout_ms is not None:
        fields += ("timeout_ms", entry.timeout_ms)
    if entry.reply_ttl_s is not None:
        fields += ("reply_ttl_s", entry.reply_ttl_s)
    for name in _TEXTS:
        value = getattr(entry, name)
        if value is not None:
            fields += (name, _encoded(name, value))
    if entry.brought:
        fields += ("brought", 1)
    if entry.body_key is not None:
        fields += ("body_key", entry.body_key)
    elif entry.body is not None:
        fields += ("body", entry.body)
    return fields


def _encoded(name: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:  # JSON may hold half a character
        raise InvalidParameter(f"{name} cannot be sent: {value[:40]!a}") from None


def parse_entry(fields: Sequence[bytes], *, body_prefix: str) -> Entry:
    """An entry from the flat field-value list that the server answers with.

    Unknown fields are ignored. Raises InvalidEntry, InvalidId or UnsupportedVersion.
    """
    found = dict(zip(fields[::2], fields[1::2], strict=True))
    version = found.get(b"v", b"")
    if version != b"1":
        raise UnsupportedVersion(
            f"wire version {_shown(version)} is not supported; this worker speaks v = {VERSION}"
        )
    if b"id" not in found:
        raise InvalidEntry("the entry has no field 'id'")
    wire_id = keys.check_id(_text(found, "id"))
    body, body_key = found.get(b"body"), None
    if b"body_key" in found:
        body_key = _text(found, "body_key")
        if not body_key.startswith(body_prefix):
            raise InvalidEntry(f"body_key must start with {body_prefix!r}")
    if (body is None) == (body_key is None):
        raise InvalidEntry("an entry has exactly one of the fields 'body' and 'body_key'")
    texts = {name: _text(found, name) for name in _TEXTS if name.encode() in found}
    if "notify" in texts and not keys.is_notify(texts["notify"]):
        raise InvalidEntry("notify must be a name of 1 to 128 characters of A-Z a-z 0-9 _ . -")
    return Entry(
        id=wire_id,
        body=body,
        body_key=body_key,
        timeout_ms=_number(found, "timeout_ms", 1, MAX_TIMEOUT_MS),
        reply_ttl_s=_number(found, "reply_ttl_s", 1, None),
        brought=found.get(b"brought") == b"1",
        **texts,
    )


def usable_id(fields: Sequence[bytes]) -> str | None:
    """The id in an entry that cannot be read otherwise, so that its sender gets to know why."""
    with contextlib.suppress(NpufleetError, KeyError):
        return keys.check_id(_text(dict(zip(fields[::2], fields[1::2], strict=True)), "id"))
    return None


def _text(found: Mapping[bytes, bytes], name: str) -> str:
    try:
        return found[name.encode()].decode()
    except UnicodeDecodeError:
        raise InvalidEntry(f"field {name!r} is not UTF-8 text") from None


def _number(found: Mapping[bytes, bytes], name: str, least: int, ceiling: int | None) -> int | None:
    raw = found.get(name.encode())
    if raw is None:
        return None
    if not raw.isdigit() or len(raw) > 18 or int(raw) < least:
        raise InvalidEntry(f"field {name!r} must be a whole number from {least}, got {_shown(raw)}")
    return int(raw) if ceiling is None else min(int(raw), ceiling)


@dataclass(frozen=True, slots=True)
class Body:
    """A request's content: wire tensors (or `{"image": bytes}`) by input name, and parameters."""

    inputs: Mapping[str, Mapping[str, Any]]
    parameters: Mapping[str, Any] = field(default_factory=dict)


def pack_body(body: Body) -> bytes:
    """The body's bytes; InvalidParameter where a parameter is nothing that msgpack can carry."""
    content: dict[str, Any] = {"inputs": body.inputs}
    if body.parameters:
        content["parameters"] = body.parameters
    try:
        packed: bytes = msgpack.packb(content)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidParameter(f"the parameters cannot be sent: {error}") from None
    return packed


def unpack_body(raw: Buffer) -> Body:
    """The body of an entry; InvalidEntry where it is not msgpack of the right form."""
    content = _unpack(raw, "the body")
    if not isinstance(content, dict) or not isinstance(content.get("inputs"), dict):
        raise InvalidEntry('the body must be a msgpack map {"inputs": {name: tensor}, …}')
    inputs, parameters = content["inputs"], content.get("parameters", {})
    if not all(isinstance(k, str) and isinstance(v, dict) for k, v in inputs.items()):
        raise InvalidEntry("the body's inputs must be a map of names to tensors (maps)")
    if not isinstance(parameters, dict):
        raise InvalidEntry("the body's parameters must be a map")
    if _depth(parameters) > _MAX_NESTING:
        raise InvalidEntry(f"the body's parameters nest deeper than {_MAX_NESTING}")
    return Body(inputs, parameters)


def _unpack(raw: Buffer, what: str) -> Any:
    try:
        return msgpack.unpackb(raw, strict_map_key=True)
    except UnicodeDecodeError:
        raise InvalidEntry(f"{what} holds a msgpack string that is not UTF-8") from None
    except (ValueError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise InvalidEntry(f"{what} is not valid msgpack: {reason[:120]}") from None


def _depth(value: Any, level: int = 0) -> int:
    if level > _MAX_NESTING:
        return level
    if isinstance(value, dict):
        return max((_depth(v, level + 1) for v in value.values()), default=level)
    if isinstance(value, list):
        return max((_depth(v, level + 1) for v in value), default=level)
    return level


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. `error` is None for a right one; `outputs` maps names to wire tensors.

    `batch_size` and `gear` are the rows of the batch, without and with padding; `position` is the
    request's first row in it. `model_digest` tells model files apart.
    """

    id: str
    model: str = ""
    version: int | None = None
    outputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    predictions: Sequence[Any] | None = None
    timing_ms: Mapping[str, float] = field(default_factory=dict)
    batch_size: int | None = None
    gear: int | None = None
    position: int | None = None
    model_digest: str | None = None
    worker: str | None = None
    attempt: int | None = None
    error: NpufleetError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


def pack_reply(reply: Reply) -> bytes:
    content: dict[str, Any] = {"v": VERSION, "id": reply.id, "ok": reply.ok, "model": reply.model}
    optional = {
        "version": reply.version,
        "predictions": reply.predictions,
        "timing_ms": reply.timing_ms or None,
        "batch_size": reply.batch_size,
        "gear": reply.gear,
        "position": reply.position,
        "model_digest": reply.model_digest,
        "worker": reply.worker,
        "attempt": reply.attempt,
    }
    content |= {name: value for name, value in optional.items() if value is not None}
    if reply.error is None:
        content["outputs"] = reply.outputs
    else:
        error = reply.error
        content["error"] = {
            "code": error.code,
            "message": error.message,
            "retryable": error.retryable,
        }
    content["final"] = True
    packed: bytes = msgpack.packb(content)
    return packed


def unpack_reply(raw: Buffer) -> Reply:
    """A reply from its bytes; InvalidEntry where it is none."""
    content = _unpack(raw, "the reply")
    if not isinstance(content, dict):
        raise InvalidEntry("a reply must be a msgpack map")
    return reply_from(content)


def reply_from(content: Mapping[str, Any]) -> Reply:
    """A reply from its unpacked map; InvalidEntry where it is none."""
    wire_id, outputs = content.get("id"), content.get("outputs", {})
    if not isinstance(wire_id, str) or not isinstance(outputs, dict):
        raise InvalidEntry("a reply has a text 'id', and a map 'outputs' where it is right")
    return Reply(
        id=wire_id,
        model=content.get("model", ""),
        version=content.get("version"),
        outputs=outputs,
        predictions=content.get("predictions"),
        timing_ms=content.get("timing_ms", {}),
        batch_size=content.get("batch_size"),
        gear=content.get("gear"),
        position=content.get("position"),
        model_digest=content.get("model_digest"),
        worker=content.get("worker"),
        attempt=content.get("attempt"),
        error=None if content.get("ok") is True else _error_from(content.get("error")),
    )


def _error_from(error: Any) -> NpufleetError:
    if not isinstance(error, dict) or not isinstance(error.get("code"), str):
        raise InvalidEntry("a reply without 'ok' = true has a map 'error' with a text 'code'")
    message, retryable = str(error.get("message", "")), error.get("retryable") is True
    return from_wire(error["code"], message, retryable=retryable)


def _shown(raw: bytes) -> str:
    return repr(raw[:40].decode(errors="replace"))
