"""What a process of the fleet does for itself at its start. Knows nothing of its work."""

import gc

_YOUNG = 50_000
"""Allocations between two collections of the young generation (Python's own: 700)."""


def calm_collector() -> None:
    """Collect garbage rarely, and never look at what was loaded at the start.

    Requests leave no cycles behind, so that collections find next to nothing: they took 8% of a
    gateway's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 20)
