"""The server's clock as this process sees it: stream ids to points of the monotonic clock.

One clock counts a request's age, the server's; it is read from every answer that carries it. Knows
nothing of connections.
"""

_FORGET_S = 60.0


class ServerClock:
    """Monotonic seconds minus server seconds, as small as recent answers have shown it.

    An answer travels before it is seen, so that every observation errs to the late side: the
    smallest one of about a minute is the best.
    """

    def __init__(self) -> None:
        self._offset_s: float | None = None
        self._since_s = 0.0

    def observe(self, server_ms: int, *, now_s: float) -> None:
        """Take note of a server time that was just read."""
        offset_s = now_s - server_ms / 1000
        if self._offset_s is None or offset_s < self._offset_s or now_s - self._since_s > _FORGET_S:
            self._offset_s, self._since_s = offset_s, now_s

    def arrival_s(self, entry_id: bytes, *, now_s: float) -> float:
        """When the entry was added, on the monotonic clock; never in the future."""
        if self._offset_s is None:
            return now_s
        server_ms = int(entry_id.partition(b"-")[0])
        return min(now_s, self._offset_s + server_ms / 1000)
