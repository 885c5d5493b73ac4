"""How many requests a second a worker can end. Pure: the clock (monotonic seconds) is passed in.

What it did while it never had to wait for work is what it can; when it had to, it can at least do
what it did. Gateways refuse by it what cannot meet its deadline.
"""


class Rate:
    """Counts between two calls of `measure`; 0 until something has been ended."""

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
        seen = self._ended / elapsed_s
        self.per_s = max(self.per_s, seen) if self._waited else seen
        self._since_s, self._ended, self._waited = now_s, 0, False
        return self.per_s
