"""Scenarios on simulated devices: whether they ever wait, how they add up, and what batches do."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import device_log, ideal, models
from bench.fleet import RunningFleet
from bench.loads import Load, Report
from bench.measuring import Bench
from bench.results import Row, ratio
from bench.scenarios.repository import built, repository, serving

A_MS, B_MS, GEAR = 5.0, 0.2, 32
"""The device of most scenarios: a full batch takes 11.4 ms, which is 2807 rows a second."""

GEARS = (1, 2, 4, 8, 16, 32)

IN_FLIGHT = 128
"""Per worker, by direct feed: twice what a worker holds, so that the lanes are never empty."""

_LIGHT_RATE_S = 40.0
_LONGER = 5
"""Times the usual seconds at light load: few requests make a poor p99."""
_TRAP_MS = 100.0
_TRAP_LONGER = 2


def device_busy(bench: Bench) -> None:
    """The share of time in which a saturated device runs, and the gap between two of its runs."""
    name = "device_busy"
    busy, gaps = [], []
    with repository() as folder:
        log = models.serve_simulated(folder, "sim", a_ms=A_MS, b_ms=B_MS, gears=[GEAR])
        with serving(bench.options, folder) as fleet:
            load = _direct(bench, fleet, "sim", clients=2 * IN_FLIGHT)
            for pair in range(bench.options.pairs):
                row = bench.measure(
                    name,
                    f"sim {A_MS:g} ms + {B_MS:g} ms x {GEAR}, direct",
                    pair,
                    load=load,
                    roles=fleet.roles(),
                    more=_use(log),
                )
                busy.append(row.more["busy_share"])
                gaps.append(row.more["gap_ms"])
    bench.claim(name, "device busy share", busy, goal=0.97)
    bench.claim(name, "idle gap between runs, ms", gaps, goal=0.2, at_least=False)


def workers_scaling(bench: Bench) -> None:
    """Throughput of 2 and 4 workers over that of one, and latency at light load by their number."""
    name, counts = "workers_scaling", (1, 2, 4)
    full: dict[int, list[Row]] = {count: [] for count in counts}
    light: dict[int, list[Row]] = {count: [] for count in counts}
    for pair, workers in itertools.product(range(bench.options.pairs), counts):
        with repository() as folder:
            log = models.serve_simulated(folder, "sim", a_ms=A_MS, b_ms=B_MS, gears=GEARS)
            with serving(bench.options, folder, workers=workers) as fleet:
                few = {"rate_s": _LIGHT_RATE_S, "seconds": _LONGER * bench.options.seconds}
                loads = (
                    (light, "light", _direct(bench, fleet, "sim", **few)),
                    (full, "full", _direct(bench, fleet, "sim", clients=IN_FLIGHT * workers)),
                )
                for rows, kind, load in loads:
                    row = bench.measure(
                        name,
                        f"workers: {workers}, {kind}",
                        pair,
                        load=load,
                        roles=fleet.roles(),
                        more=_use(log),
                    )
                    rows[workers].append(row)
    for count, goal in ((2, 1.9), (4, 3.8)):
        bench.claim(
            name, f"{count} workers over 1", _ratios(full[count], full[1], "rate_s"), goal=goal
        )
    bench.claim(
        name,
        "p99 at light load, 4 workers over 1",
        _ratios(light[4], light[1], "p99_ms"),
        goal=1.1,
        at_least=False,
    )


def ray_trap(bench: Bench) -> None:
    """A slow model at rates that a queue per replica answers late or in batches of one."""
    name, rates, windows = "ray_trap", (50.0, 100.0, 200.0), (0.0, 10.0)
    found: dict[tuple[float, float], list[tuple[Row, ideal.Ideal]]] = {
        case: [] for case in itertools.product(windows, rates)
    }
    vectors = models.vectors(built(bench.options), "sim")
    with repository() as folder:
        logs = {window_ms: _serve_trap(folder, window_ms) for window_ms in windows}
        with serving(bench.options, folder) as fleet:
            for pair, (window_ms, rate_s) in itertools.product(range(bench.options.pairs), found):
                load = bench.load(
                    fleet.infer_url(_trap(window_ms)),
                    vectors,
                    rate_s=rate_s,
                    seed=pair + 1,
                    seconds=_TRAP_LONGER * bench.options.seconds,
                )
                row = bench.measure(
                    name,
                    f"window {window_ms:g} ms, {rate_s:g}/s",
                    pair,
                    load=load,
                    roles=fleet.roles(),
                    more=_use(logs[window_ms]),
                )
                best = ideal.greedy(load.arrivals_s(), run_s=_TRAP_MS / 1000, max_batch=GEAR)
                found[window_ms, rate_s].append((row, best))
    for (window_ms, _), rows in found.items():
        _claim_trap(bench, window_ms=window_ms, rows=rows)


def _trap(window_ms: float) -> str:
    return f"trap{window_ms:.0f}"


def _serve_trap(folder: Path, window_ms: float) -> Path:
    batching = {"max_wait_ms": window_ms, "max_batch_size": GEAR}
    return models.serve_simulated(
        folder, _trap(window_ms), a_ms=_TRAP_MS, b_ms=0.0, batching=batching
    )


def _claim_trap(bench: Bench, *, window_ms: float, rows: Sequence[tuple[Row, ideal.Ideal]]) -> None:
    """Against the best possible for the very same arrivals, and against the model's own time."""
    first, best = rows[0]
    possible = f"best possible on one device: p50 {best.p50_ms:.0f} ms, batch {best.mean_batch:.1f}"
    bench.claim(
        first.scenario,
        f"{first.case}: mean batch over the best possible",
        [ratio(row.mean_batch, best.mean_batch) for row, best in rows],
        goal=0.9,
        note=possible,
    )
    bench.claim(
        first.scenario,
        f"{first.case}: p50 over the best possible",
        [ratio(row.p50_ms, best.p50_ms) for row, best in rows],
        goal=1.1,
        at_least=False,
    )
    bench.claim(
        first.scenario,
        f"{first.case}: p50 over model time + window",
        [ratio(row.p50_ms, _TRAP_MS + window_ms) for row, _ in rows],
        goal=1.1,
        at_least=False,
        note="a request that comes while the device runs waits for the rest of that run",
    )


def _direct(bench: Bench, fleet: RunningFleet, model: str, **kind: object) -> Load:
    vectors = models.vectors(built(bench.options), "sim")
    return bench.load(fleet.redis_url, vectors, model=model, **kind)


def _use(log: Path) -> Callable[[Report], Mapping[str, float]]:
    """What the devices of that log did within a report's window."""

    def more(report: Report) -> Mapping[str, float]:
        use = device_log.read(log, report.start_s, report.end_s)
        return {
            "mean_batch": round(use.mean_batch, 2),
            "busy_share": round(use.busy_share, 4),
            "gap_ms": round(use.gap_ms, 4),
            "devices": use.devices,
        }

    return more


def _ratios(over: list[Row], under: list[Row], name: str) -> list[float]:
    pairs = zip(over, under, strict=True)
    return [ratio(getattr(above, name), getattr(below, name)) for above, below in pairs]
