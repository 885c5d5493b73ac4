"""Whether a row's answer depends on its batch: on gear, position, neighbours or padding.

The comparisons are pure; `examine` runs the batches. Knows nothing of files, tables or devices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from npufleet.tensors import Array
from npufleet_worker.decoder import Request
from npufleet_worker.lab.trial import Trial


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What is as good as equal: |got - wanted| <= absolute + relative * |wanted|."""

    relative: float = 1e-4
    absolute: float = 1e-5


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest differences of some numbers from those wanted.

    `relative` counts only where the wanted number is larger than the absolute tolerance; `outside`
    counts the numbers beyond the tolerance. Both NaN, or the same infinity, is no difference;
    NaN against a number is an infinite one.
    """

    absolute: float = 0.0
    relative: float = 0.0
    outside: int = 0

    def __or__(self, other: "Difference") -> "Difference":
        return Difference(
            max(self.absolute, other.absolute),
            max(self.relative, other.relative),
            self.outside + other.outside,
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """One output in one gear.

    `alone` is against the row alone in the smallest gear, over every position and both sets of
    neighbours; `neighbours` between these sets; `padding` the row alone in this gear against a
    full batch. `compared` counts rows, `not_finite` the NaN and infinities among their numbers.
    """

    gear: int
    output: str
    compared: int
    alone: Difference
    neighbours: Difference
    padding: Difference
    not_finite: int

    @property
    def good(self) -> bool:
        """Whether all of it is within the tolerance."""
        return not (self.alone.outside or self.neighbours.outside or self.padding.outside)


def difference(got: Array, wanted: Array, tolerance: Tolerance) -> Difference:
    """How far the numbers are from each other; shapes that differ are infinitely far."""
    if got.shape != wanted.shape:
        return Difference(math.inf, math.inf, max(got.size, wanted.size))
    if np.array_equal(got, wanted) or not got.size:
        return Difference()
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        away = np.where(same, 0.0, np.abs(a - b))
        away[np.isnan(away)] = math.inf
        size = np.abs(b)
        allowed = tolerance.absolute + tolerance.relative * np.where(np.isfinite(size), size, 0)
        counted = np.isfinite(size) & (size > tolerance.absolute)
        relative = np.divide(away, size, out=np.zeros_like(away), where=counted)
    return Difference(float(away.max()), float(relative.max()), int((away > allowed).sum()))


def runs(gears: Sequence[int], rows: int) -> int:
    """How many batches `examine` runs for so many rows."""
    return rows + len(gears) * 3 * rows


async def examine(
    trial: Trial,
    rows: Sequence[Request],
    *,
    tolerance: Tolerance,
    advance: Callable[[str], None],
) -> list[Finding]:
    """Every row in every position of every gear, beside two sets of neighbours, and padded.

    `advance` is called after each batch with a word on what is done. Raises ModelFailed where a
    batch fails.
    """
    alone = []
    for row in rows:
        alone.append(await trial.run([row], trial.gears[0]))
        advance("each row alone")
    return [
        finding
        for gear in trial.gears
        for finding in await _one_gear(
            trial, rows, alone=alone, gear=gear, tolerance=tolerance, advance=advance
        )
    ]


async def _one_gear(
    trial: Trial,
    rows: Sequence[Request],
    *,
    alone: Sequence[dict[str, Array]],
    gear: int,
    tolerance: Tolerance,
    advance: Callable[[str], None],
) -> list[Finding]:
    tallies = {name: _Tally(name, gear, tolerance) for name in alone[0]}
    for at, row in enumerate(rows):
        first, second = _orders(len(rows), gear, at)
        one = await trial.run([rows[i] for i in first], gear)
        advance(f"gear {gear}")
        other = await trial.run([rows[i] for i in second], gear)
        advance(f"gear {gear}")
        padded = await trial.run([row], gear)
        advance(f"gear {gear}")
        for name, tally in tallies.items():
            wanted = [answer[name][0] for answer in alone]
            tally.batch(one[name], [wanted[i] for i in first])
            tally.batch(other[name], [wanted[i] for i in second])
            tally.neighbours(one[name][::2], other[name][::2])
            tally.padding(padded[name][0], one[name][0], wanted[at])
    return [tally.finding() for tally in tallies.values()]


def _orders(rows: int, gear: int, first: int) -> tuple[list[int], list[int]]:
    """Which row stands where in two batches: in the second, every other one is exchanged.

    Over all `first`, every row stands at each position of both.
    """
    one = [(first + position) % rows for position in range(gear)]
    step = max(1, rows // 2)
    other = [(row + step) % rows if position % 2 else row for position, row in enumerate(one)]
    return one, other


class _Tally:
    """What has been seen of one output in one gear."""

    def __init__(self, output: str, gear: int, tolerance: Tolerance) -> None:
        self._output, self._gear, self._tolerance = output, gear, tolerance
        self._alone = self._beside = self._padded = Difference()
        self._compared = self._not_finite = 0

    def batch(self, got: Array, wanted: Sequence[Array]) -> None:
        """The rows of a batch, and what each was alone."""
        for mine, theirs in zip(got, wanted, strict=True):
            self._alone |= difference(mine, theirs, self._tolerance)
        self._compared += len(wanted)
        if got.dtype.kind == "f":
            self._not_finite += int(got.size - np.count_nonzero(np.isfinite(got)))

    def neighbours(self, one: Array, other: Array) -> None:
        """The same rows at the same positions, beside others."""
        self._beside |= difference(other, one, self._tolerance)

    def padding(self, padded: Array, full: Array, alone: Array) -> None:
        """A row in a batch of padding, at the head of a full one, and alone."""
        self._padded |= difference(padded, full, self._tolerance)
        self._alone |= difference(padded, alone, self._tolerance)

    def finding(self) -> Finding:
        return Finding(
            self._gear,
            self._output,
            self._compared,
            self._alone,
            self._beside,
            self._padded,
            self._not_finite,
        )
