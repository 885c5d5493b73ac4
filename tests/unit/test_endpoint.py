"""What is shown of a Redis URL: never its password, however it was written."""

import pytest

from npufleet.endpoint import resolve, shown
from npufleet.errors import ConfigurationError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://queue:6379/0", "redis://queue:6379/0"),
        ("redis://:secret@queue:6379/0", "redis://:***@queue:6379/0"),
        ("rediss://user:secret@queue", "rediss://user:***@queue"),
        ("redis://user@queue", "redis://user@queue"),
        ("redis://:se/cr@et@queue:6379", "redis://:***@queue:6379"),
        ("unix:///run/q.sock?password=secret&db=1", "unix:///run/q.sock?password=***&db=1"),
        ("unix:///run/q.sock", "unix:///run/q.sock"),
    ],
)
def test_a_password_is_never_shown(url: str, expected: str) -> None:
    """Neither between : and @ nor in the query; the rest is as it was."""
    assert shown(url) == expected


def test_a_password_that_breaks_the_url_is_not_in_the_error() -> None:
    """An unquoted slash is the usual mistake; the message says how to write it."""
    with pytest.raises(ConfigurationError, match="%2F") as caught:
        resolve("redis://:sec/ret@queue:6379/0")

    assert "sec" not in str(caught.value)
    assert "ret@" not in str(caught.value)
