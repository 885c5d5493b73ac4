"""The bytes of HTTP requests in each wire that some server speaks, and the check of its answers.

`raw` is the row's little-endian float32 both ways; `json` npufleet's own document; `oip` the Open
Inference Protocol's JSON, `oipb64` the same with the row as one base64 element, `oipbin` its binary
extension (Triton); `nested` is {"x": [[…]]} answered by [[…]] (BentoML). Knows nothing of sockets.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from npufleet.tensors import Array

WIRES = ("raw", "json", "oip", "oipb64", "oipbin", "nested")

_OCTETS = "application/octet-stream"
_JSON = "application/json"
_REMEMBERED = 200


def requests(url: str, rows: Sequence[Array], wire: str) -> list[bytes]:
    """A complete HTTP request for each row."""
    to = urlsplit(url)
    made = []
    for number, row in enumerate(rows):
        body, lines = _body(row, number, wire)
        head = [
            f"POST {to.path} HTTP/1.1",
            f"Host: {to.netloc}",
            *lines,
            f"Content-Length: {len(body)}",
        ]
        made.append("\r\n".join([*head, "", ""]).encode() + body)
    return made


def _body(row: Array, number: int, wire: str) -> tuple[bytes, list[str]]:
    if wire == "raw":
        return row.tobytes(), [f"Content-Type: {_OCTETS}", f"Accept: {_OCTETS}"]
    if wire == "oipbin":
        data = row.tobytes()
        tensor = _tensor(row, parameters={"binary_data_size": len(data)})
        outputs = [{"name": "y", "parameters": {"binary_data": True}}]
        meta = json.dumps({"id": str(number), "inputs": [tensor], "outputs": outputs}).encode()
        lines = [f"Content-Type: {_OCTETS}", f"Inference-Header-Content-Length: {len(meta)}"]
        return meta + data, lines
    return json.dumps(_document(row, number, wire)).encode(), [f"Content-Type: {_JSON}"]


def _document(row: Array, number: int, wire: str) -> dict[str, Any]:
    # float32 needs no more digits, and nobody sends more
    numbers = [float(f"{value:.7g}") for value in row.ravel().tolist()]
    if wire == "nested":
        return {"x": [numbers]}
    if wire == "json":
        return {"inputs": {"x": [np.reshape(numbers, row.shape).tolist()]}}
    if wire == "oip":
        return {"id": str(number), "inputs": [_tensor(row, data=numbers)]}
    text = base64.b64encode(row.tobytes()).decode()
    tensor = {"name": "x", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
    return {"id": str(number), "inputs": [tensor | {"parameters": {"content_type": "base64"}}]}


def _tensor(row: Array, **more: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [1, *row.shape], "datatype": "FP32", **more}


def values(body: bytes, wire: str, head: bytes = b"") -> Array:
    """The numbers of an answer, flat; raises what reading a wrong one raises."""
    if wire == "raw":
        return np.frombuffer(body, "<f4")
    if wire == "oipbin":
        length = head.lower().split(b"inference-header-content-length:")[1].split(b"\r\n")[0]
        return np.frombuffer(body[int(length) :], "<f4")
    document = json.loads(body)
    if wire == "json":
        document = document["predictions"]
    elif wire != "nested":
        document = document["outputs"][0]["data"]
    return np.array(document, np.float32).ravel()


class Checker:
    """Compares answers with the expected outputs.

    Bodies that were right are remembered, so that a check costs a look-up: ONNX Runtime's last bits
    differ with the batch size, but take few values.
    """

    def __init__(self, expected: Array, wire: str) -> None:
        self._expected = [row.ravel() for row in expected]
        self._wire = wire
        self._tolerance = 1e-3 * max(1.0, float(np.abs(expected).max()))
        self._right: list[set[bytes]] = [set() for _ in expected]

    def __call__(self, number: int, body: bytes, head: bytes = b"") -> bool:
        telling = _telling(body) if self._wire == "json" else body
        if telling in self._right[number]:
            return True
        try:
            found = values(body, self._wire, head)
        except (ValueError, KeyError, IndexError, TypeError):
            return False
        right = self.near(number, found)
        if right and len(self._right[number]) < _REMEMBERED:
            self._right[number].add(telling)
        return right

    def near(self, number: int, found: Array) -> bool:
        """Whether these are the numbers of the row."""
        expected = self._expected[number]
        return found.size == expected.size and bool(
            np.allclose(found, expected, rtol=0, atol=self._tolerance)
        )


def _telling(body: bytes) -> bytes:
    """The part of npufleet's document that the row decides: ids and times differ always."""
    return body[body.find(b'"predictions"') : body.find(b'"latency_ms"')] or body
