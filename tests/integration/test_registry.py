"""The registry's reading side, against a real server: it can always be closed."""

import asyncio
import random

from npufleet.endpoint import client
from npufleet.registry import Registry


async def test_it_closes_even_in_the_middle_of_a_read(redis_url: str, prefix: str) -> None:
    """A cancellation that is lost in a read would keep a process from ending."""
    redis = client(redis_url)
    await redis.sadd(f"{prefix}:models", *(f"m{n}" for n in range(8)))
    for _ in range(30):
        registry = Registry(redis, prefix=prefix, refresh_s=0.001)
        await registry.start()
        await asyncio.sleep(random.uniform(0, 0.01))  # anywhere in a read, that is the point
        async with asyncio.timeout(10):
            await registry.close()
    await redis.aclose()
