"""The process that owns a device: loads one model version and runs the batches it is told to.

    python -m npufleet_worker.executor PARENT CONTROL ARENA REGION...     (a pid, then descriptors)

It ends with its supervisor: at the end of the control stream, or by the kernel when the supervisor
is killed. Knows nothing of requests, Redis, settings or logs; one batch may wait while one runs.
"""

import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NoReturn

import numpy as np

from npufleet import tensors
from npufleet.errors import ModelFailed, NpufleetError
from npufleet.signature import TensorSpec, shape_text
from npufleet.tensors import Array
from npufleet.tether import tether
from npufleet_worker.arena import Region, Window, aligned
from npufleet_worker.backends import SLOTS, Backend, Gathering, open_backend
from npufleet_worker.channel import (
    Channel,
    Closed,
    Done,
    Failed,
    Load,
    Output,
    Ready,
    Refused,
    Run,
)

RUN_LIMIT_S = 600.0
"""What a backend that can tell the time allows one run; the supervisor's own limit is shorter."""

_MESSAGE_CHARACTERS = 4000
_WARM_UP_INNER = 1
"""What warming up takes for an inner dimension that the model leaves open."""


@dataclass(slots=True)
class _Batch:
    message: Run
    slot: int
    launched_s: float = 0.0
    execute_ms: float = 0.0


class Loop:
    """Takes Run messages and answers each with Done or Failed.

    The next batch is staged while one runs where it has come by then, and launched before the
    results of that one are copied, so that the device never waits for a copy.
    """

    def __init__(
        self, channel: Channel, backend: Backend, window: Window, *, regions: list[Region]
    ) -> None:
        self._channel = channel
        self._backend = backend
        self._window = window
        self._regions = regions
        self._dtypes = [np.dtype(tensors.DTYPES[spec.dtype].numpy) for spec in backend.inputs]
        self._slot = 0

    def run(self) -> NoReturn:
        """Until the supervisor has closed its end (then Closed), what it sent before included."""
        current: _Batch | None = None
        while True:
            if current is None and (taken := self._take(wait=True)):
                current = self._after(self._launch, taken)
            if current is None:
                continue
            following = self._take(wait=False)
            ran = self._after(self._wait, current)
            # What came during the run has not been staged: the device waits for that, and for
            # nothing more.
            following = following or self._take(wait=False)
            if following:
                following = self._after(self._launch, following)
            if ran:
                self._after(self._answer, ran)
            current = following

    def _take(self, *, wait: bool) -> _Batch | None:
        """The next batch, staged; None when there is none, or when it has failed."""
        try:
            message = self._channel.receive(wait=wait)
        except Closed:
            if wait:
                raise
            return None  # what is running is answered first; then it closes again
        if not isinstance(message, Run):
            return None
        self._slot = (self._slot + 1) % SLOTS
        return self._after(self._stage, _Batch(message, self._slot))

    def _after(self, step: Callable[[_Batch], None], batch: _Batch) -> _Batch | None:
        """The batch after this step; None when it has failed in it, which is then answered."""
        try:
            step(batch)
        except Closed:
            raise
        except Exception as error:  # noqa: BLE001 - edge of the batch: it fails, and no other
            code = error.code if isinstance(error, NpufleetError) else ModelFailed.code
            self._channel.send(Failed(batch.message.generation, code, _sentence(error)))
            return None
        return batch

    def _stage(self, batch: _Batch) -> None:
        self._backend.stage(batch.slot, self._gathering(batch.message))

    def _launch(self, batch: _Batch) -> None:
        batch.launched_s = time.monotonic()
        self._backend.launch(batch.slot)

    def _wait(self, batch: _Batch) -> None:
        self._backend.wait(batch.slot, RUN_LIMIT_S)
        batch.execute_ms = (time.monotonic() - batch.launched_s) * 1000

    def _answer(self, batch: _Batch) -> None:
        """Write the outputs without their padding to the batch's region, and say so."""
        outputs, message = self._backend.fetch(batch.slot), batch.message
        arrays = {
            spec.name: _valid(spec, outputs, rows=message.rows, gear=message.gear)
            for spec in self._backend.outputs
        }
        offsets = list(accumulate((aligned(a.nbytes) for a in arrays.values()), initial=0))
        size = offsets.pop()
        region = self._regions[message.region]
        region.grow(size)
        stored = []
        for offset, (name, array) in zip(offsets, arrays.items(), strict=True):
            dtype = tensors.dtype_of(array.dtype)
            target = region.array(offset, tensors.DTYPES[dtype].numpy, array.shape)
            np.copyto(target, array)
            stored.append(Output(name, dtype, array.shape, offset))
        self._channel.send(Done(message.generation, tuple(stored), size, batch.execute_ms))

    def _gathering(self, message: Run) -> Gathering:
        """The rows of the batch where the supervisor has put them."""
        parts = {}
        array = self._window.array
        for at, spec in enumerate(self._backend.inputs):
            dtype, inner = self._dtypes[at], message.shapes[at]
            parts[spec.name] = [
                array(request[1 + at], dtype, (request[0], *inner)) for request in message.requests
            ]
        return Gathering(message.rows, message.gear, parts)


def warm_up(backend: Backend, sizes: tuple[int, ...]) -> dict[int, float]:
    """Run each batch size twice on zeros; the milliseconds of the second run, by size.

    The first run allocates and compiles. Models whose inputs leave inner dimensions open may
    refuse the small ones tried here: that says nothing about real requests.
    """
    times: dict[int, float] = {}
    open_inner = any(size < 0 for spec in backend.inputs for size in spec.row_shape)
    for gear in backend.gears or sizes:
        batch = Gathering(1, gear, {spec.name: [_zeros(spec)] for spec in backend.inputs})
        try:
            for _ in range(2):
                started_s = time.monotonic()
                backend.stage(0, batch)
                backend.launch(0)
                backend.wait(0, RUN_LIMIT_S)
                times[gear] = (time.monotonic() - started_s) * 1000
                outputs = backend.fetch(0)
            for spec in backend.outputs:
                _valid(spec, outputs, rows=1, gear=gear)
        except Exception:
            if not open_inner:
                raise
            traceback.print_exc()
            return {}
    return times


def _zeros(spec: TensorSpec) -> Array:
    inner = (size if size >= 0 else _WARM_UP_INNER for size in spec.row_shape)
    return np.zeros((1, *inner), tensors.DTYPES[spec.dtype].numpy)


def _valid(spec: TensorSpec, outputs: Mapping[str, Array], *, rows: int, gear: int) -> Array:
    """The rows of the batch of one output; ModelFailed where it is not what the model declared."""
    if spec.name not in outputs:
        given = ", ".join(map(repr, outputs))
        raise ModelFailed(f"the model gave no output {spec.name!r}; it gave {given}")
    array = np.asarray(outputs[spec.name])
    wanted = (gear, *spec.row_shape)
    fits = array.ndim == len(wanted) and all(
        want in (-1, got) for want, got in zip(wanted, array.shape, strict=True)
    )
    if not fits:
        raise ModelFailed(
            f"output {spec.name!r} has shape {list(array.shape)} for a batch of {gear} rows: "
            f"declared is {shape_text(spec.shape)}, the first axis being the batch"
        )
    if tensors.dtype_of(array.dtype) != spec.dtype:
        raise ModelFailed(f"output {spec.name!r} is {array.dtype}; declared is {spec.dtype}")
    return array[:rows]


def _sentence(error: Exception) -> str:
    ours = isinstance(error, NpufleetError)
    return (str(error) if ours else f"{type(error).__name__}: {error}")[:_MESSAGE_CHARACTERS]


def _load(channel: Channel) -> Backend | None:
    """Load, warm up and say so; None when the model has been refused."""
    message = channel.receive(wait=True)
    assert isinstance(message, Load)
    try:
        backend = open_backend(Path(message.path), backend=message.backend, threads=message.threads)
        times = warm_up(backend, message.warm_up)
    except Exception as error:  # noqa: BLE001 - edge of the process: a backend may be anybody's
        if not isinstance(error, NpufleetError):
            traceback.print_exc()
        channel.send(Refused(_sentence(error)))
        return None
    channel.send(Ready(backend.inputs, backend.outputs, backend.gears, tuple(times.items())))
    return backend


def main(arguments: list[str]) -> int:
    """0 after an orderly end, 1 when the model was refused."""
    parent, control, arena, *regions = map(int, arguments)
    tether(parent, signal.SIGKILL)
    # Ctrl-C and a stopping service reach the whole group: the supervisor decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=control))
    try:
        backend = _load(channel)
        if backend is None:
            return 1
        loop = Loop(channel, backend, Window(arena), regions=[Region(fd) for fd in regions])
        try:
            loop.run()
        finally:
            backend.close()
    except Closed:
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
