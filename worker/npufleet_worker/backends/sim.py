"""A simulated device: gives every row back as it came, after a + b * gear milliseconds.

Its time passes without the host's CPU, so that a machine with two cores can stand for a fleet of
NPUs; what is measured is everything around the device. A file `model.sim` is TOML:

    a_ms = 5.0               # what any run takes
    b_ms = 0.2               # what each row of the gear adds
    shape = [16]             # of one row; default: one number
    dtype = "FP32"           # the default
    gears = [1, 8, 32]       # default: any batch size
    log = "/tmp/runs.log"    # for benchmarks: one line per run, appended; default: none

A line of the log is `pid start end rows gear`, the times being monotonic seconds, so that the share
in which the device was busy and the gaps between its runs can be told exactly. Knows nothing of
real devices.
"""

import ctypes
import os
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npufleet.errors import ConfigurationError
from npufleet.signature import TensorSpec
from npufleet.tensors import DTYPES, Array
from npufleet_worker.backends import SLOTS, Gathering

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1

_Size = Annotated[int, Field(ge=1)]


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    a_ms: Annotated[float, Field(ge=0, le=60_000)]
    b_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    shape: tuple[_Size, ...] = (1,)
    dtype: str = "FP32"
    gears: tuple[_Size, ...] = ()
    log: Path | None = None


@dataclass(slots=True)
class _Run:
    rows: int
    array: Array
    start_s: float = 0.0
    end_s: float = 0.0


class SimulatedDevice:
    """One run at a time, started by `launch` and over at its time whoever waits for it.

    Raises ConfigurationError for a file that is not as above.
    """

    def __init__(self, path: Path, *, threads: int) -> None:
        file = _read(path)
        self.inputs = (TensorSpec("x", file.dtype, (-1, *file.shape)),)
        self.outputs = (TensorSpec("y", file.dtype, (-1, *file.shape)),)
        self.gears = tuple(sorted(file.gears))
        self._a_s, self._b_s = file.a_ms / 1000, file.b_ms / 1000
        self._runs: list[_Run | None] = [None] * SLOTS
        self._log: int | None = None
        if file.log is not None:
            self._log = os.open(file.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        _wake_on_time()

    def stage(self, slot: int, batch: Gathering) -> None:
        rows = np.concatenate(batch.parts["x"])
        padding = np.repeat(rows[:1], batch.gear - batch.rows, axis=0)
        self._runs[slot] = _Run(batch.rows, np.concatenate((rows, padding)))

    def launch(self, slot: int) -> None:
        run = self._staged(slot)
        run.start_s = time.monotonic()
        run.end_s = run.start_s + self._a_s + self._b_s * len(run.array)

    def wait(self, slot: int, timeout_s: float) -> None:
        left_s = self._staged(slot).end_s - time.monotonic()
        if left_s > timeout_s:
            time.sleep(timeout_s)
            raise TimeoutError(f"the simulated run takes {left_s - timeout_s:.3f} s more")
        if left_s > 0:
            time.sleep(left_s)

    def fetch(self, slot: int) -> dict[str, Array]:
        run = self._staged(slot)
        # Here, since the next run has been launched by now: writing delays nothing that is timed.
        self._note(run)
        return {"y": run.array}

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _staged(self, slot: int) -> _Run:
        run = self._runs[slot]
        if run is None:
            raise RuntimeError(f"nothing is staged in slot {slot}")
        return run

    def _note(self, run: _Run) -> None:
        if self._log is not None:
            line = f"{os.getpid()} {run.start_s:.6f} {run.end_s:.6f} {run.rows} {len(run.array)}\n"
            os.write(self._log, line.encode())


def _read(path: Path) -> _File:
    try:
        file = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{path} is not a simulated model: {error}") from None
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)
        )
        raise ConfigurationError(f"{path}: {wrong}") from None
    if file.dtype not in DTYPES:
        raise ConfigurationError(f"{path}: dtype is one of {', '.join(DTYPES)}; got {file.dtype!r}")
    return file


def _wake_on_time() -> None:
    """Have the kernel end this thread's sleeps when they are over, rather than 50 us later.

    Where there is no such call, the simulated device is a little late to notice its own end.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
