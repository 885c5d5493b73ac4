"""How many requests a second a worker can end. Pure: the clock (monotonic seconds) is passed in.

Only an interval in which it never had to wait for work shows what it can; any other one shows that
it can do at least as much, which is no estimate: a worker that was asked once in five seconds is
not one that takes five seconds. Gateways refuse by it what cannot meet its deadline.
"""


class Rate:
    """Counts between two calls of `measure`; 0, not known, until an interval was all work."""

    def __init__(self, now_s: float) -> None:
        self.per_s = 0.0
        self._since_s = now_s
        self._ended = 0
        self._waited = False

    def ended(self) -> None:
        """One request has its reply."""
        self._ended += 1

    def waited(self) -> None:
        """There was nothing to do for a while."""
        self._waited = True

    def measure(self, now_s: float) -> float:
        """The rate as of now, and the begin of a new interval."""
        elapsed_s = now_s - self._since_s
        if elapsed_s <= 0:
            return self.per_s
        self._learn(self._ended / elapsed_s)
        self._since_s, self._ended, self._waited = now_s, 0, False
        return self.per_s

    def _learn(self, seen: float) -> None:
        if self._waited:
            # No estimate where there was none; proof enough that one was too low.
            self.per_s = max(self.per_s, seen) if self.per_s else 0.0
        elif seen < self.per_s:
            # Half way down: one stall of Redis or of a device does not make a worker slow.
            self.per_s = (self.per_s + seen) / 2
        else:
            self.per_s = seen
