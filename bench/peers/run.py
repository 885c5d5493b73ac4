"""Servers side by side, taking turns: `python -m bench.peers.run npufleet,mosec --model mlp`."""

import itertools
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench import machine, models, report
from bench.measuring import Bench, Options
from bench.peers.catalog import PEERS, Peer
from bench.peers.killing import kill_under_load
from bench.peers.serving import Serving, install, serving
from bench.results import Row, ratio


def main(
    names: Annotated[str, typer.Argument(help=f"With commas, of {', '.join(PEERS)}.")],
    model: Annotated[str, typer.Option(help="With commas.")] = "identity,mlp,convnet",
    wire: Annotated[str, typer.Option(help="Of bench.wires; default: each one's usual.")] = "",
    conc: Annotated[str, typer.Option(help="Numbers of clients, with commas.")] = "1,16,64,256",
    seconds: Annotated[float, typer.Option(help="Of each measurement, after a warm-up.")] = 4.0,
    rounds: Annotated[int, typer.Option(help="Times to go through all the servers.")] = 5,
    workers: Annotated[int, typer.Option(help="Model processes of each.")] = 1,
    threads: Annotated[int, typer.Option(help="ONNX Runtime threads in each.")] = 1,
    max_batch: Annotated[int, typer.Option(help="Rows of a batch.")] = 32,
    max_wait_ms: Annotated[float, typer.Option(help="Window of a batch.")] = 5.0,
    gateways: Annotated[int, typer.Option(help="Front processes of ours.")] = 1,
    kill: Annotated[
        bool, typer.Option("--kill", help="Kill -9 the model's process under load.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of results and environments.")] = Path(
        "build/bench"
    ),
) -> None:
    """Measure servers on the same models with the same load; ratios are to the first one named."""
    peers = [_known(name) for name in names.split(",")]
    options = Options(
        folder=out.resolve(),
        seconds=seconds,
        pairs=rounds,
        gateways=gateways,
        patience_s=0.0 if kill else 30.0,  # the kill has its time
    )
    models.build(options.folder / "models")
    for peer in peers:
        install(peer, options.folder)
    if not machine.isolate():
        print("no network namespace: servers may open ports on all interfaces", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    how = Serving(
        folder=options.folder,
        workers=workers,
        threads=threads,
        max_batch=max_batch,
        max_wait_ms=max_wait_ms,
        gateways=gateways,
    )
    progress = Console(stderr=True, highlight=False)
    bench = Bench(options, told=lambda row: progress.print(report.line(row), soft_wrap=True))
    clients = [int(word) for word in conc.split(",")]
    for pair, name, peer in itertools.product(range(rounds), model.split(","), peers):
        try:
            _measure(
                bench,
                peer,
                name,
                wire or peer.wires[0],
                pair=pair,
                clients=clients,
                how=how,
                kill=kill,
            )
        except RuntimeError as error:  # this one does not start here; the others may
            bench.problems.append(str(error))
    if not kill:
        _claim(bench, peers)
    report.show(Console(width=None if sys.stdout.isatty() else 240), bench)
    report.save(out / "peers-results.json", bench)


def _known(name: str) -> Peer:
    if name not in PEERS:
        raise typer.BadParameter(f"there is no server {name!r}; known: {', '.join(PEERS)}")
    return PEERS[name]


def _measure(
    bench: Bench,
    peer: Peer,
    model: str,
    wire: str,
    *,
    pair: int,
    clients: list[int],
    how: Serving,
    kill: bool,
) -> None:
    vectors = models.vectors(how.folder / "models", model)
    with serving(peer, model, wire, how) as running:
        for count in clients:
            case = f"{model} {wire}, {count} clients"
            if kill:
                kill_under_load(bench, running, case, pair, vectors=vectors, clients=count)
                continue
            bench.measure(
                peer.name,
                case,
                pair,
                load=bench.load(running.url, vectors, wire=wire, clients=count),
                roles=running.roles(),
            )


def _claim(bench: Bench, peers: list[Peer]) -> None:
    """The ratios of the first server to each of the others, where their wires are the same."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in bench.rows:
        found.setdefault((row.scenario, row.case), []).append(row)
    first = peers[0].name
    for (name, case), theirs in found.items():
        ours = found.get((first, case), [])
        if name != first and len(ours) == len(theirs):
            ratios = [ratio(a.rate_s, b.rate_s) for a, b in zip(ours, theirs, strict=True)]
            bench.claim(first, f"{case}: over {name}", ratios, goal=1.0)


if __name__ == "__main__":
    typer.run(main)
