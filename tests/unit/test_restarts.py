"""When a dead child is started again."""

from npufleet.child import Restarts


def test_waits_grow_until_it_gives_up() -> None:
    """A child that dies at once again and again is given up, not restarted for ever."""
    restarts = Restarts(most=5, longest_s=2.0)

    waits = [restarts.after(0.1) for _ in range(5)]

    assert waits == [0.5, 1.0, 2.0, 2.0, None]


def test_a_child_that_lived_starts_with_a_clean_slate() -> None:
    """One crash a day never adds up to giving up."""
    restarts = Restarts(most=3, stable_s=10.0)

    waits = [restarts.after(lived_s) for lived_s in (0.1, 60.0, 0.1, 60.0, 60.0)]

    assert None not in waits
