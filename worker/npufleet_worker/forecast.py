"""What is likely to happen next, from what has: rows that come, callers that come again, run times.

Pure: the clock (monotonic seconds) is always passed in. Knows nothing of batches and when they go.
"""

import bisect
import math
from collections import deque

_RATE_WINDOW_S = 1.0
SMOOTHING = 0.2
"""The weight of the newest measurement in a mean."""

_PATIENCE = 2.0
ECHO_PART = 0.25
"""Of a batch's fixed cost, the part that is spent on waiting for callers to come back."""

_ECHO_LEAST = 0.6
"""The part of the answered rows that must have come back so far; by chance it is a quarter."""


class Arrivals:
    """How soon the next row is likely to come."""

    def __init__(self) -> None:
        self._level = 0.0
        self._level_at_s = 0.0
        self._sign_of_life_s = -math.inf
        self._expected: deque[float] = deque()
        self._decode_s = 0.0

    def came(self, rows: int, now_s: float) -> None:
        self._level = self._faded(now_s) + rows
        self._level_at_s = self._sign_of_life_s = now_s

    def expect(self, now_s: float) -> None:
        self._expected.append(now_s)
        self._sign_of_life_s = now_s

    def unexpect(self, now_s: float) -> None:
        # Which of them it was does not matter to the mean.
        took_s = now_s - self._expected.popleft()
        self._decode_s += SMOOTHING * (took_s - self._decode_s)

    def worth_waiting_until_s(self, rows: int, run_s: float) -> float:
        """Until when `rows` that could run for `run_s` should wait; in the past: not at all."""
        wait_s = self._next_in_s()
        if (rows + 1) * wait_s >= run_s:
            return -math.inf
        return self._sign_of_life_s + _PATIENCE * wait_s

    def _next_in_s(self) -> float:
        """As it looked at the last sign of life: a time that stands still until the next one."""
        level = self._faded(self._sign_of_life_s)
        by_rate_s = _RATE_WINDOW_S / level if level else math.inf
        by_decode_s = self._decode_s / len(self._expected) if self._expected else math.inf
        return min(by_rate_s, by_decode_s)

    def _faded(self, now_s: float) -> float:
        """Rows of the last second or so."""
        if not self._level:
            return 0.0
        return self._level * math.exp((self._level_at_s - now_s) / _RATE_WINDOW_S)


class Echo:
    """Whether the callers that are answered come again at once, and how many are still to come."""

    def __init__(self) -> None:
        self._part = 0.0
        self._rows = 0
        self._came = 0
        self._until_s = -math.inf

    def answered(self, rows: int, now_s: float, *, within_s: float) -> None:
        if self._rows:
            part = min(1.0, self._came / self._rows)
            self._part += SMOOTHING * (part - self._part)
        self._rows, self._came, self._until_s = rows, 0, now_s + within_s

    def came(self, rows: int, now_s: float) -> None:
        if now_s <= self._until_s:
            self._came += rows

    def worth_waiting_until_s(self) -> float:
        """Until when to wait for those that come again; in the past: not at all."""
        missing = round(self._part * self._rows) - self._came
        if self._part < _ECHO_LEAST or missing < 1:
            return -math.inf
        return self._until_s


class RunTimes:
    """How long a batch is likely to run, by its rows; 0 before the first has been observed."""

    def __init__(self) -> None:
        self._by_rows: dict[int, float] = {}
        self._sizes: list[int] = []

    def observe(self, rows: int, run_s: float) -> None:
        if rows not in self._by_rows:
            bisect.insort(self._sizes, rows)
        before_s = self._by_rows.get(rows, run_s)
        self._by_rows[rows] = before_s + SMOOTHING * (run_s - before_s)

    def expected_s(self, rows: int) -> float:
        """Of the next larger size that has been seen, or of the largest."""
        if not self._sizes:
            return 0.0
        place = bisect.bisect_left(self._sizes, rows)
        return self._by_rows[self._sizes[min(place, len(self._sizes) - 1)]]

    def fixed_s(self) -> float:
        """What a batch takes whatever its rows: by a line through the smallest and largest size."""
        if len(self._sizes) < 2:
            return 0.0
        least, most = self._sizes[0], self._sizes[-1]
        row_s = (self._by_rows[most] - self._by_rows[least]) / (most - least)
        return max(0.0, self._by_rows[least] - row_s * least)
