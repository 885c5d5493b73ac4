"""Runs batches: feeds the executors, splits what failed, starts again what died.

An executor is fed before its last results are published, and gets one full batch ahead. A batch
that fails is halved until the guilty request stands alone; requests that were running when their
executor died are suspects, and run in small batches without another one ahead. Knows nothing of
Redis.
"""

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from npufleet.errors import ConfigurationError, ModelFailed, NpufleetError
from npufleet_worker.arena import Arena
from npufleet_worker.batching import Batcher, BatchPolicy, Item, gear_for
from npufleet_worker.device import BatchResult, Executor, ExecutorDied
from npufleet_worker.intake import Work, refusal
from npufleet_worker.metrics import Metrics
from npufleet_worker.outcomes import Answers, Timing
from npufleet_worker.publisher import Outcome
from npufleet_worker.repository import ModelConfig

log = logging.getLogger(__name__)

_WORK_AHEAD_MS = 5.0
_MOST_BATCHES_HELD = 8
_STARTS_MOST = 8
"""Attempts to start an executor again, in some twelve seconds and the time that loading takes."""

_TIMER_S = 0.001
"""The event loop's timers have this resolution; below it they would fire at once, for nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    executor: Executor
    works: list[Work]
    future: "asyncio.Future[BatchResult]"
    launched_s: float
    idle: bool
    limit: asyncio.TimerHandle

    @property
    def alone(self) -> bool:
        """Whether nothing may be handed over ahead: one of its requests is a suspect."""
        return any(work.held.suspicions for work in self.works)


@dataclass(frozen=True, slots=True)
class RunLimits:
    """When to give up: on a batch, in seconds; on a request, in deaths and deliveries."""

    batch_timeout_s: float
    max_suspicions: int
    max_deliveries: int


class Runner:
    """The executors of one model version. `finish` gets outcomes, `fail` single errors."""

    def __init__(
        self,
        config: ModelConfig,
        arena: Arena,
        *,
        limits: RunLimits,
        metrics: Metrics,
        finish: Callable[[Work, Outcome], None],
        fail: Callable[[Work, NpufleetError], None],
    ) -> None:
        self.config = config
        self._arena = arena
        self._limits = limits
        self._metrics = metrics
        self._finish = finish
        self._fail = fail
        self._executors: list[Executor] = []
        self._answers: Answers | None = None
        self._batcher = _batcher(config)
        self._again: deque[list[Work]] = deque()
        self._running: set[_Running] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._pump_due = False
        self._execute_ms = 0.0
        self.restarting = 0

    @property
    def budget_rows(self) -> int:
        """Rows worth holding: two batches an executor, or 5 ms of work where that is more.

        None for an executor that is not there: others may serve what it could not.
        """
        most = self.config.batching.max_batch_size
        batches = 2.0
        if self._execute_ms > 0:
            batches = max(batches, _WORK_AHEAD_MS / self._execute_ms)
        wanted = math.ceil(min(batches, _MOST_BATCHES_HELD)) * most
        return wanted * (self.config.executor.instances - self.restarting)

    async def start(self) -> Executor:
        """Loads the model in every executor; ConfigurationError where that fails."""
        for _ in range(self.config.executor.instances):
            self._executors.append(await Executor.start(self.config, self._arena))
        return self._executors[0]

    def ready(self, answers: Answers) -> None:
        """What the loaded file says is known now: batches may be run."""
        self._answers = answers
        self._batcher = _batcher(self.config)
        for gear, execute_ms in self._executors[0].execute_ms.items():
            self._batcher.observe(gear, execute_ms)

    def add(self, work: Work) -> None:
        """A request for one of the next batches."""
        held, now_s = work.held, time.monotonic()
        item = Item(
            work.request.rows,
            held.arrival_s,
            held.deadline_s,
            held.lane - 1,
            work.request.shapes,
            work,
        )
        self._batcher.add(item, now_s)
        if not self._pump_due:
            # Once for all that the same read has brought: else the first of them would go alone.
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump_now)

    def expect(self, requests: int) -> None:
        """Requests that the next batch may wait for: 1 more is being decoded, -1 one less."""
        if requests > 0:
            self._batcher.expect(time.monotonic())
        else:
            self._batcher.unexpect(time.monotonic())

    async def keep(self) -> None:
        """Starts executors again that died; ConfigurationError where one cannot be, at last.

        What is held then is better given back than kept from workers that could serve it.
        """
        await asyncio.gather(*(self._keep(at) for at in range(len(self._executors))))

    async def stop(self) -> None:
        """Launches nothing more, and returns when what runs has ended."""
        self._stopped = True
        self._cancel_timer()
        while self._running:
            await asyncio.wait([running.future for running in self._running])
            await asyncio.sleep(0)

    async def close(self) -> None:
        self._stopped = True
        self._cancel_timer()
        await asyncio.gather(*(executor.close() for executor in self._executors))

    def _pump_now(self) -> None:
        self._pump_due = False
        self.pump()

    def pump(self) -> None:
        """Hands over all that is due, and looks again when the next batch will be."""
        self._cancel_timer()
        while not self._stopped and (executor := self._free()) is not None:
            works = self._next(executor)
            if works is None:
                break
            if works:
                self._launch(executor, works)
        now_s = time.monotonic()
        due_s = self._batcher.due_s(now_s)
        if due_s is not None and not self._stopped:
            wait_s = max(due_s - now_s, _TIMER_S)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.pump)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _free(self) -> Executor | None:
        """The executor with the least to do among those that take a batch now."""
        free = [executor for executor in self._executors if executor.room]
        return min(free, key=lambda executor: executor.outstanding, default=None)

    def _next(self, executor: Executor) -> list[Work] | None:
        """What the executor should run next: None for nothing yet."""
        idle = executor.outstanding == 0
        if any(r.alone for r in self._running if r.executor is executor):
            return None
        if self._again:
            alone = self._again[0][0].held.suspicions > 0
            if alone and not idle:
                return None
            return self._worth(self._again.popleft())
        batch = self._batcher.pull(time.monotonic(), device_free=idle)
        return None if batch is None else self._worth([item.payload for item in batch.items])

    def _worth(self, works: Sequence[Work]) -> list[Work]:
        """Those that are still worth running; the others end here."""
        now_s = time.monotonic()
        kept = []
        for work in works:
            error = refusal(work.held, now_s=now_s, max_deliveries=self._limits.max_deliveries)
            if error is not None or work.held.lost:
                self._fail(work, error or ModelFailed("the lease was lost"))
            else:
                kept.append(work)
        return kept

    def _launch(self, executor: Executor, works: list[Work]) -> None:
        batching = self.config.batching
        rows = sum(work.request.rows for work in works)
        gear = gear_for(rows, batching.gears, batching.min_batch_size)
        shapes = works[0].request.shapes
        idle = executor.outstanding == 0
        launched_s = time.monotonic()
        future = executor.submit([w.request.placed for w in works], shapes=shapes, gear=gear)
        loop = asyncio.get_running_loop()
        limit_s = self._limits.batch_timeout_s * executor.outstanding  # this one, and one before it
        running = _Running(
            executor,
            works,
            future,
            launched_s,
            idle,
            loop.call_later(limit_s, self._hung, executor),
        )
        self._running.add(running)
        self._metrics.batch_size.labels(self.config.name).observe(rows)
        self._metrics.padding.labels(self.config.name).inc(gear - rows)
        future.add_done_callback(lambda _: self._done(running))

    def _hung(self, executor: Executor) -> None:
        log.error(
            "a batch runs for too long: killing its executor",
            extra={"model": self.config.name, "limit_s": self._limits.batch_timeout_s},
        )
        executor.kill()

    def _done(self, running: _Running) -> None:
        self._running.discard(running)
        running.limit.cancel()
        rows = sum(work.request.rows for work in running.works)
        self._batcher.answered(rows, time.monotonic())
        self.pump()  # the device first: it must not wait for what follows
        error = running.future.exception()
        if error is None:
            self._answer(running, running.future.result())
        elif isinstance(error, ExecutorDied):
            self._after_death(running.works, error)
        elif isinstance(error, NpufleetError):
            self._after_failure(running.works, error)
        else:
            log.error("a batch failed in a way of its own", exc_info=error)
            self._after_failure(running.works, ModelFailed(f"{type(error).__name__}: {error}"))
        self.pump()

    def _answer(self, running: _Running, result: BatchResult) -> None:
        assert self._answers is not None
        done_s = time.monotonic()
        self._execute_ms += 0.2 * (result.execute_ms - self._execute_ms)
        overhead_ms = (done_s - running.launched_s) * 1000 - result.execute_ms
        self._batcher.observe(
            result.gear, result.execute_ms, overhead_ms=overhead_ms if running.idle else None
        )
        rows = sum(work.request.rows for work in running.works)
        at = 0
        for work in running.works:
            mine = slice(at, at + work.request.rows)
            at = mine.stop
            outputs = {name: array[mine] for name, array in result.outputs.items()}
            timing = Timing(work.decoded_s, running.launched_s, done_s, result.execute_ms)
            try:
                outcome = self._answers.success(work.held, outputs, timing=timing, batch_rows=rows)
            except Exception as error:  # edge of a request: its neighbours get their answers
                log.exception("an answer cannot be made", extra={"model": self.config.name})
                self._fail(work, ModelFailed(f"no answer can be made: {type(error).__name__}"))
            else:
                self._finish(work, outcome)
        result.release()

    def _after_failure(self, works: list[Work], error: NpufleetError) -> None:
        """Halves the batch; the request that stands alone is the guilty one."""
        if len(works) == 1:
            self._fail(works[0], error)
            return
        half = len(works) // 2
        log.warning(
            "a batch failed, its halves are tried: %s",
            error,
            extra={"model": self.config.name, "requests": len(works)},
        )
        self._again.extend((works[:half], works[half:]))

    def _after_death(self, works: list[Work], error: ExecutorDied) -> None:
        if not error.running:
            self._again.append(works)
            return
        tried = []
        for work in works:
            work.held.suspicions += 1
            if work.held.suspicions >= self._limits.max_suspicions:
                times = work.held.suspicions
                self._fail(
                    work, ModelFailed(f"{error.message}, the {times}. time with this request")
                )
            else:
                tried.append(work)
        half = len(tried) // 2
        self._again.extend(part for part in (tried[:half], tried[half:]) if part)

    async def _keep(self, at: int) -> None:
        while True:
            await asyncio.shield(self._executors[at].died)
            if self._stopped:
                return
            self.restarting += 1
            self._metrics.restarts.labels(self.config.name).inc()
            await self._executors[at].close(limit_s=0)
            self._executors[at] = await self._start_again()
            self.restarting -= 1
            self.pump()

    async def _start_again(self) -> Executor:
        """An executor in place of a dead one; ConfigurationError where none can be had any more."""
        delay_s = 0.1
        for _ in range(_STARTS_MOST - 1):
            try:
                return await Executor.start(self.config, self._arena)
            except ConfigurationError as error:
                log.error("cannot start the executor: %s", error, extra={"model": self.config.name})
            await asyncio.sleep(delay_s * random.uniform(0.75, 1.25))
            delay_s *= 2
        return await Executor.start(self.config, self._arena)


def _batcher(config: ModelConfig) -> Batcher[Work]:
    batching = config.batching
    policy = BatchPolicy(
        batching.max_batch_size, batching.max_wait_ms, adaptive=batching.policy == "adaptive"
    )
    return Batcher(policy)
