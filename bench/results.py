"""What a benchmark finds: rows that were measured, and claims that pairs of rows bear out or not.

Pure. Knows nothing of how anything is measured or shown.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.loads import Report
from bench.machine import CpuUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement. `cpu_us` is CPU per answered request by role, in microseconds.

    `foreign_cores` is what the rest of the machine used meanwhile: above a few hundredths, figures
    say little. `more` holds what only some scenarios measure.
    """

    scenario: str
    case: str
    pair: int
    rate_s: float
    p50_ms: float = math.nan
    p99_ms: float = math.nan
    max_ms: float = math.nan
    mean_batch: float = math.nan
    cpu_us: Mapping[str, float] = field(default_factory=dict)
    foreign_cores: float = math.nan
    wrong: int = 0
    first_error: str = ""
    unfinished: int = 0
    more: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A figure per pair, and the goal that its median should reach: at least it, or at most."""

    scenario: str
    name: str
    values: Sequence[float]
    goal: float
    at_least: bool = True
    note: str = ""

    @property
    def median(self) -> float:
        known = self._known()
        return statistics.median(known) if known else math.nan

    @property
    def range(self) -> tuple[float, float]:
        known = self._known()
        return (min(known), max(known)) if known else (math.nan, math.nan)

    @property
    def shown(self) -> bool:
        """Whether the median reaches the goal; never where nothing was measured."""
        return self.median >= self.goal if self.at_least else self.median <= self.goal

    def _known(self) -> list[float]:
        return [value for value in self.values if not math.isnan(value)]


def ratio(over: float, under: float) -> float:
    """NaN where there is nothing to divide by: what did not answer is no yardstick."""
    return over / under if under else math.nan


def row(
    scenario: str,
    case: str,
    pair: int,
    report: Report,
    *,
    cpu: CpuUse,
    answered: int,
    more: Mapping[str, float],
) -> Row:
    """The row of one load: its report, and the CPU of its window over all that was answered."""
    ours_s = sum(cpu.by_role_s.values())
    per_request = 1e6 / max(1, answered)
    return Row(
        scenario=scenario,
        case=case,
        pair=pair,
        rate_s=report.rate_s,
        p50_ms=report.p50_ms,
        p99_ms=report.p99_ms,
        max_ms=report.max_ms,
        mean_batch=more.get("mean_batch", report.mean_batch),
        cpu_us={role: round(per_request * used, 1) for role, used in sorted(cpu.by_role_s.items())},
        foreign_cores=round((cpu.machine_s - ours_s) / (report.end_s - report.start_s), 2),
        wrong=sum(report.errors.values()),
        first_error=report.first_error,
        unfinished=report.unfinished,
        more={name: value for name, value in more.items() if name != "mean_batch"},
    )


def summaries(rows: Iterable[Row]) -> list[tuple[Row, Sequence[Row]]]:
    """For every case, in order, the row of the median rate, and all its rows."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for each in rows:
        cases.setdefault((each.scenario, each.case), []).append(each)
    return [
        (sorted(group, key=lambda r: r.rate_s)[(len(group) - 1) // 2], group)
        for group in cases.values()
    ]
