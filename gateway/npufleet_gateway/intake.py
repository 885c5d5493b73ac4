"""Reads the body of an HTTP request within its bounds, and makes a Question of it.

Size is refused from the Content-Length header before a byte is read, and counted where there is
none. Knows nothing of models or of the queue.
"""

import asyncio

from aiohttp import BodyPartReader, web

from npufleet.errors import InvalidParameter, PayloadTooLarge, RequestError
from npufleet_gateway import documents
from npufleet_gateway.documents import Question

BODY_LIMIT_S = 60.0
"""How long a client may take to send its body."""

_MAX_PARTS = 16


def refuse_size(request: web.Request, max_bytes: int) -> None:
    """PayloadTooLarge where the header already says so."""
    length = request.content_length
    if length is not None and length > max_bytes:
        raise too_large(max_bytes, got=f"{length} bytes")


def too_large(max_bytes: int, *, got: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"a request body may have {max_bytes} bytes, got {got}")


async def question(request: web.Request, *, max_bytes: int) -> Question:
    """The question in a request, of any supported content type."""
    refuse_size(request, max_bytes)
    media_type = _media_type(request)
    if request.content.is_eof() and media_type != documents.FORM:
        # It came along with the header, as small ones do: nothing to wait for, nothing to limit.
        return documents.from_body(media_type, await request.read(), request.query)
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            if media_type == documents.FORM:
                parts = await _form(request, max_bytes)
                return documents.from_form(parts, request.query)
            body = await request.read()
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {BODY_LIMIT_S:.0f} s") from None
    return documents.from_body(media_type, body, request.query)


def _media_type(request: web.Request) -> str | None:
    """The content type without its parameters; None where the client sent none."""
    header = request.headers.get("Content-Type")
    return header.partition(";")[0].strip().lower() if header else None


async def _form(request: web.Request, max_bytes: int) -> dict[str, bytes]:
    parts: dict[str, bytes] = {}
    size = 0
    try:
        reader = await request.multipart()
        while (part := await reader.next()) is not None:
            if not isinstance(part, BodyPartReader) or part.name is None:
                raise InvalidParameter("every part of the form must be a field with a name")
            if part.name in parts or len(parts) == _MAX_PARTS:
                raise InvalidParameter(
                    f"the form has field {part.name[:60]!r} twice"
                    if part.name in parts
                    else f"the form has more than {_MAX_PARTS} fields"
                )
            parts[part.name] = bytes(await part.read())
            size += len(parts[part.name])
            if size > max_bytes:
                raise too_large(max_bytes, got="more")
    except (ValueError, AssertionError) as error:  # what aiohttp raises on a form it cannot read
        raise RequestError(f"the form cannot be read: {str(error)[:120]}") from None
    return parts
