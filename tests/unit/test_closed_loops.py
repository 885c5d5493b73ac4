"""The batcher on an invented device, under clients that ask again once they are answered."""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, replace

import pytest

from npufleet_worker.backends import SLOTS
from npufleet_worker.batching import Batcher, BatchPolicy, Item

_TIMER_S = 0.001
USUAL = BatchPolicy(max_batch_size=32, max_wait_ms=10)


@dataclass(frozen=True)
class World:
    """`fixed_ms + row_ms * rows` is a run; a batch costs `overhead_ms` more, told or not."""

    clients: int
    fixed_ms: float
    row_ms: float = 0.0
    overhead_ms: float = 0.0
    told: bool = True
    think_ms: float = 0.3
    policy: BatchPolicy = USUAL


@dataclass
class Seen:
    """`held_ms` are the times for which a row waited while the device was free."""

    per_s: float
    mean_batch: float
    held_ms: list[float]


def serve(world: World, *, seconds: float = 3.0) -> Seen:
    """Plays a while, the first third of which does not count."""
    dice, waiting = random.Random(1), Batcher[int](world.policy)
    for rows in (1, world.policy.max_batch_size):  # as warming up does it
        waiting.observe(rows, world.fixed_ms + world.row_ms * rows)
    events: list[tuple[float, str, int]] = []
    on_way: deque[tuple[list[int], float, bool]] = deque()
    sizes, held_ms, now, free_since = [], [], 0.0, 0.0

    def push(at: float, what: str, who: int = 0) -> None:
        heapq.heappush(events, (at, what, who))

    def run_s(rows: int) -> float:
        return (world.fixed_ms + world.row_ms * rows + world.overhead_ms) / 1000

    for client in range(world.clients):
        push(dice.uniform(0, 0.05), "ask", client)
    while events and now < seconds:
        now, what, who = heapq.heappop(events)
        if what == "ask":
            waiting.add(Item(1, now, None, 1, None, who), now)
        elif what == "done":
            clients, launched_s, idle = on_way.popleft()
            rows, free_since = len(clients), now
            if on_way:
                push(now + run_s(len(on_way[0][0])), "done")
            run_ms = run_s(rows) * 1000 - world.overhead_ms
            spent_ms = (now - launched_s) * 1000 - run_ms
            told = spent_ms if idle and world.told else None
            waiting.observe(rows, run_ms, overhead_ms=told)
            waiting.answered(rows, now)
            for client in clients:
                push(now + dice.uniform(0.5, 1.5) * world.think_ms / 1000, "ask", client)
        while len(on_way) < SLOTS:
            idle = not on_way
            batch = waiting.pull(now, device_free=idle)
            if batch is None:
                break
            if idle:
                push(now + run_s(batch.rows), "done")
            if now > seconds / 3:
                sizes.append(batch.rows)
                held_ms += [1000 * (now - max(i.arrival_s, free_since)) for i in batch.items]
            on_way.append(([item.payload for item in batch.items], now, idle))
        due_s = waiting.due_s(now)
        if due_s is not None and not on_way:
            push(max(due_s, now + _TIMER_S), "look")
    return Seen(sum(sizes) / (seconds * 2 / 3), sum(sizes) / len(sizes), held_ms)


def test_callers_of_a_tiny_model_share_what_a_batch_costs() -> None:
    """A run of 0.05 ms with 0.5 ms on top: what counts is both, whoever comes at whatever rate."""
    for think_ms in (2.0, 5.0, 10.0):
        world = World(64, 0.05, overhead_ms=0.5, think_ms=think_ms)
        known, unknown = serve(world), serve(replace(world, told=False))
        assert known.mean_batch > 1.01 * unknown.mean_batch
        assert known.per_s > 0.99 * unknown.per_s


@pytest.mark.parametrize("fixed_ms", [0.05, 1.0, 20.0])
def test_a_lone_client_never_waits(fixed_ms: float) -> None:
    """However long the run, and whatever the batch costs."""
    alone = serve(World(1, fixed_ms, row_ms=fixed_ms / 10, overhead_ms=0.5))
    assert max(alone.held_ms) == 0


@pytest.mark.parametrize("clients", [2, 8, 16])
def test_clients_that_fit_into_a_batch_share_it_instead_of_taking_turns(clients: int) -> None:
    """In halves that take turns, each would pay for a run of its own."""
    world = World(clients, 20, 1, think_ms=0.6, policy=BatchPolicy(32, max_wait_ms=50))
    together = serve(world)
    halves_per_s = clients / (2 * 20 + clients) * 1000
    assert together.mean_batch > 0.95 * clients
    assert together.per_s > 1.3 * halves_per_s


@pytest.mark.parametrize("clients", [40, 64])
def test_more_clients_than_a_batch_holds_lose_nothing_by_it(clients: int) -> None:
    """The batch ahead keeps the device busy, or the clients alternate as they did."""
    world = World(clients, 20, 1, think_ms=0.6, policy=BatchPolicy(32, max_wait_ms=50))
    alternating_per_s = clients / (20 * math.ceil(clients / 32) + clients) * 1000
    assert serve(world).per_s > 0.95 * min(alternating_per_s, 32 / 52 * 1000)
