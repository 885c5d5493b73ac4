"""What batching could reach at best: a device that takes whatever waits the moment it is free.

Pure. Knows nothing of npufleet: it is what a measured open loop is held against.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median


@dataclass(frozen=True, slots=True)
class Ideal:
    """Median latency and mean batch over all requests."""

    p50_ms: float
    mean_batch: float


def greedy(arrivals_s: Iterable[float], *, run_s: float, max_batch: int) -> Ideal:
    """No request waits while the device is free; no time passes but that of the runs.

    `mean_batch` is over batches. ValueError without arrivals.
    """
    waiting = deque(arrivals_s)
    if not waiting:
        raise ValueError("there are no arrivals")
    free_s, latencies_s, batches = 0.0, [], []
    while waiting:
        start_s = max(free_s, waiting[0])
        free_s = start_s + run_s
        rows = 0
        while waiting and waiting[0] <= start_s and rows < max_batch:
            latencies_s.append(free_s - waiting.popleft())
            rows += 1
        batches.append(rows)
    return Ideal(median(latencies_s) * 1000, fmean(batches))
