"""What clients see when the process that runs the model is killed under load, and what is left.

Knows nothing of how a server is started.
"""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from bench.measuring import Bench
from bench.peers.serving import RunningPeer, marked

_MODEL_LIBRARY = "onnxruntime_pybind11"


def kill_under_load(
    bench: Bench, running: RunningPeer, case: str, pair: int, *, vectors: Path, clients: int
) -> None:
    """Two rows: a load in the middle of which the busiest model process dies, and one after it.

    What failed or was lost is the first row's `wrong` and `unfinished`.
    """
    load = bench.load(running.url, vectors, wire=running.wire, clients=clients)
    timer = threading.Timer(load.warm_up_s + load.seconds / 2, _kill_busiest, [running])
    timer.start()
    try:
        for when in ("killed meanwhile", "afterwards"):
            bench.measure(
                running.peer.name, f"{case}, {when}", pair, load=load, roles=running.roles()
            )
    finally:
        timer.cancel()


def _kill_busiest(running: RunningPeer) -> None:
    found = []
    for process in marked(running.mark):
        with suppress(psutil.Error, OSError):
            if _MODEL_LIBRARY in Path(f"/proc/{process.pid}/maps").read_text():
                found.append((sum(process.cpu_times()[:2]), process.pid))
    if found:
        with suppress(ProcessLookupError):
            os.kill(max(found)[1], signal.SIGKILL)
