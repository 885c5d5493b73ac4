"""How much one worker holds: batches handed to an executor, rows taken off the lanes. Pure: the
clock (monotonic seconds) is passed in.

What is held here is not served by another worker, and what is urgent waits behind it: so no more
than keeps the device busy. Knows nothing of requests, lanes' names or executors.
"""

import math

from npufleet_worker.backends import SLOTS

UNDER_WAY = SLOTS + 1
"""Batches that an executor takes at most: one running, one staged, one in the pipe."""

_WORK_AHEAD_MS = 5.0
_BATCHES_MOST = 8
_SHORT_RUN_MS = 20.0
"""Below this the time that staging takes shows in the device's idle share."""

_LANE_MEMORY_S = 10.0
"""How long a lane counts as in use after a request of it."""

_SMOOTHING = 0.2


class Budget:
    """What one model version is worth holding, from how long its batches run."""

    def __init__(self) -> None:
        self._run_ms = 0.0
        self._lanes_seen_s: dict[int, float] = {}

    def ran(self, run_ms: float) -> None:
        """A batch has run for so long."""
        self._run_ms += _SMOOTHING * (run_ms - self._run_ms)

    def saw(self, lane: int, now_s: float) -> None:
        """A request of that lane has come."""
        self._lanes_seen_s[lane] = now_s

    def batches(self, now_s: float) -> int:
        """Batches worth handing to one executor at once, the running one included.

        The one ahead can be staged during a run only if it is in the pipe when that run begins,
        which the answer to the run before comes too late for: short runs get one batch more. Not
        where several lanes are in use: what is urgent would wait for that batch, too.
        """
        lanes = sum(seen_s > now_s - _LANE_MEMORY_S for seen_s in self._lanes_seen_s.values())
        short = 0 < self._run_ms < _SHORT_RUN_MS
        return UNDER_WAY if short and lanes < 2 else SLOTS

    def rows(self, max_batch_size: int, now_s: float) -> int:
        """Rows worth holding for one executor: such batches, or 5 ms of work where that is more."""
        batches = float(self.batches(now_s))
        if self._run_ms > 0:
            batches = max(batches, _WORK_AHEAD_MS / self._run_ms)
        return math.ceil(min(batches, _BATCHES_MOST)) * max_batch_size
