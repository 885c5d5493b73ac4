"""Checking real servers, good and bad."""

import pytest

from npufleet.endpoint import client, sync_client
from npufleet.errors import ConfigurationError, Unavailable
from npufleet.server import check, check_async
from tests.support.valkey import connect, running_server


def test_a_good_server_passes_with_a_word_about_its_persistence(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The tests' own server keeps nothing on disk, which is worth a warning and no more."""
    with sync_client(redis_url) as connection:
        check(connection, redis_url)

    assert "appendonly is off" in caplog.text


async def test_the_asyncio_check_does_the_same(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Gateway and worker check inside their event loop."""
    async with client(redis_url) as connection:
        await check_async(connection, redis_url)

    assert "appendonly is off" in caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--maxmemory-policy", "allkeys-lru"], "CONFIG SET maxmemory-policy noeviction"),
        (
            ["--replicaof", "127.0.0.1 1"],
            r"point NPUFLEET_REDIS_URL at its primary, 127\.0\.0\.1:1",
        ),
    ],
    ids=["evicting", "replica"],
)
async def test_a_server_that_would_lose_work_is_refused(options: list[str], says: str) -> None:
    """Both checks refuse it, naming the exact line to change."""
    with running_server(*options) as url, sync_client(url) as connection:
        with pytest.raises(ConfigurationError, match=says):
            check(connection, url)
        async with client(url) as other:
            with pytest.raises(ConfigurationError, match=says):
                await check_async(other, url)


def test_the_fix_that_it_names_works() -> None:
    """After the CONFIG SET that the refusal names, the server passes."""
    with running_server("--maxmemory-policy", "allkeys-lru") as url, sync_client(url) as connection:
        with pytest.raises(ConfigurationError):
            check(connection, url)

        connection.execute_command("CONFIG", "SET", "maxmemory-policy", "noeviction")

        check(connection, url)


def test_a_user_who_may_not_ask_is_let_through(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Managed services forbid INFO: that is told, with the fix, and is no reason not to start."""
    with running_server() as url:
        with connect(url) as admin:
            admin.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~*", "+@all", "-info")
        asked = url.replace("unix://", "unix://app:pw@")
        with sync_client(asked) as connection:
            check(connection, asked)

    assert "+info" in caplog.text
    assert "pw" not in caplog.text


def test_a_wrong_password_and_a_missing_server_are_told_apart() -> None:
    """The one is for an operator to correct, the other may pass."""
    with running_server("--requirepass", "right") as url:
        wrong = url.replace("unix://", "unix://default:wrong@")
        with (
            sync_client(wrong) as connection,
            pytest.raises(ConfigurationError, match="refuses the credentials") as refusal,
        ):
            check(connection, wrong)
        assert "wrong@" not in str(refusal.value)
    with sync_client(url) as connection, pytest.raises(Unavailable, match="cannot be reached"):
        check(connection, url)
