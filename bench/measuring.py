"""Runs load generators against servers that are up, and accounts for everybody's CPU meanwhile.

Knows nothing of what the scenarios want to show.
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.loads import Load, Report
from bench.machine import CpuUse, cpu_use, wait_quiet
from bench.results import Claim, Row, row

Roles = Mapping[str, Sequence[int]]
"""Ids of processes by what they do."""

_GRACE_S = 60.0


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
        """A row per load, all running at once; CPU is per request of any of them."""
        wait_quiet(self.options.quiet_cores, patience_s=self.options.patience_s)
        reports, cpu = run_loads(loads, roles)
        answered = sum(report.answered for report in reports)
        made = [
            row(scenario, case, pair, report, cpu=cpu, answered=answered, more=more(report))
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

    RuntimeError when one of them failed; it has said why on the standard error then.
    """
    generators = [_Generator(load) for load in loads]
    try:
        first = generators[0]
        accounted = {**roles, "generator": [generator.pid for generator in generators]}
        first.await_word("begin")
        before = cpu_use(accounted)
        first.await_word("end")
        used = cpu_use(accounted).since(before)
        for other in generators[1:]:
            other.await_word("begin")
            other.await_word("end")
        return [generator.report() for generator in generators], used
    finally:
        for generator in generators:
            generator.close()


class _Generator:
    """A load generator's process; it is killed where it takes far longer than its load lasts."""

    def __init__(self, load: Load) -> None:
        module = "bench.http_load" if load.target.startswith("http:") else "bench.direct_load"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, load.to_json()],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        self.pid = self._process.pid
        limit_s = load.warm_up_s + load.seconds + load.timeout_s + _GRACE_S
        self._limit = threading.Timer(limit_s, self._process.kill)
        self._limit.start()

    def await_word(self, word: str) -> None:
        line = self._line()
        if line != word:
            raise RuntimeError(f"a load generator failed: it said {line!r} and not {word!r}")

    def report(self) -> Report:
        line = self._line()
        if not line:
            raise RuntimeError("a load generator failed: it made no report")
        return Report.from_json(line)

    def close(self) -> None:
        self._limit.cancel()
        self._process.kill()
        with self._process:
            pass

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
