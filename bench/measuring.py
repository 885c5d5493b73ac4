"""Runs load generators against servers that are up, and accounts for everybody's CPU meanwhile.

Knows nothing of what the scenarios want to show.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.loads import Load, Report
from bench.machine import CpuUse, cpu_use, wait_quiet
from bench.results import Claim, Row, row

Roles = Mapping[str, Sequence[int]]
"""Ids of processes by what they do."""

_GRACE_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How long and how often: seconds of each measurement, interleaved pairs, gateways, peers.

    `folder` holds models, logs and peers' environments. A measurement starts when the rest of the
    machine uses less than `quiet_cores`, or after `patience_s`.
    """

    folder: Path
    seconds: float = 4.0
    warm_up_s: float = 1.0
    pairs: int = 5
    gateways: int = 1
    peers: Sequence[str] = ()
    quick: bool = False
    quiet_cores: float = 0.15
    patience_s: float = 30.0


@dataclass(slots=True)
class Bench:
    """What the scenarios share: options, what has been found, and how to measure one more."""

    options: Options
    told: Callable[[Row], None]
    rows: list[Row] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def load(self, target: str, vectors: Path, **more: object) -> Load:
        """A load with the options' durations."""
        durations = {"seconds": self.options.seconds, "warm_up_s": self.options.warm_up_s}
        return Load(target=target, vectors=str(vectors), **{**durations, **more})  # type: ignore[arg-type]  # checked by Load's own call

    def measure(
        self,
        scenario: str,
        case: str,
        pair: int,
        *,
        load: Load,
        roles: Roles,
        more: Callable[[Report], Mapping[str, float]] = lambda _: {},
    ) -> Row:
        """One row: the load alone. `more` adds what is known by other means."""
        [made] = self.measure_together(scenario, [case], pair, loads=[load], roles=roles, more=more)
        return made

    def measure_together(
        self,
        scenario: str,
        cases: Sequence[str],
        pair: int,
        *,
        loads: Sequence[Load],
        roles: Roles,
        more: Callable[[Report], Mapping[str, float]] = lambda _: {},
    ) -> list[Row]:
        """A row per load, all running at once; each row has the CPU of all."""
        wait_quiet(self.options.quiet_cores, patience_s=self.options.patience_s)
        reports, cpu = run_loads(loads, roles)
        made = [
            row(scenario, case, pair, report, cpu, more(report))
            for case, report in zip(cases, reports, strict=True)
        ]
        for each in made:
            self.add(each)
        return made

    def add(self, made: Row) -> None:
        """A row that was measured in another way."""
        self.rows.append(made)
        self.told(made)

    def claim(self, scenario: str, name: str, values: Sequence[float], **goal: object) -> None:
        """What the scenario's pairs say; the keywords are those of Claim."""
        self.claims.append(Claim(scenario=scenario, name=name, values=values, **goal))  # type: ignore[arg-type]  # checked by Claim's own call


def run_loads(loads: Sequence[Load], roles: Roles) -> tuple[list[Report], CpuUse]:
    """Run these generators at once; their reports, and the CPU used in the first one's window.

    RuntimeError with what a generator said when it failed.
    """
    generators = [_start(load) for load in loads]
    try:
        first = generators[0]
        accounted = {**roles, "generator": [process.pid for process in generators]}
        _await(first, "begin")
        before = cpu_use(accounted)
        _await(first, "end")
        used = cpu_use(accounted).since(before)
        return [
            _report(process, load) for process, load in zip(generators, loads, strict=True)
        ], used
    finally:
        for process in generators:
            process.kill()
            process.communicate()


def _start(load: Load) -> "subprocess.Popen[str]":
    module = "bench.http_load" if load.target.startswith("http:") else "bench.direct_load"
    return subprocess.Popen(
        [sys.executable, "-m", module, load.to_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )


def _await(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != word:
        process.kill()
        raise RuntimeError(f"the load generator said {line!r}:\n{process.communicate()[1]}")


def _report(process: "subprocess.Popen[str]", load: Load) -> Report:
    out, err = process.communicate(timeout=load.timeout_s + _GRACE_S)
    lines = out.splitlines()
    if process.returncode != 0 or not lines:
        raise RuntimeError(f"the load generator failed:\n{err}")
    return Report.from_json(lines[-1])
