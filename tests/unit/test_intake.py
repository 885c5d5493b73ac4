"""Entries on their way to a batch: none is forgotten for want of memory, and none comes twice."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from npufleet import tensors, wire
from npufleet.connection import Link
from npufleet.errors import NpufleetError
from npufleet.keys import FleetKeys
from npufleet.signature import Signature, TensorSpec
from npufleet.wire import Body
from npufleet_worker.arena import Arena
from npufleet_worker.clock import ServerClock
from npufleet_worker.decoder import Decoder
from npufleet_worker.held import Arrival, Held, Ledger
from npufleet_worker.images import ImageSpec
from npufleet_worker.intake import Intake, Work
from tests.support.waiting import wait_until_async

SPEC = ImageSpec(size=(8, 8))
SIGNATURE = Signature("m", 1, (TensorSpec("x", "UINT8", (-1, 8, 8, 3)),), (), image_input="x")
ROW = 8 * 8 * 3


class Desk:
    """An intake with room for one request in memory, and notes of what it gave on."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.ready: list[Held] = []
        self.failed: list[str] = []
        self.ledger = Ledger()
        self.decoder = Decoder(SIGNATURE, Arena(ROW), image=SPEC, max_pixels=1000)
        self.on_ready: Callable[[Work], None] = self.decoder_release
        self.intake = Intake(
            Link.__new__(Link),  # nothing here is fetched
            FleetKeys("t").model("m"),
            self.decoder,
            self.ledger,
            signature=SIGNATURE,
            clock=ServerClock(),
            threads=threads,
            max_deliveries=10,
            ready=self._ready,
            expect=lambda _: None,
            fail=self._fail,
        )

    def decoder_release(self, work: Work) -> None:
        self.decoder.release(work.request)
        self.intake.place_waiting()

    def _ready(self, work: Work) -> None:
        self.ready.append(work.held)
        self.on_ready(work)

    def _fail(self, held: Held, error: NpufleetError) -> None:
        self.failed.append(error.code)

    def accept(self, *values: Any) -> None:
        self.intake.accept(
            [
                Arrival(2, f"{n}-0".encode(), 1, False, entry(value))
                for n, value in enumerate(values)
            ]
        )


def entry(value: Any) -> list[bytes]:
    body = wire.pack_body(Body({"x": value}))
    return [b"v", b"1", b"id", b"a", b"body", body]


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    with ThreadPoolExecutor(1) as threads:
        yield Desk(threads)


GOOD = tensors.encode(np.zeros((1, 8, 8, 3), np.uint8))
BROKEN = {"image": b"no picture"}


async def test_memory_that_a_bad_picture_had_goes_to_those_that_wait_for_it(desk: Desk) -> None:
    """All that holds memory fails in decoding: what waits for it gets its turn all the same."""
    desk.accept(BROKEN, GOOD, BROKEN, GOOD)

    async def done() -> bool:
        return len(desk.ready) + len(desk.failed) == 4

    await wait_until_async(done, what="all four to end")
    assert len(desk.ready) == 2
    assert desk.failed == ["invalid_image"] * 2


async def test_a_request_that_ends_while_others_are_placed_displaces_none(desk: Desk) -> None:
    """Memory that comes free in the middle of placing: each request is handed on exactly once."""
    kept: list[Work] = []
    desk.on_ready = kept.append
    desk.accept(*[GOOD] * 5)
    assert len(kept) == 1

    desk.on_ready = desk.decoder_release
    desk.decoder_release(kept[0])
    await asyncio.sleep(0)

    assert [held.entry_id for held in desk.ready] == [f"{n}-0".encode() for n in range(5)]
