"""Where a Redis server is and how to enter it, resolved from a URL by redis-py.

Serves both the thin connection of the hot path and redis-py's clients, whose every knob is set
here: redis-py's own defaults retry, and a retried XADD is a second request.
"""

import re
import ssl
from dataclasses import dataclass, field

import redis
import redis.asyncio
from redis.asyncio.connection import UnixDomainSocketConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from npufleet.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server. `path` is set for a unix socket, `host` and `port` otherwise."""

    host: str
    port: int
    path: str | None
    db: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)


def resolve(url: str) -> Endpoint:
    """The server that `redis://`, `rediss://` or `unix://` names; ConfigurationError otherwise."""
    try:
        pool = redis.asyncio.ConnectionPool.from_url(url)
        connection = pool.make_connection()  # type: ignore[no-untyped-call]  # untyped in redis-py
    except (ValueError, TypeError, redis.RedisError):
        # Not the library's own words: they quote pieces of the URL, maybe of its password.
        raise ConfigurationError(
            f"{shown(url)} is not a Redis URL; redis://host:port/db, rediss://host:port/db or "
            "unix:///path (a password's / @ : ? # as %2F %40 %3A %3F %23)"
        ) from None
    unix = isinstance(connection, UnixDomainSocketConnection)
    context = getattr(connection, "ssl_context", None)
    return Endpoint(
        host="" if unix else str(connection.host),
        port=0 if unix else int(connection.port),
        path=connection.path if unix else None,
        db=int(connection.db or 0),
        username=connection.username,
        password=connection.password,
        tls=context.get() if context is not None else None,
    )


def client(url: str, *, timeout_s: float = 5.0) -> redis.asyncio.Redis:
    """A redis-py client for everything off the hot path: no retries, RESP2, bytes."""
    keepalive = {} if url.startswith("unix:") else {"socket_keepalive": True}
    return redis.asyncio.Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        health_check_interval=30,
        retry=AsyncRetry(NoBackoff(), 0),
        max_connections=8,
        **keepalive,
    )


def sync_client(url: str, *, timeout_s: float = 5.0) -> redis.Redis:
    """The same, blocking: for command lines and checks at start."""
    return redis.Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )


def shown(url: str) -> str:
    """The URL without its password, for logs, errors and /health."""
    scheme, slashes, rest = url.partition("://")
    # By the last @, whatever a careless password holds, and in the query, where it may stand too.
    login, at, where = rest.rpartition("@")
    user = login.partition(":")[0] + ":***" if ":" in login else login
    return scheme + slashes + user + at + re.sub(r"(?<=password=)[^&]*", "***", where)
