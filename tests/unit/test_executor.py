"""The executor's loop on a backend that notes what is asked of it, and in which order."""

import numpy as np
import pytest

from npufleet.errors import ModelFailed
from npufleet.signature import TensorSpec
from npufleet.tensors import Array
from npufleet_worker.arena import Arena, Region, Window
from npufleet_worker.backends import Gathering
from npufleet_worker.channel import Channel, Closed, Done, Failed, Message, Run
from npufleet_worker.executor import Loop, warm_up

SPEC = TensorSpec("x", "FP32", (-1, 1))


class Noting:
    """An asynchronous backend: what is staged runs from `launch` to `wait`."""

    def __init__(self, *, fails: str = "", output: str = "y") -> None:
        self.inputs = (SPEC,)
        self.outputs = (TensorSpec("y", "FP32", (-1, 1)),)
        self.gears: tuple[int, ...] = ()
        self.calls: list[str] = []
        self._fails = fails
        self._output = output
        self._rows: dict[int, Array] = {}
        self._names: dict[int, str] = {}

    def stage(self, slot: int, batch: Gathering) -> None:
        self._rows[slot] = np.concatenate(batch.parts["x"])
        self._names[slot] = str(int(self._rows[slot][0, 0]))
        self._note("stage", slot)

    def launch(self, slot: int) -> None:
        self._note("launch", slot)

    def wait(self, slot: int, timeout_s: float) -> None:
        self._note("wait", slot)

    def fetch(self, slot: int) -> dict[str, Array]:
        self._note("fetch", slot)
        return {self._output: self._rows[slot] * 2}

    def close(self) -> None:
        pass

    def _note(self, what: str, slot: int) -> None:
        call = f"{what} {self._names[slot]}"
        self.calls.append(call)
        if call == self._fails:
            raise RuntimeError(call)


def answers(backend: Noting, batches: int) -> list[Message]:
    """What the loop says to that many one-row batches (1, 2, …) that all wait already."""
    arena, region = Arena(4096), Region()
    ours, theirs = Channel.pair()
    theirs.setblocking(True)
    for number in range(1, batches + 1):
        block = arena.allocate(4)
        assert block is not None
        arena.array(block, "<f4", (1,))[0] = number
        ours.send(Run(number, 0, 1, ((1,),), ((1, block.offset),)))
    ours.finish()
    with theirs, pytest.raises(Closed):
        Loop(Channel(theirs), backend, Window(arena.fd), regions=[region]).run()
    said = []
    while True:
        try:
            message = ours.receive(wait=False)
        except Closed:
            break
        assert message is not None
        said.append(message)
    for end in (ours, arena, region):
        end.close()
    return said


def test_the_next_batch_is_launched_before_the_results_of_the_last_are_copied() -> None:
    """Staged while the one before runs: the device waits for neither copy."""
    backend = Noting()
    said = answers(backend, 3)
    assert [message.generation for message in said if isinstance(message, Done)] == [1, 2, 3]
    assert backend.calls == [
        *("stage 1", "launch 1", "stage 2", "wait 1", "launch 2", "fetch 1"),
        *("stage 3", "wait 2", "launch 3", "fetch 2", "wait 3", "fetch 3"),
    ]


@pytest.mark.parametrize("step", ["stage", "launch", "wait", "fetch"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_failure_in_any_step_is_that_batchs_alone(step: str, number: int) -> None:
    """Each batch is answered exactly once, and the others are well."""
    said = answers(Noting(fails=f"{step} {number}"), 3)
    failed = [message for message in said if isinstance(message, Failed)]
    assert failed == [Failed(number, "model_failed", f"RuntimeError: {step} {number}")]
    done = [message.generation for message in said if isinstance(message, Done)]
    assert done == [n for n in (1, 2, 3) if n != number]


def test_an_output_that_is_missing_is_named() -> None:
    """With what the model gave instead."""
    (said,) = answers(Noting(output="z"), 1)
    assert said == Failed(1, "model_failed", "the model gave no output 'y'; it gave 'z'")


class Wide(Noting):
    """Declares FP32 [N, 1], and gives FP64."""

    def fetch(self, slot: int) -> dict[str, Array]:
        return {"y": super().fetch(slot)["y"].astype(np.float64)}


def test_an_output_of_another_dtype_than_declared_is_refused() -> None:
    """Callers have been told what to expect."""
    (said,) = answers(Wide(), 1)
    assert said == Failed(1, "model_failed", "output 'y' is float64; declared is FP32")


def test_warming_up_runs_every_gear_that_the_file_has() -> None:
    """Or the sizes that it is told, where the file takes any; the times come back."""
    backend = Noting()
    backend.gears = (1,)
    assert list(warm_up(backend, (1, 8))) == [1]
    backend.gears = (4,)  # this backend does not pad, so that 1 row comes back of 4
    with pytest.raises(ModelFailed, match="has shape"):
        warm_up(backend, ())
