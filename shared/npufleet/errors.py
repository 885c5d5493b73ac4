"""Every error of npufleet, each with its stable wire code and HTTP status.

The whole tree (code, status):

    NpufleetError                    internal                500
    ├── RequestError                 bad_request             400   the caller's fault
    │   ├── InvalidJson              invalid_json            400
    │   ├── InvalidBase64            invalid_base64          400
    │   ├── InvalidImage             invalid_image           400
    │   ├── InvalidInput             invalid_input           400   names: missing, unknown, none
    │   ├── InvalidDtype             invalid_dtype           400
    │   ├── InvalidShape             invalid_shape           400
    │   ├── InvalidData              invalid_data            400   data against dtype and shape
    │   ├── InvalidId                invalid_id              400
    │   ├── InvalidParameter         invalid_parameter       400
    │   ├── UnknownField             unknown_field           400
    │   ├── InvalidEntry             invalid_entry           400   cannot be read
    │   ├── UnsupportedVersion       unsupported_version     400   the wire version
    │   ├── ModelNotFound            model_not_found         404
    │   ├── VersionUnavailable       version_unavailable     404   the model's version
    │   ├── RouteNotFound            not_found               404
    │   ├── MethodNotAllowed         method_not_allowed      405
    │   ├── NotAcceptable            not_acceptable          406
    │   ├── IdConflict               id_conflict             409   a brought id with another body
    │   ├── PayloadTooLarge          payload_too_large       413
    │   └── UnsupportedMediaType     unsupported_media_type  415
    ├── Overloaded                   queue_full              429   too many are waiting
    ├── Cancelled                    cancelled               499
    ├── ModelFailed                  model_failed            500   or its device
    ├── BodyMissing                  body_missing            500   nothing under body_key
    ├── Unavailable                  unavailable             503   Redis is away, or full
    │   └── NoWorkers                no_workers              503
    ├── DeadlineExceeded             deadline_exceeded       504
    ├── ConfigurationError           configuration           500   never on the wire
    └── ConnectionLost               connection_lost         503   outcome not known

Knows nothing of HTTP libraries, Redis or msgpack.
"""

from collections.abc import Iterator
from typing import ClassVar


class NpufleetError(Exception):
    """Base of all: `message` is a sentence for people, `code` a stable word for programs."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class RequestError(NpufleetError):
    """The caller's fault: sending the same again gives the same error."""

    code = "bad_request"
    status = 400


class InvalidJson(RequestError):
    code = "invalid_json"


class InvalidBase64(RequestError):
    code = "invalid_base64"


class InvalidImage(RequestError):
    code = "invalid_image"


class InvalidInput(RequestError):
    code = "invalid_input"


class InvalidDtype(RequestError):
    code = "invalid_dtype"


class InvalidShape(RequestError):
    code = "invalid_shape"


class InvalidData(RequestError):
    code = "invalid_data"


class InvalidId(RequestError):
    code = "invalid_id"


class InvalidParameter(RequestError):
    code = "invalid_parameter"


class UnknownField(RequestError):
    code = "unknown_field"


class InvalidEntry(RequestError):
    code = "invalid_entry"


class UnsupportedVersion(RequestError):
    code = "unsupported_version"


class ModelNotFound(RequestError):
    code = "model_not_found"
    status = 404


class VersionUnavailable(RequestError):
    code = "version_unavailable"
    status = 404


class RouteNotFound(RequestError):
    code = "not_found"
    status = 404


class MethodNotAllowed(RequestError):
    code = "method_not_allowed"
    status = 405


class NotAcceptable(RequestError):
    code = "not_acceptable"
    status = 406


class IdConflict(RequestError):
    code = "id_conflict"
    status = 409


class PayloadTooLarge(RequestError):
    code = "payload_too_large"
    status = 413


class UnsupportedMediaType(RequestError):
    code = "unsupported_media_type"
    status = 415


class Overloaded(NpufleetError):
    code = "queue_full"
    status = 429
    retryable = True


class Cancelled(NpufleetError):
    code = "cancelled"
    status = 499


class ModelFailed(NpufleetError):
    code = "model_failed"


class BodyMissing(NpufleetError):
    code = "body_missing"


class Unavailable(NpufleetError):
    code = "unavailable"
    status = 503
    retryable = True


class NoWorkers(Unavailable):
    code = "no_workers"


class DeadlineExceeded(NpufleetError):
    code = "deadline_exceeded"
    status = 504
    retryable = True


class ConfigurationError(NpufleetError):
    code = "configuration"


class ConnectionLost(NpufleetError):
    """The connection went while a call was under way: whether it ran is not known."""

    code = "connection_lost"
    status = 503
    retryable = True


class RemoteError(NpufleetError):
    """A reply's error whose code this release does not know; `code` is the wire's own word."""

    def __init__(self, code: str, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # the instance carries what the wire said
        self.retryable = retryable  # type: ignore[misc]  # likewise


def _walk(cls: type[NpufleetError]) -> Iterator[type[NpufleetError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _walk(child)


BY_CODE: dict[str, type[NpufleetError]] = {
    cls.code: cls for cls in _walk(NpufleetError) if cls is not RemoteError
}


def from_wire(code: str, message: str, *, retryable: bool = False) -> NpufleetError:
    """The error that a reply names, typed where this release knows the code."""
    cls = BY_CODE.get(code)
    return cls(message) if cls else RemoteError(code, message, retryable=retryable)
