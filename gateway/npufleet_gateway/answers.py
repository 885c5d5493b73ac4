"""A worker's reply, to what a caller of HTTP gets: a JSON document or raw bytes.

Tensors are only viewed, never computed with. Knows nothing of requests or HTTP libraries.
"""

import base64
import math
from collections.abc import Mapping
from typing import Any

import orjson

from npufleet import tensors
from npufleet.errors import NotAcceptable, NpufleetError
from npufleet.signature import Signature
from npufleet.wire import Reply


def document(reply: Reply, *, request_id: str, one_row: bool, latency_ms: float) -> bytes:
    """The JSON of a right answer. NaN and infinite values become null, as JSON has none.

    `predictions` has one element per row; `one_row` gives that single element as `prediction`.
    """
    rows = reply.predictions if reply.predictions is not None else _rows(reply.outputs)
    return orjson.dumps(
        {
            "request_id": request_id,
            "model": reply.model,
            "version": reply.version,
            **({"prediction": rows[0]} if one_row else {"predictions": rows}),
            "latency_ms": round(latency_ms, 3),
            "timing_ms": reply.timing_ms,
            "batch_size": reply.batch_size,
            "gear": reply.gear,
            "position": reply.position,
            "model_digest": reply.model_digest,
            "worker": reply.worker,
            "attempt": reply.attempt,
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def refuse_raw(signature: Signature) -> None:
    """NotAcceptable for a model whose answer is more than one tensor, before it is asked."""
    if len(signature.outputs) != 1:
        names = ", ".join(spec.name for spec in signature.outputs)
        raise NotAcceptable(
            f"application/octet-stream answers a single output; {signature.model} has: {names}"
        )


def raw(reply: Reply) -> tuple[bytes, dict[str, str]]:
    """The bytes of the only output, and the headers that say what they are."""
    if len(reply.outputs) != 1:
        raise NotAcceptable(
            f"application/octet-stream answers a single tensor; {reply.model} answered "
            f"{len(reply.outputs)}: ask for application/json"
        )
    ((name, tensor),) = reply.outputs.items()
    headers = {
        "X-Model": reply.model,
        "X-Model-Version": str(reply.version),
        "X-Tensor-Name": name,
        "X-Tensor-Dtype": tensor["dtype"],
        "X-Tensor-Shape": ",".join(map(str, tensor["shape"])),
    }
    return tensor["data"], headers


def error_document(error: NpufleetError, *, request_id: str) -> bytes:
    return orjson.dumps({"error": error.message, "code": error.code, "request_id": request_id})


def retry_after(error: NpufleetError) -> str | None:
    """The value of Retry-After: whole seconds, at least one, where trying again may help."""
    if error.retry_after_s is not None:
        return str(max(1, math.ceil(error.retry_after_s)))
    return "1" if error.status in (429, 503) else None


def _rows(outputs: Mapping[str, Mapping[str, Any]]) -> Any:
    """One element per row: the row itself for one output, a map by output name for several."""
    arrays = {name: _listed(tensor) for name, tensor in outputs.items()}
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    count = min(map(len, arrays.values()), default=0)
    return [{name: rows[at] for name, rows in arrays.items()} for at in range(count)]


def _listed(tensor: Mapping[str, Any]) -> Any:
    array = tensors.decode(tensor)
    if tensor["dtype"] != tensors.BYTES:
        return array
    for at, item in enumerate(array.flat):
        array.flat[at] = _text(item)
    return array.tolist()


def _text(raw_item: bytes) -> str | dict[str, str]:
    """An element of BYTES: text where it is UTF-8, else an object with its base64."""
    try:
        return raw_item.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw_item).decode()}
