"""The load generator of batch jobs: npufleet's own client, straight onto the queue.

A closed loop is `AsyncClient.map`, as a job would call it; an open one sends single requests at
their times. Every answer is checked. Knows nothing of HTTP.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Iterator

import numpy as np
import uvloop

from bench.loads import Load, Report, Tally, Window, counted_from_s
from bench.wires import Checker
from npufleet import AsyncClient, Result
from npufleet.errors import NpufleetError
from npufleet.tensors import Array

_STOP_LIMIT_S = 10.0


class DirectLoad:
    """One load, run once."""

    def __init__(self, load: Load) -> None:
        data = np.load(load.vectors)
        self._load = load
        self._rows: list[dict[str, Array]] = [{"x": row[None]} for row in data["inputs"]]
        self._right = Checker(data["outputs"], "raw")
        self._tally = Tally()

    async def run(self) -> Report:
        async with AsyncClient(self._load.target) as client:
            window = Window(self._load)
            if self._load.rate_s is None:
                given_up = 0
                await self._closed(client, window)
            else:
                given_up = await self._opened(client, window)
            assert window.start_s is not None
            assert window.end_s is not None
            return self._tally.report(window.start_s, window.end_s, unfinished=given_up)

    async def _closed(self, client: AsyncClient, window: Window) -> None:
        begun_s: dict[int, float] = {}

        def items() -> Iterator[dict[str, Array]]:
            for index in itertools.count():
                now_s = time.monotonic()
                if window.closed(now_s):
                    return
                begun_s[index] = now_s
                yield self._rows[index % len(self._rows)]

        answers = client.map(
            self._load.model, items(), in_flight=self._load.clients, priority=self._load.lane
        )
        async for index, result in answers:
            self._count(index, result, begun_s.pop(index))

    async def _opened(self, client: AsyncClient, window: Window) -> int:
        """How many were under way when the window closed; these are given up."""
        under_way: set[asyncio.Task[None]] = set()
        for index, after_s in enumerate(self._load.arrivals_s()):
            arrival_s = window.begun_s + after_s
            await asyncio.sleep(max(0.0, arrival_s - time.monotonic()))
            now_s = time.monotonic()
            window.closed(now_s)
            task = asyncio.create_task(self._ask(client, index, counted_from_s(arrival_s, now_s)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.sleep(window.left_s(time.monotonic()))
        window.closed(time.monotonic())
        left = list(under_way)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_STOP_LIMIT_S)
        return len(left)

    async def _ask(self, client: AsyncClient, index: int, begun_s: float) -> None:
        row, load = self._rows[index % len(self._rows)], self._load
        timeout_ms = round(load.timeout_s * 1000)
        try:
            result = await client.infer(load.model, row, priority=load.lane, timeout_ms=timeout_ms)
        except NpufleetError as error:
            self._tally.failed(error.code, error.message)
        else:
            self._count(index, result, begun_s)

    def _count(self, index: int, result: Result, begun_s: float) -> None:
        if result.error is not None:
            self._tally.failed(result.error.code, result.error.message)
        elif not self._right(index % len(self._rows), result.output.tobytes()):
            self._tally.failed("wrong answer", repr(result.output))
        else:
            self._tally.answered(begun_s, time.monotonic(), float(result.batch_size or 0))


if __name__ == "__main__":
    print(uvloop.run(DirectLoad(Load.from_json(sys.argv[1])).run()).to_json(), flush=True)
