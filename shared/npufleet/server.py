"""Whether a Redis server will do: its version, what it does when full, what survives a restart.

`examine` decides, on what INFO says; `check` and `check_async` ask, log the warnings and raise the
refusals. Knows nothing of keys and requests.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import redis
import redis.asyncio
from redis.exceptions import NoPermissionError

from npufleet.endpoint import shown
from npufleet.errors import ConfigurationError, Unavailable

logger = logging.getLogger(__name__)

# What the scripts and commands of the wire format need.
MINIMUM = {"redis": (7, 0), "valkey": (8, 0)}


@dataclass(frozen=True)
class Finding:
    """Something about the server that an operator should change, and the exact way to."""

    severity: Literal["refuse", "warn"]
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.message}; to fix: {self.fix}"


def check(client: redis.Redis, url: str) -> None:
    """Ask the server and act on it: see `conclude`.

    Raises ConfigurationError when the server will not do or refuses our credentials, Unavailable
    when it cannot be reached.
    """
    try:
        info: Mapping[str, Any] | None = client.info()
    except NoPermissionError:
        info = None
    except redis.RedisError as error:
        raise _translated(error, url) from error
    conclude(info, url)


async def check_async(client: redis.asyncio.Redis, url: str) -> None:
    """The same for asyncio."""
    try:
        info: Mapping[str, Any] | None = await client.info()
    except NoPermissionError:
        info = None
    except redis.RedisError as error:
        raise _translated(error, url) from error
    conclude(info, url)


def conclude(info: Mapping[str, Any] | None, url: str) -> None:
    """Log what should be changed; raise ConfigurationError for what must be."""
    findings = examine(info)
    for finding in findings:
        if finding.severity == "warn":
            logger.warning("%s", finding, extra={"redis": shown(url)})
    refusals = [str(finding) for finding in findings if finding.severity == "refuse"]
    if refusals:
        raise ConfigurationError(f"Redis at {shown(url)} will not do: " + " | ".join(refusals))


def examine(info: Mapping[str, Any] | None) -> tuple[Finding, ...]:
    """Findings on the answer of INFO; None where the server does not let us ask."""
    if info is None:
        return (
            Finding(
                "warn",
                "the server could not be checked, since this user may not call INFO",
                "ACL SETUSER <user> +info",
            ),
        )
    found = (_version(info), _replica(info), _eviction(info), _persistence(info))
    return tuple(finding for finding in found if finding)


def _version(info: Mapping[str, Any]) -> Finding | None:
    # Valkey keeps `redis_version` at 7.2.4 for old clients and has a field of its own.
    kind = "valkey" if "valkey_version" in info else "redis"
    text = str(info.get(f"{kind}_version", ""))
    numbers = tuple(int(number) for number in re.findall(r"\d+", text)[:2])
    least = MINIMUM[kind]
    if numbers >= least:
        return None
    return Finding(
        "refuse",
        f"it is {kind.capitalize()} {text or 'of unknown version'}",
        f"use {kind.capitalize()} {least[0]}.{least[1]} or newer",
    )


def _replica(info: Mapping[str, Any]) -> Finding | None:
    if info.get("role") != "slave":
        return None
    primary = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
    return Finding(
        "refuse",
        "it is a replica, which takes no writes",
        f"point NPUFLEET_REDIS_URL at its primary, {primary}",
    )


def _eviction(info: Mapping[str, Any]) -> Finding | None:
    policy = info.get("maxmemory_policy")
    fix = _setting("maxmemory-policy", "noeviction")
    if policy is None:
        message = "it does not tell its maxmemory-policy; any but noeviction loses queued work"
        return Finding("warn", message, fix)
    if policy != "noeviction":
        return Finding("refuse", f"maxmemory-policy {policy} loses queued work when full", fix)
    return None


def _persistence(info: Mapping[str, Any]) -> Finding | None:
    if info.get("aof_enabled") != 0:
        return None
    return Finding(
        "warn",
        "appendonly is off: queued work is lost when it restarts",
        _setting("appendonly", "yes"),
    )


def _setting(name: str, value: str) -> str:
    return f"`{name} {value}` in its configuration, or `CONFIG SET {name} {value}`"


def _translated(error: redis.RedisError, url: str) -> ConfigurationError | Unavailable:
    if isinstance(error, redis.AuthenticationError):
        return ConfigurationError(f"Redis at {shown(url)} refuses the credentials: {error}")
    return Unavailable(f"Redis at {shown(url)} cannot be reached: {error}")
