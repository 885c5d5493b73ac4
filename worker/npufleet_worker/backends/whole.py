"""A plain `run(inputs) -> outputs` object as a Backend. Knows nothing of what the object does."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from npufleet import tensors
from npufleet.signature import TensorSpec
from npufleet.tensors import Array
from npufleet_worker.backends import SLOTS, Gathering, Runnable


class WholeBackend:
    """Runs the object inside `wait`, so that launching the next batch never delays an answer."""

    def __init__(self, model: Runnable) -> None:
        self._model = model
        self.inputs = tuple(model.inputs)
        self.outputs = tuple(model.outputs)
        self.gears: tuple[int, ...] = tuple(sorted(getattr(model, "gears", ())))
        self._buffers = [{spec.name: _Buffer(spec) for spec in self.inputs} for _ in range(SLOTS)]
        self._staged: list[dict[str, Array]] = [{} for _ in range(SLOTS)]
        self._results: list[Mapping[str, Array]] = [{} for _ in range(SLOTS)]

    def stage(self, slot: int, batch: Gathering) -> None:
        self._results[slot] = {}
        self._staged[slot] = {
            name: buffer.fill(batch.parts[name], batch.rows, batch.gear)
            for name, buffer in self._buffers[slot].items()
        }

    def launch(self, slot: int) -> None:
        pass

    def wait(self, slot: int, timeout_s: float) -> None:
        """A call into plain Python cannot be given up: whoever started this process ends it."""
        self._results[slot] = self._model.run(self._staged[slot])

    def fetch(self, slot: int) -> dict[str, Array]:
        return dict(self._results[slot])

    def close(self) -> None:
        close = getattr(self._model, "close", None)
        if close is not None:
            close()


class _Buffer:
    """The memory of one input in one slot, as large as the largest batch so far."""

    def __init__(self, spec: TensorSpec) -> None:
        self._dtype = np.dtype(tensors.DTYPES[spec.dtype].numpy)
        self._memory = np.empty(0, np.uint8)

    def fill(self, parts: Sequence[Array], rows: int, gear: int) -> Array:
        shape = (gear, *parts[0].shape[1:])
        size = self._dtype.itemsize * math.prod(shape)
        if size > self._memory.nbytes:
            self._memory = np.empty(size, np.uint8)
        array = self._memory[:size].view(self._dtype).reshape(shape)
        np.concatenate(parts, out=array[:rows])
        array[rows:] = array[0]
        return array
