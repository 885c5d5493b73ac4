"""Waiting for a condition, with a limit; the tests never sleep for a fixed time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], *, what: str, limit_s: float = 10.0) -> T:
    """Return the first true value of `condition()`; fail naming `what` after `limit_s`."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {limit_s} s in vain for: {what}"
        time.sleep(0.01)
    return value


async def wait_until_async(
    condition: Callable[[], Awaitable[T]], *, what: str, limit_s: float = 10.0
) -> T:
    """The same for a coroutine function."""
    end = time.monotonic() + limit_s
    while not (value := await condition()):
        assert time.monotonic() < end, f"waited {limit_s} s in vain for: {what}"
        await asyncio.sleep(0.01)
    return value
