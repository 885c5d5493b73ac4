"""How long a device takes for a batch, by its rows, as it was measured.

Pure: figures come in, and draws from them go out. Knows nothing of processes or clocks.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

AGREEING = 3
"""Windows in a row that must agree before what they measured counts."""

_QUANTILES = 200


@dataclass(frozen=True, slots=True)
class GearTime:
    """What was measured of one batch size: milliseconds per batch, with a full queue.

    `spread` is that of the windows' means, largest over smallest minus one; where the windows
    never agreed the figure is not `settled`, and nothing may be decided by it.
    """

    gear: int
    samples_ms: tuple[float, ...]
    spread: float
    settled: bool = True

    @property
    def mean_ms(self) -> float:
        return sum(self.samples_ms) / len(self.samples_ms)

    @property
    def rows_per_s(self) -> float:
        return self.gear / self.mean_ms * 1000


@dataclass(frozen=True, slots=True)
class Fit:
    """t(n) = fixed_ms + row_ms * n: what any batch takes, and what each row adds."""

    fixed_ms: float
    row_ms: float


class Profile:
    """The settled times of a model, smallest batch first; at least one."""

    def __init__(self, times: Sequence[GearTime]) -> None:
        self.times = tuple(sorted(times, key=lambda time: time.gear))
        self._gears = [time.gear for time in self.times]
        self._means = [time.mean_ms for time in self.times]
        self._draws: dict[int, list[float]] = {}

    @property
    def best_rows_per_s(self) -> float:
        """The throughput of the best gear."""
        return self.capacity(self._gears[-1])

    def capacity(self, max_batch_size: int) -> float:
        """Rows per second at most, where batches have no more rows than that."""
        return max(time.rows_per_s for time in self.times if time.gear <= max_batch_size)

    def mean_ms(self, rows: int) -> float:
        """Of a batch of `rows`; between two that were measured, on the line between them."""
        return float(np.interp(rows, self._gears, self._means))

    def draw_ms(self, rows: int, dice: random.Random) -> float:
        """One time that a batch of `rows` may take: as the next larger size varied."""
        draws = self._draws.get(rows)
        if draws is None:
            draws = self._draws[rows] = self._spread_of(rows)
        return draws[int(dice.random() * len(draws))]

    def fit(self) -> Fit | None:
        """The straight line nearest to all times in proportion; None with fewer than two.

        It never falls: where larger batches seem quicker, only noise was measured.
        """
        if len(self.times) < 2:
            return None
        weights = 1 / np.asarray(self._means)
        row_ms, fixed_ms = np.polyfit(self._gears, self._means, 1, w=weights)
        if row_ms < 0:
            row_ms, fixed_ms = 0.0, np.average(self._means, weights=weights**2)
        return Fit(float(fixed_ms), float(row_ms))

    def _spread_of(self, rows: int) -> list[float]:
        at = int(np.searchsorted(self._gears, rows))
        near = self.times[min(at, len(self.times) - 1)]
        scale = self.mean_ms(rows) / near.mean_ms
        return [sample * scale for sample in near.samples_ms]


class Windows:
    """The measuring windows of one gear, and whether the last of them agree."""

    def __init__(self, agreement: float) -> None:
        self._agreement = agreement
        self._windows: list[list[float]] = []

    def add(self, samples_ms: list[float]) -> bool:
        """Take a window; whether the last three agree now."""
        self._windows = [*self._windows, samples_ms][-AGREEING:]
        return len(self._windows) == AGREEING and self.spread <= self._agreement

    @property
    def spread(self) -> float:
        means = [sum(window) / len(window) for window in self._windows]
        return max(means) / min(means) - 1

    def time(self, gear: int, *, settled: bool) -> GearTime:
        """What the last windows say. Their quantiles stand for what may be very many samples."""
        samples = np.concatenate(self._windows)
        if len(samples) > _QUANTILES:
            samples = np.quantile(samples, (np.arange(_QUANTILES) + 0.5) / _QUANTILES)
        return GearTime(gear, tuple(map(float, samples)), self.spread, settled)
