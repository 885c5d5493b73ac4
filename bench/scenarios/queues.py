"""Scenarios straight on the queue: batch jobs, and lanes that compete."""

from bench import models
from bench.loads import Load
from bench.measuring import Bench
from bench.peers.catalog import PEERS
from bench.peers.serving import Serving
from bench.peers.serving import serving as serving_peer
from bench.results import Row, ratio
from bench.scenarios.devices import A_MS, B_MS, GEAR
from bench.scenarios.repository import built, repository, serve_built, serving

_IN_FLIGHT = 1024
_YARDSTICK = "mosec"
_OVERLOAD = 1.2
_SHARES = {"high": 0.2, "normal": 0.5, "low": 0.5}
"""Of the device's rate; together the overload."""
_LOW_SHARE = 0.05


def direct_producers(bench: Bench) -> None:
    """A batch job on a model that costs nothing, against the fastest peer's raw HTTP."""
    name = "direct_producers"
    ratios = []
    vectors = models.vectors(built(bench.options), "identity")
    for pair in range(bench.options.pairs):
        with repository() as folder:
            serve_built(bench.options, folder, "identity")
            with serving(bench.options, folder) as fleet:
                load = bench.load(fleet.redis_url, vectors, model="identity", clients=_IN_FLIGHT)
                ours = bench.measure(
                    name,
                    f"identity, map of {_IN_FLIGHT} in flight",
                    pair,
                    load=load,
                    roles=fleet.roles(),
                )
        if _YARDSTICK in bench.options.peers:
            ratios.append(ratio(ours.rate_s, _yardstick(bench, name, pair).rate_s))
    bench.claim(
        name,
        f"direct over {_YARDSTICK}'s raw HTTP",
        ratios,
        goal=1.3,
        note="" if ratios else f"not measured: --peers {_YARDSTICK} was not asked for",
    )


def _yardstick(bench: Bench, name: str, pair: int) -> Row:
    vectors = models.vectors(built(bench.options), "identity")
    how = Serving(folder=bench.options.folder)
    with serving_peer(PEERS[_YARDSTICK], "identity", "raw", how) as peer:
        load = bench.load(peer.url, vectors, clients=64)
        return bench.measure(
            name, f"identity, {_YARDSTICK} raw, 64 clients", pair, load=load, roles=peer.roles()
        )


def priorities(bench: Bench) -> None:
    """All lanes at 120% of what the device can do: high hardly notices, low gets its share."""
    name = "priorities"
    p99_ratios, low_shares = [], []
    for pair in range(bench.options.pairs):
        with repository() as folder:
            models.serve_simulated(folder, "sim", a_ms=A_MS, b_ms=B_MS, gears=[GEAR])
            with serving(bench.options, folder) as fleet:
                loads = _lanes(bench, fleet.redis_url)
                alone = bench.measure(
                    name, "high alone", pair, load=loads["high"], roles=fleet.roles()
                )
                cases = [f"{lane}, all at {_OVERLOAD:.0%}" for lane in loads]
                high, normal, low = bench.measure_together(
                    name, cases, pair, loads=list(loads.values()), roles=fleet.roles()
                )
        p99_ratios.append(ratio(high.p99_ms, alone.p99_ms))
        low_shares.append(ratio(low.rate_s, high.rate_s + normal.rate_s + low.rate_s))
    bench.claim(name, "high: p99 under overload over alone", p99_ratios, goal=2, at_least=False)
    bench.claim(name, "low: share of what was answered", low_shares, goal=_LOW_SHARE)


def _lanes(bench: Bench, redis_url: str) -> dict[str, Load]:
    device_rate_s = GEAR / (A_MS + B_MS * GEAR) * 1000
    return {
        lane: bench.load(
            redis_url,
            models.vectors(built(bench.options), "sim"),
            model="sim",
            lane=lane,
            rate_s=share * device_rate_s,
            seed=seed,
        )
        for seed, (lane, share) in enumerate(_SHARES.items(), start=1)
    }
