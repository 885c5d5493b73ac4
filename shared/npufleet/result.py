"""The answer to one request as a caller sees it: numpy arrays and predictions, or a typed error.

Knows nothing of how it came.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from npufleet import tensors
from npufleet.errors import NpufleetError
from npufleet.tensors import Array
from npufleet.wire import Reply


@dataclass(frozen=True, slots=True)
class Result:
    """`outputs` maps names to read-only arrays, `shape[0]` the rows; `timing_ms` names the stages.

    `predictions` has one element per row where the model classifies: its likeliest classes as
    `{"label", "index", "probability"}`. `error` is set in the results of `map` alone; everywhere
    else it is raised.
    """

    id: str
    model: str
    version: int | None = None
    outputs: Mapping[str, Array] = field(default_factory=dict)
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

    @property
    def prediction(self) -> Any:
        """The only element of `predictions`; ValueError unless there is exactly one."""
        if self.predictions is None or len(self.predictions) != 1:
            count = (
                "no predictions" if self.predictions is None else f"{len(self.predictions)} rows"
            )
            raise ValueError(f"a prediction belongs to a single row; this result has {count}")
        return self.predictions[0]

    @property
    def output(self) -> Array:
        """The only element of `outputs`; ValueError unless there is exactly one."""
        if len(self.outputs) != 1:
            raise ValueError(f"choose one of the outputs: {', '.join(self.outputs) or 'none'}")
        return next(iter(self.outputs.values()))


def result_of(reply: Reply) -> Result:
    """The reply with its tensors decoded; they share the reply's memory."""
    return Result(
        id=reply.id,
        model=reply.model,
        version=reply.version,
        outputs={name: tensors.decode(tensor) for name, tensor in reply.outputs.items()},
        predictions=reply.predictions,
        timing_ms=reply.timing_ms,
        batch_size=reply.batch_size,
        gear=reply.gear,
        position=reply.position,
        model_digest=reply.model_digest,
        worker=reply.worker,
        attempt=reply.attempt,
        error=reply.error,
    )
