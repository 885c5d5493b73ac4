"""Scenarios through HTTP: one client, many, other servers, and the limit that the model sets."""

import itertools
from collections import defaultdict
from collections.abc import Iterator

from bench import bare, models
from bench.loads import Load
from bench.measuring import Bench
from bench.peers.catalog import OURS, PEERS, Peer
from bench.peers.serving import Serving
from bench.peers.serving import serving as serving_peer
from bench.results import Row, ratio
from bench.scenarios.repository import built, repository, serve_built, serving

_BATCH = 32
_CLIENTS = (1, 16, 64, 256)
_RATES_S = {"identity": (100.0, 1000.0, 3000.0), "mlp": (100.0, 1000.0, 3000.0), "convnet": (20.0,)}
_LONG_WINDOW_MS = 50.0
_LONGER = 5
"""Times the usual seconds for a model of which a batch takes a quarter of one."""
_GOALS = {"mosec": {"raw": 0.5, "json": 1.0}, "pytriton": {"raw": 2.0, "json": 2.0}}
_GOAL_OF_HANDLERS = {"fastapi"}


def sweep(bench: Bench) -> None:
    """Every model through every door at every load, and bare: the table, and the chart."""
    name = "sweep"
    with repository() as folder:
        serve_built(bench.options, folder, *models.SAMPLES)
        with serving(bench.options, folder) as fleet:
            for pair, model in itertools.product(range(bench.options.pairs), models.SAMPLES):
                _bare(bench, name, model, pair, seconds=bench.options.seconds)
                for case, load in _sweep_loads(bench, model, fleet.url, fleet.redis_url):
                    bench.measure(name, case, pair, load=load, roles=fleet.roles())


def _sweep_loads(bench: Bench, model: str, url: str, redis_url: str) -> Iterator[tuple[str, Load]]:
    vectors = models.vectors(built(bench.options), model)
    target = f"{url}/v1/models/{model}/infer"
    # A picture as JSON is 2 MB of text: that measures the parser, and nobody should send it.
    wires = ("raw",) if model == "convnet" else ("raw", "json")
    clients = _CLIENTS[::2] if bench.options.quick else _CLIENTS
    for wire, count in itertools.product(wires, clients):
        yield (
            f"{model}, HTTP {wire}, {count} clients",
            bench.load(target, vectors, wire=wire, clients=count),
        )
    for count in clients[1:]:
        yield (
            f"{model}, direct, {count} in flight",
            bench.load(redis_url, vectors, model=model, clients=count),
        )
    for rate_s in _RATES_S[model][: 1 if bench.options.quick else None]:
        yield (
            f"{model}, HTTP raw, {rate_s:g}/s",
            bench.load(target, vectors, rate_s=rate_s),
        )


def _bare(bench: Bench, name: str, model: str, pair: int, *, seconds: float) -> Row:
    """The limit, as a row: one thread, full batches, no server."""
    file = models.model_file(built(bench.options), model)
    rate = bare.measure(file, batch=_BATCH, threads=1, seconds=seconds)
    row = Row(
        scenario=name,
        case=f"{model}, bare, batches of {_BATCH}",
        pair=pair,
        rate_s=round(rate.rate_s, 1),
        p50_ms=round(rate.run_ms, 3),
        mean_batch=_BATCH,
        cpu_us={"executor": round(rate.cpu_us, 1)},
    )
    bench.add(row)
    return row


def lone_client(bench: Bench) -> None:
    """One client alone: how long it waits without a window, and whether it ever pays a window."""
    name = "lone_client"
    medians, longest = [], []
    with repository() as folder:
        source = models.model_file(built(bench.options), "identity")
        for served, wait_ms in (("at-once", 0.0), ("adaptive", _LONG_WINDOW_MS)):
            models.serve_onnx(folder, served, source, batching={"max_wait_ms": wait_ms})
        with serving(bench.options, folder) as fleet:
            vectors = models.vectors(built(bench.options), "identity")
            for pair in range(bench.options.pairs):
                at_once, adaptive = (
                    bench.measure(
                        name,
                        f"identity, {served}, HTTP raw",
                        pair,
                        load=bench.load(fleet.infer_url(served), vectors),
                        roles=fleet.roles(),
                    )
                    for served in ("at-once", "adaptive")
                )
                medians.append(at_once.p50_ms)
                longest.append(adaptive.p99_ms / _LONG_WINDOW_MS)
    bench.claim(name, "p50 at max_wait_ms = 0, ms", medians, goal=0.7, at_least=False)
    bench.claim(
        name,
        f"adaptive: p99 over the window of {_LONG_WINDOW_MS:g} ms",
        longest,
        goal=0.5,
        at_least=False,
    )


def convnet_limit(bench: Bench) -> None:
    """A model that fills a core: HTTP at saturation against the bare loop in this process."""
    name = "convnet_limit"
    ratios, idle, dearer = [], [], []
    seconds = _LONGER * bench.options.seconds
    with repository() as folder:
        serve_built(bench.options, folder, "convnet")
        with serving(bench.options, folder) as fleet:
            load = bench.load(
                fleet.infer_url("convnet"),
                models.vectors(built(bench.options), "convnet"),
                clients=2 * _BATCH,
                seconds=seconds,
            )
            for pair in range(bench.options.pairs):
                limit = _bare(bench, name, "convnet", pair, seconds=seconds)
                row = bench.measure(
                    name,
                    f"convnet, HTTP raw, {2 * _BATCH} clients",
                    pair,
                    load=load,
                    roles=fleet.roles(),
                )
                ratios.append(ratio(row.rate_s, limit.rate_s))
                executor_us = row.cpu_us["executor"]
                idle.append(1 - executor_us * row.rate_s / 1e6)
                dearer.append(ratio(executor_us, limit.cpu_us["executor"]))
    bench.claim(name, "HTTP over the bare loop", ratios, goal=0.9)
    bench.claim(
        name,
        "the gap: share of time in which the executor had no core",
        idle,
        goal=0.05,
        at_least=False,
        note="waiting for rows, or for a core that others had",
    )
    bench.claim(
        name,
        "the gap: executor's CPU per row over the bare loop's",
        dearer,
        goal=1.05,
        at_least=False,
        note="caches and memory shared with the rest, gathering and answering included",
    )


def http_peers(bench: Bench) -> None:
    """Ours and other servers on the same models and wires, taking turns."""
    name = "http_peers"
    wanted = [PEERS[peer] for peer in (OURS, *bench.options.peers)]
    cases = [("identity", "raw"), ("identity", "json"), ("mlp", "raw"), ("mlp", "json")]
    rates: dict[tuple[str, str, int], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for pair, (model, kind), peer in itertools.product(range(bench.options.pairs), cases, wanted):
        try:
            for row, clients in _peer_rows(bench, name, pair, model=model, kind=kind, peer=peer):
                rates[model, kind, clients][peer.name].append(row.rate_s)
        except RuntimeError as error:  # that peer does not start here: the others do
            bench.problems.append(f"{name}: {error}")
    for (model, kind, clients), by_peer in rates.items():
        ours = by_peer.pop(OURS, [])
        for peer_name, theirs in by_peer.items():
            bench.claim(
                name,
                f"{model} {kind}, {clients} clients: ours over {peer_name}",
                [ratio(mine, other) for mine, other in zip(ours, theirs, strict=False)],
                goal=_goal(peer_name, kind),
            )


def _peer_rows(
    bench: Bench, name: str, pair: int, *, model: str, kind: str, peer: Peer
) -> Iterator[tuple[Row, int]]:
    """The peer on one wire at each number of clients; nothing where it does not speak that wire."""
    wire = peer.json if kind == "json" else next((w for w in peer.wires if w in _RAW), "")
    if wire not in peer.wires:
        return
    how = Serving(folder=bench.options.folder, gateways=max(2, bench.options.gateways))
    vectors = models.vectors(built(bench.options), model)
    with serving_peer(peer, model, wire, how) as running:
        for clients in (64, 256):
            row = bench.measure(
                name,
                f"{model} {kind}, {clients} clients: {peer.name} ({wire})",
                pair,
                load=bench.load(running.url, vectors, wire=wire, clients=clients),
                roles=running.roles(),
            )
            yield row, clients


_RAW = ("raw", "oipbin")


def _goal(peer: str, kind: str) -> float:
    """What is wanted of ours over theirs."""
    if peer in _GOAL_OF_HANDLERS:
        return 1.0
    return _GOALS.get(peer, {}).get(kind, 5.0)
