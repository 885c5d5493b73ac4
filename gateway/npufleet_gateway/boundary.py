"""The edge of every request: an id, one form for every error, and the numbers.

Whatever goes wrong behind it, the HTTP library's own refusals included, is answered as
`{"error", "code", "request_id"}`. Knows nothing of what the handlers do.
"""

import logging
import time

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from npufleet import wire
from npufleet.errors import MethodNotAllowed, NpufleetError, RequestError, RouteNotFound
from npufleet_gateway import answers, intake
from npufleet_gateway.metrics import Metrics

log = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
"""Key of the id in a request: made by the boundary, replaced by the one that its caller chose."""

MODEL = web.RequestKey("model", str)
"""Key of the name of the model that a request was for, once it is known to exist."""

_CLIENT_LEFT = "client_left"
_BROKEN_BODY = (web.RequestPayloadError, HttpProcessingError, ClientError)


class Boundary:
    """A middleware of aiohttp, and the answer to `Expect` that comes before any middleware."""

    def __init__(self, metrics: Metrics, *, max_bytes: int) -> None:
        self._metrics = metrics
        self._max_bytes = max_bytes

    def middleware(self) -> Middleware:
        @web.middleware
        async def boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._handle(request, handler)

        return boundary

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answers `Expect: 100-continue`: go on, or 413 before the client sends the body."""
        if request.headers["Expect"].lower() != "100-continue":
            error: NpufleetError = RequestError("the only Expect understood is 100-continue")
            return error_response(error, request_id=wire.new_id())
        try:
            intake.refuse_size(request, self._max_bytes)
        except NpufleetError as error:
            return error_response(error, request_id=wire.new_id())
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun
        return None

    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        started_s = time.perf_counter()
        request[REQUEST_ID] = wire.new_id()
        code = _CLIENT_LEFT
        try:
            response = await handler(request)
            code = "ok"
            return response
        except ConnectionError:
            raise  # nobody is there to be answered
        except Exception as problem:  # noqa: BLE001  # the edge of a request: one form for all
            error = self._translated(problem, request)
            code = error.code
            response = error_response(error, request_id=request[REQUEST_ID])
            if isinstance(problem, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = problem.headers["Allow"]
            if isinstance(problem, _BROKEN_BODY):
                _give_up_connection(request, response)
            return response
        finally:
            if request.method == "POST":
                self._metrics.answered(
                    model=request.get(MODEL, ""),
                    code=code,
                    seconds=time.perf_counter() - started_s,
                )

    def _translated(self, problem: Exception, request: web.Request) -> NpufleetError:
        """The error of our tree for whatever a handler or the HTTP library raised."""
        match problem:
            case NpufleetError():
                return problem
            case web.HTTPRequestEntityTooLarge():
                return intake.too_large(self._max_bytes, got="more")
            case web.HTTPNotFound():
                return RouteNotFound(f"nothing is at {request.path[:80]}; GET / names what is")
            case web.HTTPMethodNotAllowed():
                allowed = ", ".join(sorted(problem.allowed_methods))
                return MethodNotAllowed(
                    f"{request.path[:80]} takes {allowed}, not {request.method}"
                )
            case problem if isinstance(problem, _BROKEN_BODY):
                reason = (str(problem) or type(problem).__name__).splitlines()[-1].strip()
                return RequestError(f"the body cannot be read: {reason[:120]}")
            case web.HTTPException() if problem.status < 500:
                return RequestError(problem.reason)
        log.error(
            "a request failed unexpectedly",
            exc_info=problem,
            extra={"request_id": request[REQUEST_ID], "path": request.path},
        )
        return NpufleetError("an internal error; the gateway's log has it under this request_id")


def _give_up_connection(request: web.Request, response: web.Response) -> None:
    """End a connection in order whose next request cannot be found after a broken body."""
    response.force_close()
    # Else the library reads on, fails again and logs a traceback that any client can cause.
    request.content.feed_eof()


def error_response(error: NpufleetError, *, request_id: str) -> web.Response:
    retry_after = answers.retry_after(error)
    return web.Response(
        status=error.status,
        body=answers.error_document(error, request_id=request_id),
        content_type="application/json",
        headers={
            "X-Request-Id": request_id,
            **({"Retry-After": retry_after} if retry_after else {}),
        },
    )
