"""How much a worker holds, under an invented clock."""

import pytest

from npufleet_worker.backends import SLOTS
from npufleet_worker.budget import UNDER_WAY, Budget

HIGH, NORMAL = 1, 2


def budget(run_ms: float) -> Budget:
    """One that has seen many batches of that length."""
    made = Budget()
    for _ in range(100):
        made.ran(run_ms)
    return made


@pytest.mark.parametrize(
    ("run_ms", "batches", "rows"),
    [
        (200.0, SLOTS, 2 * 32),
        (25.0, SLOTS, 2 * 32),
        (10.0, UNDER_WAY, 3 * 32),
        (1.1, UNDER_WAY, 5 * 32),
        (0.1, UNDER_WAY, 8 * 32),
    ],
)
def test_the_shorter_the_runs_the_more_is_held_within_a_bound(
    run_ms: float, batches: int, rows: int
) -> None:
    """Two batches, three where staging would show, 5 ms of work where that is more."""
    held = budget(run_ms)

    assert held.batches(0.0) == batches
    assert held.rows(32, 0.0) == rows


def test_nothing_is_known_before_the_first_run() -> None:
    """Two batches then: what everybody gets."""
    assert Budget().rows(32, 0.0) == 2 * 32


def test_no_batch_more_where_what_is_urgent_would_wait_for_it() -> None:
    """As long as several lanes are in use, and ten seconds beyond."""
    held = budget(10.0)
    held.saw(NORMAL, 100.0)
    assert held.batches(100.0) == UNDER_WAY

    held.saw(HIGH, 101.0)
    held.saw(NORMAL, 105.0)
    assert held.batches(105.0) == SLOTS
    assert held.batches(111.5) == UNDER_WAY
