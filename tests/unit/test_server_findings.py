"""What is found on a Redis server's INFO."""

from typing import Any

import pytest

from npufleet.errors import ConfigurationError
from npufleet.server import conclude, examine

GOOD: dict[str, Any] = {
    "redis_version": "7.0.15",
    "role": "master",
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
}


def test_a_server_that_will_do_gives_no_finding() -> None:
    """Redis 7.0 and Valkey 8.0 with an append-only file and without eviction are what we want."""
    valkey = {**GOOD, "redis_version": "7.2.4", "valkey_version": "8.0.1"}

    assert examine(GOOD) == ()
    assert examine(valkey) == ()


@pytest.mark.parametrize(
    ("change", "says", "fix"),
    [
        ({"redis_version": "6.2.14"}, "Redis 6.2.14", "Redis 7.0 or newer"),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.5"}, "Valkey 7.2.5", "Valkey 8.0"),
        ({"redis_version": ""}, "unknown version", "Redis 7.0"),
        ({"maxmemory_policy": "allkeys-lru"}, "allkeys-lru", "`maxmemory-policy noeviction`"),
        ({"maxmemory_policy": "volatile-ttl"}, "volatile-ttl", "CONFIG SET maxmemory-policy"),
        (
            {"role": "slave", "master_host": "a.example", "master_port": 6379},
            "replica",
            "a.example:6379",
        ),
    ],
    ids=["old redis", "old valkey", "no version", "lru", "ttl", "replica"],
)
def test_a_server_that_would_lose_work_is_refused(
    change: dict[str, Any], says: str, fix: str
) -> None:
    """The refusal names what is wrong and the exact thing to change."""
    (finding,) = examine(GOOD | change)

    assert finding.severity == "refuse"
    assert says in finding.message
    assert fix in finding.fix
    with pytest.raises(ConfigurationError, match="will not do"):
        conclude(GOOD | change, "redis://u:secret@h:1/0")


def test_a_server_without_an_append_only_file_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may be wanted, so it is a warning, with the line to change; no password is logged."""
    conclude(GOOD | {"aof_enabled": 0}, "redis://u:secret@h:1/0")

    assert "`appendonly yes`" in caplog.text
    assert "secret" not in caplog.text + str([vars(record) for record in caplog.records])


@pytest.mark.parametrize("info", [None, {k: v for k, v in GOOD.items() if "policy" not in k}])
def test_what_cannot_be_seen_is_a_warning(info: dict[str, Any] | None) -> None:
    """A managed service may hide INFO or parts of it; that is no reason not to start."""
    (finding,) = examine(info)

    assert finding.severity == "warn"


def test_all_refusals_are_told_at_once() -> None:
    """An operator with two mistakes corrects both in one go."""
    bad = GOOD | {"redis_version": "6.0.0", "maxmemory_policy": "allkeys-lru"}

    with pytest.raises(ConfigurationError, match=r"Redis 6\.0\.0.*allkeys-lru"):
        conclude(bad, "redis://h:1/0")
