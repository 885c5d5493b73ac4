"""What a worker says it can do, from what it did."""

from npufleet_worker.rate import Rate


def interval(rate: Rate, *, ended: int, until_s: float, waited: bool = False) -> float:
    for _ in range(ended):
        rate.ended()
    if waited:
        rate.waited()
    return rate.measure(until_s)


def test_a_busy_interval_is_what_a_worker_can_do() -> None:
    """It never waited for work: that is its limit, and it follows where the limit moves."""
    rate = Rate(0.0)

    assert interval(rate, ended=100, until_s=2.0) == 50.0
    assert interval(rate, ended=80, until_s=3.0) == 80.0
    assert interval(rate, ended=40, until_s=4.0) == 60.0
    assert interval(rate, ended=40, until_s=5.0) == 50.0


def test_a_trickle_is_no_estimate() -> None:
    """Asked once in five seconds is not slow: a burst after it must not be refused."""
    rate = Rate(0.0)

    assert interval(rate, ended=1, until_s=5.0, waited=True) == 0.0
    assert interval(rate, ended=1, until_s=10.0, waited=True) == 0.0


def test_an_idle_interval_can_only_show_that_it_does_more() -> None:
    """A quiet hour does not make a worker slow; more than was known makes it faster."""
    rate = Rate(0.0)
    interval(rate, ended=100, until_s=1.0)

    assert interval(rate, ended=1, until_s=11.0, waited=True) == 100.0
    assert interval(rate, ended=150, until_s=12.0, waited=True) == 150.0


def test_one_stall_does_not_make_a_worker_slow() -> None:
    """Nothing ended in a busy interval: half way down, not to nothing."""
    rate = Rate(0.0)
    interval(rate, ended=100, until_s=1.0)

    assert interval(rate, ended=0, until_s=6.0) == 50.0


def test_nothing_is_claimed_before_anything_was_done() -> None:
    """0 says "not known", by which nobody is refused."""
    rate = Rate(5.0)

    assert interval(rate, ended=0, until_s=5.0, waited=True) == 0.0
    assert interval(rate, ended=0, until_s=6.0) == 0.0
