"""The batcher under an invented clock."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npufleet_worker.batching import (
    SHARE,
    Batch,
    Batcher,
    BatchPolicy,
    GearChoice,
    Item,
    gear_for,
    rows_to_take,
)

HIGH, NORMAL, LOW = range(3)
PATIENT = BatchPolicy(max_batch_size=8, max_wait_ms=10, adaptive=False)
ADAPTIVE = BatchPolicy(max_batch_size=8, max_wait_ms=10)


def item(
    name: Any, *, rows: int = 1, at: float = 0.0, lane: int = NORMAL, key: str = "k",
    deadline: float | None = None,
) -> Item[Any]:  # fmt: skip
    return Item(rows, at, deadline, lane, key, name)


def batcher(policy: BatchPolicy, *items: Item[Any], now: float = 0.0) -> Batcher[Any]:
    made: Batcher[Any] = Batcher(policy)
    for each in items:
        made.add(each, now)
    return made


def names(batch: Batch[Any] | None) -> list[Any]:
    return [] if batch is None else [each.payload for each in batch.items]


@pytest.mark.parametrize(
    ("rows", "gears", "least", "wanted"),
    [
        (1, (), 1, 1),
        (5, (), 1, 5),
        (1, (), 4, 4),
        (1, (1, 4, 8), 1, 1),
        (2, (1, 4, 8), 1, 4),
        (8, (1, 4, 8), 1, 8),
        (9, (1, 4, 8), 1, 9),
        (1, (1, 4, 8), 2, 4),
    ],
)
def test_a_batch_is_padded_to_the_next_gear(
    rows: int, gears: tuple[int, ...], least: int, wanted: int
) -> None:
    """And at least to min_batch_size."""
    assert gear_for(rows, gears, least) == wanted


@pytest.mark.parametrize(
    ("waiting", "least", "upper", "lower", "nearest"),
    [
        (1, 1, 1, 1, 1),
        (3, 1, 3, 1, 3),
        (5, 1, 5, 4, 4),
        (6, 1, 6, 4, 6),
        (7, 1, 7, 4, 7),
        (8, 1, 8, 8, 8),
        (9, 1, 9, 8, 8),
        (12, 1, 12, 8, 12),
        (5, 8, 5, 5, 5),
        (9, 8, 9, 8, 8),
    ],
)
def test_rows_that_fill_no_gear_are_padded_or_left(
    waiting: int, least: int, upper: int, lower: int, nearest: int
) -> None:
    """By choice; gears below min_batch_size do not count."""
    gears = (1, 4, 8, 16)
    assert rows_to_take(waiting, gears, "upper", least) == upper
    assert rows_to_take(waiting, gears, "lower", least) == lower
    assert rows_to_take(waiting, gears, "nearest", least) == nearest


CHOICES = st.sampled_from(["upper", "lower", "nearest"])
GEARS = st.sets(st.integers(1, 16), min_size=1).map(lambda gears: tuple(sorted(gears)))


@given(st.integers(1, 16), GEARS, CHOICES, st.integers(1, 16))
def test_a_choice_never_takes_nothing_and_never_wastes_more_than_padding_would(
    waiting: int, gears: tuple[int, ...], choice: GearChoice, least: int
) -> None:
    """What is run for nothing and what is left behind are together no more than under "upper"."""
    taken = rows_to_take(waiting, gears, choice, least)
    assert 1 <= taken <= waiting
    padding = gear_for(taken, gears, least) - taken
    assert padding <= gear_for(waiting, gears, least) - waiting
    if choice == "nearest":
        assert padding + waiting - taken <= gear_for(waiting, gears, least) - waiting
    if taken < waiting:
        assert padding == 0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2)), min_size=1, max_size=40),
    GEARS,
    CHOICES,
)
def test_nothing_starves_by_the_choice_of_a_gear(
    waiting: list[tuple[int, int]], gears: tuple[int, ...], choice: GearChoice
) -> None:
    """Each batch holds the one whose turn it is, though rows of the same lane keep coming."""
    policy = BatchPolicy(8, 0, gears=gears, gear_choice=choice)
    full = batcher(policy, *(item(n, rows=r, lane=lane) for n, (r, lane) in enumerate(waiting)))
    left = set(range(len(waiting)))
    for turn in range(200 * len(waiting)):
        if not left:
            break
        full.add(item(-1, lane=turn % 3, at=1.0 + turn), 1.0 + turn)
        batch = full.pull(1.0 + turn, device_free=True)
        assert batch is not None
        assert batch.rows <= 8
        left -= set(names(batch))
    assert not left


def test_a_full_batch_goes_at_once_even_while_the_device_is_busy() -> None:
    """It is the one ahead; what is left stays open."""
    waiting = batcher(PATIENT, *(item(n) for n in range(9)))
    batch = waiting.pull(0.0, device_free=False)
    assert names(batch) == list(range(8))
    assert (len(waiting), waiting.rows) == (1, 1)
    assert waiting.pull(0.0, device_free=False) is None


def test_a_partial_batch_waits_from_arrival_not_from_now() -> None:
    """Time in the queue counts: the stream's clock says when it came."""
    waiting = batcher(PATIENT, item("a", at=100.0), now=100.006)
    assert waiting.due_s(100.006) == pytest.approx(100.010)
    assert waiting.pull(100.009, device_free=True) is None
    assert names(waiting.pull(100.010, device_free=True)) == ["a"]
    old = batcher(PATIENT, item("b", at=0.0), now=50.0)
    assert names(old.pull(50.0, device_free=True)) == ["b"]


def test_a_partial_batch_stays_open_while_the_device_is_busy() -> None:
    """Late binding: what comes meanwhile still gets in, and no timer runs for it."""
    waiting = batcher(PATIENT, item("a"))
    assert waiting.pull(5.0, device_free=False) is None
    assert waiting.due_s(5.0) is None
    waiting.add(item("b", at=5.0), 5.0)
    assert names(waiting.pull(5.0, device_free=True)) == ["a", "b"]


def test_a_deadline_cuts_the_wait_short() -> None:
    """By the time that the run is known to take."""
    policy = BatchPolicy(8, max_wait_ms=1000, adaptive=False)
    waiting = batcher(policy, item("a", deadline=0.5), item("b", deadline=0.9))
    waiting.observe(2, 100)
    due = waiting.due_s(0.0)
    assert due is not None
    assert 0.38 < due < 0.4
    assert waiting.pull(due - 0.01, device_free=True) is None
    assert names(waiting.pull(due, device_free=True)) == ["a", "b"]


def test_requests_of_different_keys_never_share_a_batch() -> None:
    """Shape-blind merging gives one caller's answer to another."""
    waiting = batcher(PATIENT, item(1, key="a"), item(2, key="b"), item(3, key="a"))
    assert names(waiting.pull(1.0, device_free=True)) == [1, 3]
    assert names(waiting.pull(1.0, device_free=True)) == [2]


def test_lanes_are_served_in_their_order_and_oldest_first_within() -> None:
    """A redelivered entry takes the place of its arrival, not the end."""
    waiting = batcher(
        BatchPolicy(3, 0),
        item("low", lane=LOW, at=0.1),
        item("late", at=0.9),
        item("normal", at=0.5),
        item("high", lane=HIGH, at=0.95),
        now=1.0,
    )
    assert names(waiting.pull(1.0, device_free=True)) == ["high", "normal", "late"]
    assert names(waiting.pull(1.0, device_free=True)) == ["low"]


def test_a_flood_of_high_never_starves_the_lower_lanes() -> None:
    """Each lower lane gets its small share of the rows, and not more."""
    waiting = batcher(BatchPolicy(8, 0))
    gone = [0, 0, 0]
    backlog = (16, 3, 3)
    for lane, count in enumerate(backlog):
        for _ in range(count):
            waiting.add(item(lane, lane=lane), 0.0)
    for _ in range(500):
        batch = waiting.pull(0.0, device_free=False)
        assert batch is not None
        for lane in names(batch):
            gone[lane] += 1
            waiting.add(item(lane, lane=lane), 0.0)
    total = sum(gone)
    for lane in (NORMAL, LOW):
        assert 0.8 * SHARE <= gone[lane] / total <= 1.2 * SHARE


def test_a_large_request_is_passed_by_smaller_ones_but_not_for_ever() -> None:
    """Its lane's oldest goes first next time."""
    waiting = batcher(PATIENT, item("a", rows=5), item("big", rows=6), item("c", rows=3))
    assert names(waiting.pull(0.0, device_free=False)) == ["a", "c"]
    assert names(waiting.pull(1.0, device_free=True)) == ["big"]


def test_an_adaptive_batch_goes_at_once_when_nobody_else_is_about() -> None:
    """One client that waits for each answer never pays max_wait_ms, fast model or slow."""
    for run_ms in (0.2, 60.0):
        waiting = batcher(ADAPTIVE)
        waiting.observe(1, run_ms)
        now = 0.0
        for n in range(300):
            waiting.add(item(n, at=now), now)
            assert names(waiting.pull(now, device_free=True)) == [n]
            now += run_ms / 1000 + 0.0005


def test_an_adaptive_batch_waits_for_a_row_that_is_sure_to_come_soon() -> None:
    """Arrivals every millisecond and a run of 60: a little patience fills the batch."""
    waiting = batcher(ADAPTIVE)
    waiting.observe(8, 60)
    for n in range(3000):
        waiting.add(item(n, at=n / 1000), n / 1000)
        waiting.pull(n / 1000, device_free=False)
    waiting.drop(lambda _: True)
    waiting.add(item("first", at=3.1), 3.1)
    assert waiting.pull(3.1, device_free=True) is None
    waiting.add(item("second", at=3.101), 3.101)
    assert waiting.pull(3.101, device_free=True) is None
    due = waiting.due_s(3.101)
    assert due is not None
    # Nobody comes any more: it goes well before max_wait.
    assert due < 3.109
    assert names(waiting.pull(due, device_free=True)) == ["first", "second"]


def test_what_a_batch_costs_on_top_of_its_run_counts_when_waiting_is_weighed() -> None:
    """Nobody waits a millisecond for a run of half a one; for what three cost, it pays."""
    for overhead_ms, waits in ((0.0, False), (3.0, True)):
        waiting = batcher(ADAPTIVE)
        for _ in range(30):
            waiting.observe(1, 0.5, overhead_ms=overhead_ms)
        for n in range(3000):
            waiting.add(item(n, at=n / 1000), n / 1000)
            waiting.pull(n / 1000, device_free=False)
        waiting.drop(lambda _: True)
        waiting.add(item("a", at=3.0), 3.0)
        assert (waiting.pull(3.0, device_free=True) is None) is waits


def test_a_batch_waits_for_callers_that_come_again_but_not_beyond_its_window() -> None:
    """Four that were answered have always come again within the millisecond."""
    for max_wait_ms, waits in ((50, True), (10, False)):
        waiting = batcher(BatchPolicy(8, max_wait_ms))
        waiting.observe(1, 21)
        waiting.observe(8, 28)
        for n in range(20):
            waiting.answered(4, float(n))
            for each in range(4):
                waiting.add(item(each, at=n + 0.001), n + 0.001)
            waiting.drop(lambda _: True)
        waiting.add(item("other", at=19.98), 19.98)
        waiting.answered(4, 20.0)
        assert (waiting.pull(20.0, device_free=True) is None) is waits
        if waits:
            for each in range(4):
                waiting.add(item(each, at=20.001), 20.001)
            assert names(waiting.pull(20.001, device_free=True)) == ["other", 0, 1, 2, 3]


def test_an_adaptive_batch_waits_for_rows_in_decode_if_their_run_is_long() -> None:
    """Not when the run is shorter than the decoding."""
    for run_ms, waits in ((60.0, True), (1.0, False)):
        waiting = batcher(ADAPTIVE)
        waiting.observe(1, run_ms)
        for n in range(20):
            waiting.expect(float(n))
            waiting.unexpect(n + 0.004)
        waiting.expect(50.0)
        waiting.add(item("a", at=50.0), 50.0)
        assert (waiting.pull(50.0, device_free=True) is None) is waits
        if waits:
            waiting.unexpect(50.004)
            waiting.add(item("b", at=50.0), 50.004)
            assert names(waiting.pull(50.004, device_free=True)) == ["a", "b"]


def test_what_never_fits_is_refused() -> None:
    """Whoever reads requests names the bound; here it is a mistake."""
    with pytest.raises(ValueError, match="never fit"):
        batcher(PATIENT, item("a", rows=9))


def test_dropped_items_are_gone() -> None:
    """Expired and cancelled ones neither run nor count."""
    waiting = batcher(PATIENT, item("a", rows=2), item("b", rows=3, key="other"), item("c"))
    assert [each.payload for each in waiting.drop(lambda each: each.rows > 1)] == ["a", "b"]
    assert (len(waiting), waiting.rows) == (1, 1)
    assert names(waiting.pull(1.0, device_free=True)) == ["c"]
    assert waiting.due_s(1.0) is None


@dataclass
class Seen:
    added: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "busy", "free", "drop", "expect", "answered", "wait"]),
        st.integers(1, 8),  # rows
        st.integers(0, 2),  # lane
        st.sampled_from("ab"),  # key
        st.floats(0, 0.02),  # age, or seconds that pass
        st.none() | st.floats(0, 0.05),  # deadline after arrival
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.booleans(), st.integers(0, 30), CHOICES)
def test_every_item_leaves_once_in_a_batch_of_its_own_kind(
    steps: list[tuple[str, int, int, str, float, float | None]],
    adaptive: bool,
    run_ms: int,
    choice: GearChoice,
) -> None:
    """Never more rows than allowed, never two keys in a batch, counts always right."""
    policy = BatchPolicy(8, 10, adaptive=adaptive, gears=(1, 3, 4, 8), gear_choice=choice)
    waiting, seen, now, expected = batcher(policy), Seen(), 100.0, 0
    waiting.observe(8, run_ms)

    def pulled(*, free: bool) -> None:
        while batch := waiting.pull(now, device_free=free):
            assert batch.rows == sum(each.rows for each in batch.items) <= 8
            assert {each.key for each in batch.items} == {batch.key}
            seen.left += names(batch)

    for action, rows, lane, key, span, deadline in steps:
        if action == "add":
            arrival = now - span
            due = None if deadline is None else arrival + deadline
            waiting.add(Item(rows, arrival, due, lane, key, len(seen.added)), now)
            seen.added.append(len(seen.added))
        elif action == "wait":
            now += span
        elif action == "drop":
            seen.left += [each.payload for each in waiting.drop(lambda each: each.rows == 7)]
        elif action == "answered":
            waiting.answered(rows, now)
        elif action == "expect":
            waiting.expect(now)
            expected += 1
        else:
            pulled(free=action == "free")
        assert len(waiting) == len(seen.added) - len(seen.left)
    for _ in range(expected):
        waiting.unexpect(now)
    now += 1.0
    pulled(free=True)
    assert sorted(seen.left) == seen.added
    assert waiting.rows == 0


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 0.03), st.integers(1, 8), st.integers(0, 2), st.sampled_from("ab"))
    ),
    st.booleans(),
    st.integers(0, 100),
)
def test_nothing_waits_beyond_its_time_on_a_free_device(
    arrivals: list[tuple[float, int, int, str]], adaptive: bool, run_ms: int
) -> None:
    """Whoever looks at the times that `due_s` names sees every item go within max_wait."""
    waiting = batcher(BatchPolicy(8, max_wait_ms=10, adaptive=adaptive))
    waiting.observe(1, run_ms / 2)
    waiting.observe(8, run_ms)
    now = 100.0

    def look() -> None:
        while batch := waiting.pull(now, device_free=True):
            assert all(now - each.arrival_s <= 0.010 + 1e-5 for each in batch.items)
            waiting.answered(batch.rows, now)

    for gap, rows, lane, key in arrivals:
        end = now + gap
        while (due := waiting.due_s(now)) is not None and due <= end:
            assert due > now
            now = due
            look()
        now = end
        waiting.add(Item(rows, now, None, lane, key, None), now)
        look()
    while (due := waiting.due_s(now)) is not None:
        now = due
        look()
    assert len(waiting) == 0
