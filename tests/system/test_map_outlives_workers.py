"""The first promise of the README: what was accepted is answered, whoever dies."""

from pathlib import Path

import numpy as np
import psutil

from npufleet import Client
from tests.support.fleets import RunningFleet, running_fleet

ITEMS = 3000


def workers(fleet: RunningFleet) -> list[psutil.Process]:
    """The workers themselves, without their executors."""
    return [p for p in fleet.family() if p.cmdline()[-1:] == ["worker"]]


def test_every_item_is_answered_once_while_workers_are_killed(tmp_path: Path) -> None:
    """kill -9 of each of two workers in the middle of a run: no error, no item lost or doubled."""
    rows = (np.full(4, n, np.float32) for n in range(ITEMS))
    answered: list[int] = []
    with (
        running_fleet(tmp_path, "--workers", "2", environ={"NPUFLEET_LEASE_S": "2"}) as fleet,
        Client(fleet.redis_url) as client,
    ):
        victims = workers(fleet)
        assert len(victims) == 2
        for index, result in client.map("double", rows, in_flight=128):
            assert result.ok, result.error
            assert result.output.tolist() == [[2 * index + 1] * 4]
            answered.append(index)
            if len(answered) in (ITEMS // 4, ITEMS // 2):
                victims.pop().kill()

    assert sorted(answered) == list(range(ITEMS))
    assert not victims
