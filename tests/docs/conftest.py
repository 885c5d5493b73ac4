"""A real fleet for the examples of the documentation, which use the names that a user would."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.examples import ROOT
from tests.support.fleets import RunningFleet, running_fleet


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """`npufleet up` with the sample models, on an embedded server of its own."""
    with running_fleet(tmp_path_factory.mktemp("docs") / "state") as fleet:
        yield fleet


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder in which `models` is the repository's."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    return tmp_path


@pytest.fixture
def environ(fleet: RunningFleet, tmp_path: Path) -> dict[str, str]:
    """Where `npufleet` is the one under test and `redis-cli` knows the fleet's server."""
    tools = tmp_path / "tools"
    tools.mkdir()
    wrapper = tools / "redis-cli"
    socket = fleet.redis_url.removeprefix("unix://")
    wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/redis-cli -s "{socket}" "$@"\n')
    wrapper.chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "NPUFLEET_REDIS_URL": fleet.redis_url}
