"""The command line of the benchmark: which scenarios, how long, how often, written where."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench import chart, machine, models, report
from bench.measuring import Bench, Options
from bench.peers.catalog import OURS, PEERS
from bench.peers.serving import install
from bench.scenarios import SCENARIOS

_QUICK_S, _QUICK_WARM_UP_S = 1.0, 0.5
_DEFAULT_PEERS = "mosec,fastapi"


def main(
    scenario: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(SCENARIOS)}; repeatable.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of each measurement, after a warm-up.")] = 4.0,
    pairs: Annotated[int, typer.Option(help="How often everything is measured, in turn.")] = 5,
    gateways: Annotated[int, typer.Option(help="Gateway processes of our fleet.")] = 1,
    peers: Annotated[
        str, typer.Option(help="Other servers, with commas; installed on first use. '': none.")
    ] = _DEFAULT_PEERS,
    out: Annotated[
        Path, typer.Option(help="Folder of results, models and peers' environments.")
    ] = Path("build/bench"),
    quiet_cores: Annotated[
        float, typer.Option(help="Measure when the rest of the machine uses fewer cores.")
    ] = 0.15,
    quick: Annotated[
        bool, typer.Option(help="One pair of a second each: whether it runs, not how fast.")
    ] = False,
) -> None:
    """Measure npufleet on this machine, as ratios within one run.

    Prints a table, and writes bench-results.json and bench-results.svg. Exit code 1 when an answer
    was wrong or something could not be measured; goals that are not reached are results.

    Examples:

      python -m bench --quick --peers ''

      python -m bench --scenario device_busy --scenario ray_trap --pairs 3
    """
    asked = scenario or list(SCENARIOS)
    names = [name for name in peers.split(",") if name]
    _check(asked, names)
    out.mkdir(parents=True, exist_ok=True)
    options = Options(
        folder=out.resolve(),
        seconds=_QUICK_S if quick else seconds,
        warm_up_s=_QUICK_WARM_UP_S if quick else 1.0,
        pairs=1 if quick else pairs,
        gateways=gateways,
        peers=names,
        quick=quick,
        quiet_cores=quiet_cores,
        patience_s=0.0 if quick else 30.0,
    )
    # So that a terminated benchmark stops its servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    raise typer.Exit(_run(asked, options, out))


def _run(asked: list[str], options: Options, out: Path) -> int:
    console = Console(width=None if sys.stdout.isatty() else 240)
    progress = Console(stderr=True, highlight=False)
    models.build(options.folder / "models")
    if {"http_peers", "direct_producers"} & set(asked):
        _prepare(options, progress)
    bench = Bench(options, told=lambda row: progress.print(report.line(row), soft_wrap=True))
    for name in asked:
        try:
            SCENARIOS[name](bench)
        except RuntimeError as error:  # it says what failed; what was found before is worth having
            bench.problems.append(f"{name}: {error}")
    report.show(console, bench)
    report.save(out / "bench-results.json", bench)
    picture = chart.svg(bench.rows, title="npufleet: requests a second (median and range)")
    (out / "bench-results.svg").write_text(picture, encoding="utf-8")
    console.print(f"written to {out}/bench-results.json and .svg")
    return 1 if bench.problems or any(row.wrong for row in bench.rows) else 0


def _prepare(options: Options, progress: Console) -> None:
    for name in options.peers:
        install(PEERS[name], options.folder)
    if options.peers and os.geteuid() == 0 and not machine.isolate():
        progress.print("no network namespace to be had: peers may open ports on all interfaces")


def _check(asked: list[str], peers: list[str]) -> None:
    for what, names, known in (
        ("scenario", asked, list(SCENARIOS)),
        ("peer", peers, [name for name in PEERS if name != OURS]),
    ):
        for name in names:
            if name not in known:
                raise typer.BadParameter(f"there is no {what} {name!r}; known: {', '.join(known)}")


if __name__ == "__main__":
    typer.run(main)
