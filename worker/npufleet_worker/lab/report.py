"""What a tuning found, for people and for programs: tables, sentences, JSON, a chart."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from npufleet_worker.batching import BatchPolicy
from npufleet_worker.lab.chart import Axis, Series, draw
from npufleet_worker.lab.experiment import Findings, today_of
from npufleet_worker.lab.simulation import Point
from npufleet_worker.lab.tuning import Choice, Goal, Verdict
from npufleet_worker.repository import ModelConfig

_CHART_P99 = 2.0
"""The chart ends at so many times the goal."""


def show(config: ModelConfig, findings: Findings, goal: Goal) -> None:
    """Print everything."""
    console = Console()
    console.print(_times_table(findings))
    for line in _measured(findings):
        print(line)
    if findings.choice is not None:
        console.print(_settings_table(findings.choice, goal))
    for line in conclusion(config, findings, goal):
        print(line)


def conclusion(config: ModelConfig, findings: Findings, goal: Goal) -> Iterator[str]:
    """What was chosen and why, or why nothing was; a sentence a line."""
    choice = findings.choice
    if choice is None:
        yield "no setting was chosen: nothing could be measured"
        return
    if choice.chosen is None or choice.chosen.best is None:
        near = choice.nearest
        lowest = near.points[0]
        yield (
            f"no setting keeps p99 within {goal.p99_ms:g} ms: the best within reach is "
            f"{_ms(lowest.p99_ms)} ({_setting(near.policy)}, at {_rate(lowest.rate)} rows/s)"
        )
        return
    best = choice.chosen.best
    yield (
        f"{_setting(choice.chosen.policy)}: {_rate(best.rate)} rows/s with p99 {_ms(best.p99_ms)} "
        f"(bound {goal.p99_ms:g} ms), the most of {len(choice.verdicts)} settings"
    )
    yield from _beyond(choice.chosen, goal)
    yield from _today(config, choice)
    yield from _rehearsed(findings)


def document(
    config: ModelConfig, findings: Findings, goal: Goal, *, written: str | None
) -> dict[str, Any]:
    """All of it as JSON has it; `written` is the file that was changed."""
    choice, rehearsal = findings.choice, findings.rehearsal
    fit = findings.device.profile.fit() if findings.device else None
    chosen = choice.chosen if choice else None
    near = choice.nearest if choice and chosen is None else None
    return {
        "model": config.name,
        "version": config.version,
        "slo_p99_ms": goal.p99_ms,
        "gears": [
            {
                "gear": time.gear,
                "batch_ms": time.mean_ms,
                "rows_per_s": time.rows_per_s,
                "spread": time.spread,
                "settled": time.settled,
            }
            for time in findings.times
        ],
        "fit": asdict(fit) if fit else None,
        "host_rows_per_s": _host(findings),
        "settings": [_verdict(verdict) for verdict in choice.verdicts] if choice else [],
        "chosen": _verdict(chosen) if chosen else None,
        "best_within_reach": _verdict(near) if near else None,
        "rehearsal": {
            "tried": [_point(point) for point in rehearsal.tried],
            "confirmed": _point(rehearsal.confirmed) if rehearsal.confirmed else None,
        }
        if rehearsal
        else None,
        "written": written,
    }


def chart(config: ModelConfig, findings: Findings, goal: Goal) -> str:
    """Latency over throughput: the chosen setting, the best of the other sizes, the proof."""
    assert findings.choice is not None
    assert findings.device is not None
    chosen = findings.choice.chosen
    lines = []
    if chosen is not None:
        name = f"{chosen.policy.max_batch_size} rows, {chosen.policy.max_wait_ms:g} ms"
        lines.append(Series(f"{name}: p99", _latencies(findings.curve), bold=True))
        medians = tuple((point.rate, point.p50_ms) for point in findings.curve)
        lines.append(Series(f"{name}: p50", medians))
    for verdict in findings.choice.best_of_sizes():
        if verdict is not chosen:
            name = f"{verdict.policy.max_batch_size} rows, {verdict.policy.max_wait_ms:g} ms: p99"
            lines.append(Series(name, _latencies(verdict.points)))
    if findings.rehearsal is not None:
        lines.append(Series("in real time: p99", _latencies(findings.rehearsal.tried), marks=True))
    return draw(
        lines,
        title=f"{config.name}/{config.version}: latency over throughput",
        x=Axis("rows per second", findings.device.best_rows_per_s),
        y=Axis("ms from arrival to the end of the run", goal.p99_ms * _CHART_P99),
        limit=(f"bound {goal.p99_ms:g} ms", goal.p99_ms),
    )


def _times_table(findings: Findings) -> Table:
    table = Table("gear", "ms per batch", "rows/s", "of the best", "fit", "windows")
    best = max(time.rows_per_s for time in findings.times)
    fit = findings.device.profile.fit() if findings.device else None
    for time in findings.times:
        fitted = f"{fit.fixed_ms + fit.row_ms * time.gear:.3f}" if fit else ""
        table.add_row(
            str(time.gear),
            f"{time.mean_ms:.3f}",
            _rate(time.rows_per_s),
            f"{time.rows_per_s / best:.0%}",
            fitted,
            f"{'within' if time.settled else 'NOT SETTLED,'} {time.spread:.0%}",
        )
    return table


def _measured(findings: Findings) -> Iterator[str]:
    fit = findings.device.profile.fit() if findings.device else None
    if fit is not None:
        yield f"a batch of n rows takes about {fit.fixed_ms:.3g} ms + n * {fit.row_ms:.3g} ms"
    host = _host(findings)
    if host is not None:
        yield f"the device could do more than this host can feed it: {_rate(host)} rows/s"
    unsettled = [time.gear for time in findings.times if not time.settled]
    if unsettled:
        yield (
            f"left out, since no three windows agreed: {unsettled}; is this machine busy? "
            "--window-s and --limit-s give it more time"
        )


def _host(findings: Findings) -> float | None:
    """What the host can do, where that is less than the device could."""
    if findings.device is None or math.isinf(findings.device.host_rows_per_s):
        return None
    return findings.device.host_rows_per_s


def _settings_table(choice: Choice, goal: Goal) -> Table:
    table = Table("max_batch_size", "max_wait_ms", "rows/s within the bound", "p99 there", "batch")
    for verdict in choice.best_of_sizes():
        chosen = " <" if verdict is choice.chosen else ""
        best = verdict.best
        cells = (
            (f"{_rate(best.rate)}{chosen}", _ms(best.p99_ms), f"{best.mean_batch:.1f}")
            if best
            else (_missed(verdict.points[0]), "", "")
        )
        policy = verdict.policy
        table.add_row(str(policy.max_batch_size), f"{policy.max_wait_ms:g}", *cells)
    table.caption = f"simulated; the best max_wait_ms of each size for p99 <= {goal.p99_ms:g} ms"
    return table


def _missed(lowest: Point) -> str:
    if not lowest.sustained:
        return f"none: too slow for {_rate(lowest.rate)}"
    return f"none: p99 {_ms(lowest.p99_ms)} at {_rate(lowest.rate)}"


def _beyond(chosen: Verdict, goal: Goal) -> Iterator[str]:
    assert chosen.best is not None
    more = [point for point in chosen.points if point.rate > chosen.best.rate]
    if more:
        found = f"p99 would be {_ms(more[0].p99_ms)}" if more[0].sustained else "the queue grows"
        yield f"beyond: at {_rate(more[0].rate)} rows/s {found}"


def _today(config: ModelConfig, choice: Choice) -> Iterator[str]:
    today = today_of(config)
    for verdict in choice.verdicts:
        if verdict.policy == today and verdict is not choice.chosen:
            reached = f"{_rate(verdict.best.rate)} rows/s" if verdict.best else "no rate"
            yield f"today's {_setting(today)}: {reached} within the bound"
    assert choice.chosen is not None
    if choice.chosen.policy.max_batch_size < today.max_batch_size:
        yield (
            f"mind: a single request may then have {choice.chosen.policy.max_batch_size} rows "
            f"at most, now {today.max_batch_size}"
        )


def _rehearsed(findings: Findings) -> Iterator[str]:
    rehearsal = findings.rehearsal
    if rehearsal is None:
        yield "not proven in real time (--rehearse-s 0)"
        return
    for point in rehearsal.tried:
        verdict = "met" if point is rehearsal.confirmed else "missed"
        yield (
            f"in real time: {_rate(point.rate)} rows/s, p50 {_ms(point.p50_ms)}, p99 "
            f"{_ms(point.p99_ms)}, batches of {point.mean_batch:.1f}: {verdict}"
        )
    if rehearsal.confirmed is None:
        yield "NOT CONFIRMED: in real time this setting misses the bound; nothing was chosen"
    elif len(rehearsal.tried) > 1:
        yield "the simulated rate was not reached in real time: the lower one is what to expect"


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "max_batch_size": verdict.policy.max_batch_size,
        "max_wait_ms": verdict.policy.max_wait_ms,
        "capacity_rows_per_s": verdict.capacity,
        "best": _point(verdict.best) if verdict.best else None,
        "points": [_point(point) for point in verdict.points],
    }


def _point(point: Point) -> dict[str, Any]:
    """Without the infinities of a queue that grows, which JSON does not have."""
    finite = asdict(point)
    if not point.sustained:
        finite |= {"p50_ms": None, "p99_ms": None}
    return finite


def _latencies(points: tuple[Point, ...]) -> tuple[tuple[float, float], ...]:
    return tuple((point.rate, point.p99_ms) for point in points)


def _setting(policy: BatchPolicy) -> str:
    return f"max_batch_size = {policy.max_batch_size}, max_wait_ms = {policy.max_wait_ms:g}"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _rate(rows_per_s: float) -> str:
    return f"{rows_per_s:,.0f}" if rows_per_s >= 100 else f"{rows_per_s:.3g}"
