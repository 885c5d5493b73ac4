"""docker-compose.yml and the images agree with the code, without a container engine.

That they also run is proven by `make containers`.
"""

import re
import shlex
from pathlib import Path

import pytest

from npufleet import settings
from npufleet.endpoint import sync_client
from npufleet.server import check
from tests.support.valkey import running_server

ROOT = Path(__file__).parents[2]
DEPLOYED = ("docker-compose.yml", "deploy/gateway.Dockerfile", "deploy/worker.Dockerfile")


def environment(text: str) -> dict[str, str]:
    """Every NPUFLEET_* variable that a compose file or a Dockerfile sets."""
    return dict(re.findall(r"\b(NPUFLEET_[A-Z_]+)(?:=|: )(\S+)", text))


@pytest.mark.parametrize("file", DEPLOYED)
def test_every_variable_that_a_container_gets_is_a_setting(file: str) -> None:
    """A renamed setting would keep the container from starting: unknown names are refused."""
    variables = environment((ROOT / file).read_text())

    loaded = settings.load(environ=variables, file=None)

    assert variables
    for name, text in variables.items():
        assert str(getattr(loaded, name.removeprefix("NPUFLEET_").lower())) == text


def test_containers_are_given_more_time_to_stop_than_they_take_to_drain() -> None:
    """Else the engine kills a worker that is still finishing its batch."""
    compose = (ROOT / "docker-compose.yml").read_text()
    graces_s = {
        name: int(grace_s)
        for name, grace_s in re.findall(
            r"^  (\w+):\n(?:(?:    .*)?\n)*?    stop_grace_period: (\d+)s$", compose, re.MULTILINE
        )
    }

    assert graces_s.keys() >= {"gateway", "worker"}
    assert all(grace_s > settings.load(environ={}).drain_s for grace_s in graces_s.values())


def test_the_redis_of_the_compose_file_passes_our_check_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A real server, configured by deploy/redis.conf, gets neither a refusal nor a warning."""
    lines = (ROOT / "deploy/redis.conf").read_text().splitlines()
    directives = filter(None, (shlex.split(line, comments=True) for line in lines))
    options = [word for name, *values in directives for word in (f"--{name}", *values)]

    with running_server(*options) as url, sync_client(url) as connection:
        check(connection, url)

    assert "--appendonly" in options
    assert caplog.text == ""
