"""How many requests one gateway process has in its hands, and whether it takes any more.

Knows nothing of what the requests are.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from npufleet.errors import Overloaded, Unavailable


class Admission:
    """Bounds the requests in flight; `draining` ends the taking of new ones for good."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.in_flight = 0
        self.draining = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """One request for as long as it lasts. Raises Overloaded, or Unavailable when draining."""
        if self.draining:
            raise Unavailable("this gateway is shutting down", retry_after_s=1)
        if self.in_flight >= self._most:
            raise Overloaded(
                f"this gateway already waits for {self.in_flight} requests, its limit",
                retry_after_s=1,
            )
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
