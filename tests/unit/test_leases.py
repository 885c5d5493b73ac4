"""Heartbeats: what they tell the clock, and when others may be taken for dead."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from npufleet.connection import Link
from npufleet.keys import FleetKeys
from npufleet_worker.clock import ServerClock
from npufleet_worker.leases import Leases

LEASE_S = 15.0


class SlowServer:
    """Answers a heartbeat with its time, after `takes_s` of the test's own time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.takes_s = 0.0

    async def run(self, *_: Any) -> int:
        self.now_s += self.takes_s
        return int(self.now_s * 1000)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SlowServer:
    server = SlowServer()
    clock = SimpleNamespace(monotonic=lambda: server.now_s)
    monkeypatch.setattr("npufleet_worker.leases.time", clock)
    return server


@pytest.fixture
def leases(server: SlowServer) -> Leases:
    return Leases(cast(Link, server), FleetKeys("t").model("m"), "w")


async def test_a_stalled_heartbeat_makes_no_request_older(
    server: SlowServer, leases: Leases
) -> None:
    """An answer that took long errs to the late side: no deadline passes before its time."""
    clock = ServerClock()
    server.takes_s = 8.0

    await leases.beat(clock, lease_s=LEASE_S)

    added_ms = int(server.now_s * 1000)
    assert clock.arrival_s(f"{added_ms}-0".encode(), now_s=server.now_s) == server.now_s


async def test_nothing_is_claimed_before_a_whole_lease_of_steady_heartbeats(
    server: SlowServer, leases: Leases
) -> None:
    """After a gap of a lease the others may have been unheard too: they get one to come back."""
    allowed = []
    for gap_s in (0, 5, 5, 5, 20, 5, 5, 5):
        server.now_s += gap_s
        await leases.beat(ServerClock(), lease_s=LEASE_S)
        allowed.append(leases.may_claim(LEASE_S))

    assert allowed == [False, False, False, True, False, False, False, True]
    server.now_s += LEASE_S + 1
    assert not leases.may_claim(LEASE_S), "not heard of for a lease itself"
