"""A request body of each supported content type, to a Question: content, options, parameters.

Pure: bytes and fields in, a Question or a RequestError out. Knows nothing of HTTP libraries, of
which models exist or of how a body is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from npufleet.errors import (
    InvalidData,
    InvalidJson,
    InvalidParameter,
    InvalidShape,
    UnknownField,
    UnsupportedMediaType,
)
from npufleet.tensors import check_shape
from npufleet_gateway import fields, options, values
from npufleet_gateway.contents import Content, JsonValues, Picture, RawBytes
from npufleet_gateway.options import Options

JSON = "application/json"
RAW = "application/octet-stream"
FORM = "multipart/form-data"
IMAGES = ("image/jpeg", "image/jpg", "image/png", "image/webp", "image/bmp")
SUPPORTED = f"{JSON}, {RAW}, {FORM}, image/jpeg, image/png, image/webp or image/bmp"

_JSON_FIELDS = (*options.NAMES, "image_base64", "inputs", "parameters")
_FORM_FIELDS = ("image", *options.NAMES)
_QUERY_FIELDS = (*options.NAMES, "shape")
_MAX_PARAMETERS = 64
_MAX_BRACKETS = 1 << 20
"""Lists and objects in one document: each costs 60 bytes and more for the two that were sent."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request as its caller put it, before it is known whether any model can answer it."""

    content: Content
    options: Options
    parameters: Mapping[str, Any] = field(default_factory=dict)


def from_body(media_type: str | None, body: bytes, query: Mapping[str, str]) -> Question:
    """The question in a whole body of any type but a form."""
    if media_type == JSON:
        refuse_query(query)
        return from_json(body)
    if media_type == RAW:
        return from_raw(body, query)
    if media_type in IMAGES:
        return from_image(body, query)
    hint = ""
    if media_type == "application/x-www-form-urlencoded" and body.lstrip().startswith(b"{"):
        hint = "; the body looks like JSON: add -H 'Content-Type: application/json'"
    got = fields.shown(media_type) if media_type else "none"
    raise UnsupportedMediaType(f"the Content-Type must be {SUPPORTED}; got {got}{hint}")


def from_json(body: bytes) -> Question:
    document = _parsed(body)
    fields.refuse_unknown(document, _JSON_FIELDS, where="the request")
    if ("image_base64" in document) == ("inputs" in document):
        raise InvalidParameter("give exactly one of image_base64 and inputs")
    content: Content
    if "image_base64" in document:
        content = Picture(values.image(document["image_base64"], "image_base64")["image"])
    else:
        content = JsonValues(document["inputs"], booleans=b"true" in body or b"false" in body)
    return Question(content, Options.of(document), _parameters(document.get("parameters")))


def from_image(body: bytes, query: Mapping[str, str]) -> Question:
    fields.refuse_unknown(query, options.NAMES, where="the query string")
    return Question(Picture(body), Options.of(query))


def from_raw(body: bytes, query: Mapping[str, str]) -> Question:
    fields.refuse_unknown(query, _QUERY_FIELDS, where="the query string")
    shape = _shape(query["shape"]) if "shape" in query else None
    return Question(RawBytes(body, shape), Options.of(query))


def from_form(parts: Mapping[str, bytes], query: Mapping[str, str]) -> Question:
    """The question in the parts of a form, by name."""
    refuse_query(query)
    fields.refuse_unknown(parts, _FORM_FIELDS, where="the form")
    if "image" not in parts:
        raise InvalidParameter("the form has no field 'image': curl -F image=@photo.jpg")
    texts = {name: _text(name, raw) for name, raw in parts.items() if name != "image"}
    return Question(Picture(parts["image"]), Options.of(texts))


def refuse_query(query: Mapping[str, str]) -> None:
    """Options beside a JSON document or a form would be ignored in silence: refused instead."""
    for name in query:
        raise UnknownField(
            f"the query string has {fields.shown(name)}, but the options of this content type "
            "stand in the body"
        )


def _parsed(body: bytes) -> dict[str, Any]:
    if not body:
        raise InvalidJson("the body is empty; expected a JSON object")
    if body.count(b"[") + body.count(b"{") > _MAX_BRACKETS:
        raise InvalidJson(f"the document has more than {_MAX_BRACKETS} lists and objects")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidJson(f"the body is not valid JSON: {_reason(error)}") from None
    if not isinstance(document, dict):
        raise InvalidJson(f"the body must be a JSON object, got {fields.shown(document)}")
    return document


def _reason(error: orjson.JSONDecodeError) -> str:
    # What orjson says, by version, of a document that nests deeper than its limit
    if any(word in error.msg for word in ("depth", "recursion", "allocate")):
        return f"it nests too deep (character {error.pos})"
    return str(error)


def _parameters(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > _MAX_PARAMETERS:
        raise InvalidParameter(
            f"parameters must be an object of at most {_MAX_PARAMETERS} members, "
            f"got {fields.shown(value)}"
        )
    for name, item in value.items():
        if not isinstance(item, str | int | float):  # bool is an int to Python
            raise InvalidParameter(
                f"parameters: {fields.shown(name)} must be text, a number, true or false, "
                f"got {fields.shown(item)}"
            )
    return value


def _shape(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) <= 18 for word in words):
        raise InvalidShape(
            f"shape must be whole numbers with commas, such as 2,3; got {fields.shown(text)}"
        )
    return check_shape([int(word) for word in words], "shape")


def _text(name: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InvalidData(f"the form's field {name!r} is not UTF-8 text") from None
