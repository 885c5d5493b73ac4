"""Entries on their way from the lanes to a batch: checked, fetched, decoded, or refused one by one.

A request that cannot be read or decoded fails alone, here. Knows nothing of batches and devices.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Threads
from dataclasses import dataclass
from typing import Any

from npufleet.connection import Link, ReplyError
from npufleet.errors import (
    BodyMissing,
    Cancelled,
    DeadlineExceeded,
    ModelFailed,
    NpufleetError,
    VersionUnavailable,
)
from npufleet.keys import ModelKeys
from npufleet.signature import Signature
from npufleet.wire import Body
from npufleet_worker.clock import ServerClock
from npufleet_worker.decoder import Decoder, Request
from npufleet_worker.held import Arrival, Held, Ledger, hold

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Work:
    """A request whose rows lie in shared memory, ready for a batch."""

    held: Held
    request: Request
    decoded_s: float


def refusal(held: Held, *, now_s: float, max_deliveries: int) -> NpufleetError | None:
    """Why an entry is not worth decoding or running, if it is not."""
    if held.fault is not None:
        return held.fault
    if held.cancelled:
        return Cancelled("the request was cancelled")
    deadline_s = held.deadline_s
    if deadline_s is not None and deadline_s <= now_s:
        waited_ms = (now_s - held.arrival_s) * 1000
        return DeadlineExceeded(f"the deadline passed in the queue, after {waited_ms:.0f} ms")
    if held.deliveries > max_deliveries:
        return ModelFailed(
            f"delivered {held.deliveries} times without an answer, {max_deliveries} are allowed"
        )
    return None


class Intake:
    """The entries of one model version; gives Work to `ready` and errors to `fail`.

    `expect` hears of requests that are being decoded (+1) and no longer are (-1).
    """

    def __init__(
        self,
        link: Link,
        keys: ModelKeys,
        decoder: Decoder,
        ledger: Ledger,
        *,
        signature: Signature,
        clock: ServerClock,
        threads: Threads,
        max_deliveries: int,
        ready: Callable[[Work], None],
        expect: Callable[[int], None],
        fail: Callable[[Held, NpufleetError], None],
    ) -> None:
        self._link = link
        self._keys = keys
        self._decoder = decoder
        self._ledger = ledger
        self._signature = signature
        self._clock = clock
        self._threads = threads
        self._max_deliveries = max_deliveries
        self._ready = ready
        self._expect = expect
        self._fail = fail
        self._unplaced: deque[tuple[Held, Body, int]] = deque()
        self._placing = False
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, arrivals: Sequence[Arrival]) -> None:
        """Takes charge of entries: from now on each of them ends in `ready` or `fail`."""
        now_s = time.monotonic()
        for arrival in arrivals:
            known = self._ledger.find((arrival.lane, arrival.entry_id))
            if known is not None:  # claimed, while what was begun with it is under way here still
                known.lost = False
                continue
            held = hold(
                arrival,
                body_prefix=self._keys.body_prefix,
                arrival_s=self._clock.arrival_s(arrival.entry_id, now_s=now_s),
                now_s=now_s,
            )
            self._ledger.add(held)
            error = refusal(held, now_s=now_s, max_deliveries=self._max_deliveries)
            error = error or self._wrong_version(held)
            if error is not None:
                self._fail(held, error)
            elif held.entry is not None and held.entry.body is not None:
                self._read(held, held.entry.body)
            elif held.entry is not None:
                self._spawn(self._fetch(held, held.entry.body_key or ""))

    def place_waiting(self) -> None:
        """Tries again to find memory for those that wait for it, the oldest first."""
        if self._placing:
            return  # one that was just placed has ended already: the loop below goes on
        self._placing = True
        try:
            self._place_in_turn()
        finally:
            self._placing = False

    def _place_in_turn(self) -> None:
        while self._unplaced:
            held, body, rows = self._unplaced[0]
            if held.lost:
                self._ledger.remove(held)
            elif not self._place(held, body, rows):
                return
            self._unplaced.popleft()

    def _wrong_version(self, held: Held) -> NpufleetError | None:
        asked = held.entry.version if held.entry else None
        if asked in (None, "latest", str(self._signature.version)):
            return None
        return VersionUnavailable(
            f"{self._signature.model} serves version {self._signature.version}, not {asked!r}"
        )

    async def _fetch(self, held: Held, key: str) -> None:
        """One body, however large: read together, many would outlast the connection's patience."""
        while True:
            try:
                (body,) = await self._link.execute([("GET", key)])
                break
            except NpufleetError:
                await asyncio.sleep(0.1)  # the link is on its way back; leases cover the rest
        if isinstance(body, bytes):
            self._read(held, body)
        else:
            why = f": {body}" if isinstance(body, ReplyError) else ""
            self._fail(held, BodyMissing(f"there is nothing under the entry's body_key{why}"))

    def _read(self, held: Held, raw: bytes) -> None:
        try:
            body, rows = self._decoder.read(raw)
            self._ledger.resize(held, rows)
            if self._unplaced or not self._place(held, body, rows):
                self._unplaced.append((held, body, rows))
        except NpufleetError as error:
            self._fail(held, error)

    def _place(self, held: Held, body: Body, rows: int) -> bool:
        try:
            request = self._decoder.place(body, rows)
        except NpufleetError as error:
            self._fail(held, error)
            return True
        if request is None:
            return False
        if request.slow:
            self._spawn(self._fill_in_thread(held, request))
        else:
            self._filled(held, request, self._fill(request))
        return True

    async def _fill_in_thread(self, held: Held, request: Request) -> None:
        loop = asyncio.get_running_loop()
        self._expect(1)
        try:
            error = await loop.run_in_executor(self._threads, self._fill, request)
        finally:
            self._expect(-1)
        self._filled(held, request, error)

    def _fill(self, request: Request) -> NpufleetError | None:
        try:
            self._decoder.fill(request)
        except NpufleetError as error:
            return error
        except Exception as error:  # edge of a request: whatever is wrong with it, it fails alone
            log.exception("a request could not be decoded")
            return ModelFailed(f"the request could not be decoded: {type(error).__name__}")
        return None

    def _filled(self, held: Held, request: Request, error: NpufleetError | None) -> None:
        if error is None and not held.lost:
            self._ready(Work(held, request, time.monotonic()))
            return
        self._decoder.release(request)
        if error is not None:
            self._fail(held, error)
        else:
            self._ledger.remove(held)
        self.place_waiting()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Drops what has not become Work: it stays pending, to be given back."""
        for task in self._tasks:
            task.cancel()
        self._unplaced.clear()
