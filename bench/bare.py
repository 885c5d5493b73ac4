"""The limit: the bare backend in this process, one batch after the other, nothing around it.

Knows nothing of servers or requests.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from npufleet_worker.backends import Gathering, open_backend

_WARM_UPS = 3
_RUN_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class BareRate:
    """Rows a second at full speed, and what each cost: CPU us of this process, ms of a run."""

    rate_s: float
    cpu_us: float
    run_ms: float


def measure(model: Path, *, batch: int, threads: int, seconds: float) -> BareRate:
    """Run full batches of random rows for so long."""
    backend = open_backend(model, threads=threads)
    shape = (batch, *backend.inputs[0].row_shape)
    rows = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    gathering = Gathering(batch, batch, {backend.inputs[0].name: [rows]})

    def run() -> None:
        backend.stage(0, gathering)
        backend.launch(0)
        backend.wait(0, _RUN_LIMIT_S)
        backend.fetch(0)

    for _ in range(_WARM_UPS):
        run()
    runs, begun_s, used_s = 0, time.monotonic(), time.process_time()
    while (wall_s := time.monotonic() - begun_s) < seconds:
        run()
        runs += 1
    used_s = time.process_time() - used_s
    backend.close()
    items = runs * batch
    return BareRate(items / wall_s, 1e6 * used_s / items, 1e3 * wall_s / runs)
