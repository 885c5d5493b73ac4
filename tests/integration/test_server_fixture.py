"""The server that the tests run on."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import redis


def test_the_server_is_real_and_keeps_everything(redis_client: "redis.Redis", prefix: str) -> None:
    """Streams work on it, and it refuses rather than evicts when it is full."""
    entry = redis_client.xadd(f"{prefix}:{{m}}:normal", {"v": "1"})

    assert redis_client.xrange(f"{prefix}:{{m}}:normal") == [(entry, {b"v": b"1"})]
    assert redis_client.info("memory")["maxmemory_policy"] == "noeviction"
