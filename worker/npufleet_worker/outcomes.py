"""What a batch came to, request by request: outputs cut to rows, predictions, timings, replies.

Knows nothing of Redis calls, executors or queues.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from npufleet import tensors, wire
from npufleet.signature import Signature
from npufleet.tensors import Array
from npufleet.wire import Reply
from npufleet_worker.classification import Classification, classify
from npufleet_worker.held import Held
from npufleet_worker.publisher import Outcome


@dataclass(frozen=True, slots=True)
class Ran:
    """The batch that a request ran in: its rows, those with padding, and the request's first one.

    Times are monotonic seconds from the launch to the end, `execute_ms` is the run alone.
    """

    batch_rows: int
    gear: int
    position: int
    launched_s: float
    done_s: float
    execute_ms: float

    def spans_ms(self, held: Held, *, decoded_s: float) -> dict[str, float]:
        """The reply's `timing_ms`: disjoint spans since the entry was added."""
        spans = {
            "queued": held.taken_s - held.arrival_s,
            "decoded": decoded_s - held.taken_s,
            "batched": self.launched_s - decoded_s,
            "device": self.done_s - self.launched_s,
        }
        rounded = {name: round(max(0.0, span) * 1000, 3) for name, span in spans.items()}
        return {**rounded, "executed": round(self.execute_ms, 3)}


class Answers:
    """Turns the outputs of batches of one model version into replies."""

    def __init__(
        self,
        signature: Signature,
        classification: Classification | None,
        *,
        worker: str,
        model_digest: str | None,
    ) -> None:
        self._signature = signature
        self._classification = classification
        self._worker = worker
        self._model_digest = model_digest
        self._scores = signature.outputs[0].name
        if classification is not None and classification.output is not None:
            self._scores = classification.output

    def success(
        self,
        held: Held,
        outputs: Mapping[str, Array],
        *,
        decoded_s: float,
        ran: Ran,
    ) -> Outcome:
        """The outcome of one request; `outputs` are its own rows."""
        predictions = None
        if self._classification is not None:
            classes = self._classification
            predictions = classify(outputs[self._scores], classes.labels, classes.top_k)
        reply = Reply(
            id=held.wire_id,
            model=self._signature.model,
            version=self._signature.version,
            outputs={name: tensors.encode(array) for name, array in outputs.items()},
            predictions=predictions,
            timing_ms=ran.spans_ms(held, decoded_s=decoded_s),
            batch_size=ran.batch_rows,
            gear=ran.gear,
            position=ran.position,
            model_digest=self._model_digest,
            worker=self._worker,
            attempt=held.deliveries,
        )
        return Outcome(held, wire.pack_reply(reply))
