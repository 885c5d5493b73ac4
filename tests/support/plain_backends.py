"""Backends for tests, run inside real executor processes: what a row says is what they do.

Named as `tests.support.plain_backends:Obedient` in the settings of a model; the executor finds
this module by PYTHONPATH.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from npufleet.signature import TensorSpec
from npufleet.tensors import Array
from npufleet_worker.channel import Channel, Done

HOLD, FAIL, DIE, SHORT, MEMORY, STALE = range(100, 106)
"""First values of a row that make the batch misbehave."""

STALE_GENERATION = 0


class Obedient:
    """x FP32 [N, 2] -> y = 2 * x, unless a row starts with one of the commands above.

    HOLD touches `started` beside the model file and waits for `go` there.
    """

    inputs = (TensorSpec("x", "FP32", (-1, 2)),)
    outputs = (TensorSpec("y", "FP32", (-1, 2)),)

    def __init__(self, path: Path, *, threads: int) -> None:
        self._folder = path.parent

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        x = inputs["x"]
        actions = {
            HOLD: self._hold,
            FAIL: _fail,
            DIE: lambda: os.kill(os.getpid(), signal.SIGKILL),
            MEMORY: _out_of_memory,
            STALE: _answer_an_old_batch,
        }
        for command in x[:, 0].tolist():
            if command in actions:
                actions[command]()
        return {"y": x[: 1 if SHORT in x[:, 0] and len(x) > 1 else None] * 2}

    def _hold(self) -> None:
        (self._folder / "started").touch()
        end = time.monotonic() + 30
        while not (self._folder / "go").exists() and time.monotonic() < end:
            time.sleep(0.005)


class Refusing:
    """Cannot be loaded, and prints why before it says so."""

    def __init__(self, path: Path, *, threads: int) -> None:
        print("driver: device 7 is on fire", flush=True)
        raise RuntimeError("no device")


class Crashing:
    """Takes its process with it while it loads."""

    def __init__(self, path: Path, *, threads: int) -> None:
        print("about to crash", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)


class Endless:
    """Never finishes loading."""

    def __init__(self, path: Path, *, threads: int) -> None:
        print("still compiling", flush=True)
        time.sleep(600)


class Stubborn(Obedient):
    """Loads, and then never ends by itself."""

    def close(self) -> None:
        (self._folder / "closing").touch()
        time.sleep(600)


def _fail() -> None:
    raise RuntimeError("no such luck")


def _out_of_memory() -> None:
    np.empty(1 << 60, np.uint8)


def _answer_an_old_batch() -> None:
    end = socket.socket(fileno=os.dup(int(sys.argv[2])))
    Channel(end).send(Done(STALE_GENERATION, (), 0, 1.0))
