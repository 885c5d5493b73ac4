"""The handler of inference: a question in, submitted, awaited, the answer out.

Knows nothing of the forms that questions and answers have, nor of how the queue works.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from npufleet import wire
from npufleet.errors import InvalidParameter, ModelNotFound, NoWorkers
from npufleet.exchange import Exchange
from npufleet.registry import ModelState, Registry
from npufleet.wire import Entry, Reply
from npufleet_gateway import answers, contents, documents, intake
from npufleet_gateway.admission import Admission
from npufleet_gateway.boundary import MODEL, REQUEST_ID
from npufleet_gateway.documents import Question
from npufleet_gateway.metrics import Metrics

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_NO_WORKERS_RETRY_S = 2.0
"""The registry is read this often, so that asking sooner gets the same answer."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the settings say of a request: the largest body and the life of a reply."""

    max_bytes: int
    reply_ttl_s: int


class Inference:
    """Answers `POST /v1/infer` and `POST /v1/models/{model}/infer`."""

    def __init__(
        self,
        exchange: Exchange,
        registry: Registry,
        *,
        admission: Admission,
        metrics: Metrics,
        terms: Terms,
    ) -> None:
        self._exchange = exchange
        self._registry = registry
        self._admission = admission
        self._metrics = metrics
        self._terms = terms

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Raises an error of npufleet's tree, for the boundary to answer."""
        with self._admission.held():
            self._metrics.in_flight(self._admission.in_flight)
            try:
                return await self._answer(request)
            finally:
                self._metrics.in_flight(self._admission.in_flight - 1)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        started_s = time.perf_counter()
        question = await intake.question(request, max_bytes=self._terms.max_bytes)
        if question.options.request_id is not None:
            request[REQUEST_ID] = question.options.request_id
        state = await self._asked(question, request.match_info.get("model"))
        signature = state.signature
        request[MODEL] = signature.model
        as_raw = documents.RAW in request.headers.get("Accept", "")
        if as_raw:
            answers.refuse_raw(signature)
        body, one_row = contents.packed_body(question.content, signature, question.parameters)
        if not state.workers:
            raise NoWorkers(
                f"no worker serves {signature.model} now", retry_after_s=_NO_WORKERS_RETRY_S
            )
        timeout_ms = question.options.timeout_ms or signature.limits.timeout_ms
        refusal = state.refusal(question.options.lane, timeout_ms=timeout_ms)
        if refusal is not None:
            raise refusal
        entry = self._entry(request, question, body=body, timeout_ms=timeout_ms)
        self._metrics.queued(model=signature.model, size_bytes=len(body))
        reply = await self._exchange.infer(
            signature, entry, lane=question.options.lane, timeout_s=timeout_ms / 1000
        )
        try:
            if reply.error is not None:
                raise reply.error
            response = _response(reply, request[REQUEST_ID], as_raw, one_row, started_s)
            await response.prepare(request)
            await response.write_eof()
            return response
        finally:
            # Also where it was an error, or where the client has left while it was written.
            if not entry.brought:
                self._exchange.answered(signature.model, entry.id)

    async def _asked(self, question: Question, path_model: str | None) -> ModelState:
        """The state of the model that was named, or of the only one that can be meant."""
        model = question.options.model_or(path_model)
        if model is not None:
            return await self._registry.get(model)
        states = await self._registry.all()
        if not states:
            raise ModelNotFound("there is no model yet: no worker has registered one")
        meant = list(states.values())
        if len(meant) > 1 and question.content.is_image:
            meant = [state for state in meant if state.signature.image_input is not None]
        if len(meant) != 1:
            raise InvalidParameter(f"name a model; models: {', '.join(sorted(states))}")
        return meant[0]

    def _entry(
        self, request: web.Request, question: Question, *, body: bytes, timeout_ms: int
    ) -> Entry:
        options = question.options
        brought = options.request_id is not None
        return Entry(
            id=wire.derived_id("", request[REQUEST_ID]) if brought else request[REQUEST_ID],
            body=body,
            timeout_ms=timeout_ms,
            reply_ttl_s=self._terms.reply_ttl_s,
            notify=self._exchange.name,
            traceparent=_traceparent(request.headers),
            version=options.version,
            brought=brought,
        )


def _response(
    reply: Reply, request_id: str, as_raw: bool, one_row: bool, started_s: float
) -> web.Response:
    latency_ms = (time.perf_counter() - started_s) * 1000
    headers = {"X-Request-Id": request_id}
    if as_raw:
        body, described = answers.raw(reply)
        return web.Response(body=body, content_type=documents.RAW, headers=headers | described)
    body = answers.document(reply, request_id=request_id, one_row=one_row, latency_ms=latency_ms)
    return web.Response(body=body, content_type=documents.JSON, headers=headers)


def _traceparent(headers: Mapping[str, str]) -> str | None:
    """The caller's trace context, where it is well formed; one that is not is none."""
    value = headers.get("traceparent")
    return value if value is not None and _TRACEPARENT.fullmatch(value) else None
