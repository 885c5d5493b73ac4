"""What a worker says it can do, from what it did."""

from npufleet_worker.rate import Rate


def test_a_busy_interval_is_what_a_worker_can_do() -> None:
    """It never waited for work: its rate is its limit, also where that has fallen."""
    rate = Rate(0.0)
    for _ in range(100):
        rate.ended()
    assert rate.measure(2.0) == 50.0

    for _ in range(30):
        rate.ended()
    assert rate.measure(3.0) == 30.0


def test_an_idle_interval_only_shows_that_it_can_do_at_least_as_much() -> None:
    """A quiet hour does not make a worker slow."""
    rate = Rate(0.0)
    for _ in range(100):
        rate.ended()
    rate.measure(1.0)

    rate.waited()
    rate.ended()

    assert rate.measure(11.0) == 100.0


def test_nothing_is_claimed_before_anything_was_done() -> None:
    """0 says "not known", by which nobody is refused."""
    rate = Rate(5.0)
    rate.waited()

    assert rate.measure(5.0) == 0.0
    assert rate.measure(6.0) == 0.0
