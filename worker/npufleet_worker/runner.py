"""Runs batches: feeds the executors, splits what failed, starts again what died.

An executor is fed before its last results are published, and gets one full batch ahead. A batch
that fails is halved until the guilty request stands alone; requests that were running when their
executor died are suspects, and run in small batches without another one ahead. A request of many
rows runs in parts: where one fails, the others are dropped. Knows nothing of Redis.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from npufleet.errors import ConfigurationError, ModelFailed, NpufleetError
from npufleet.tensors import Array
from npufleet_worker.arena import Arena
from npufleet_worker.batching import Batcher, BatchPolicy, Item, gear_for
from npufleet_worker.budget import Budget
from npufleet_worker.device import BatchResult, Executor, ExecutorDied
from npufleet_worker.intake import Work, refusal
from npufleet_worker.metrics import Metrics
from npufleet_worker.outcomes import Answers, Ran
from npufleet_worker.parts import Part, Whole
from npufleet_worker.publisher import Outcome
from npufleet_worker.repository import ModelConfig

log = logging.getLogger(__name__)

_STARTS_MOST = 8
"""Attempts to start an executor again, in some twelve seconds and the time that loading takes."""

_TIMER_S = 0.001
"""The event loop's timers have this resolution; below it they would fire at once, for nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    executor: Executor
    parts: list[Part]
    future: "asyncio.Future[BatchResult]"
    launched_s: float
    idle: bool
    limit: asyncio.TimerHandle

    @property
    def alone(self) -> bool:
        """Whether nothing may be handed over ahead: one of its requests is a suspect."""
        return any(part.work.held.suspicions for part in self.parts)

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


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
        self._again: deque[list[Part]] = deque()
        self._running: set[_Running] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._pump_due = False
        self._budget = Budget()
        self.restarting = 0

    @property
    def budget_rows(self) -> int:
        """Rows worth holding: none for an executor that is not there, which others may serve."""
        rows = self._budget.rows(self.config.batching.max_batch_size, time.monotonic())
        return rows * (self.config.executor.instances - self.restarting)

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
        for part in Whole(work, self.config.batching.max_batch_size).parts:
            item = Item(part.rows, held.arrival_s, held.deadline_s, held.lane - 1, part.key, part)
            self._batcher.add(item, now_s)
        self._budget.saw(held.lane, now_s)
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
        # One point in time for both questions. A batch that becomes due between "which is due?" and
        # "when will one be?" would be no answer to either, and wait for ever.
        now_s = time.monotonic()
        while not self._stopped and (executor := self._free()) is not None:
            parts = self._next(executor, now_s)
            if parts is None:
                break
            if parts:
                self._launch(executor, parts)
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
        most = self._budget.batches(time.monotonic())
        free = [e for e in self._executors if e.room and e.outstanding < most]
        return min(free, key=lambda executor: executor.outstanding, default=None)

    def _next(self, executor: Executor, now_s: float) -> list[Part] | None:
        """What the executor should run next: None for nothing yet."""
        idle = executor.outstanding == 0
        if any(r.alone for r in self._running if r.executor is executor):
            return None
        if self._again:
            alone = self._again[0][0].work.held.suspicions > 0
            if alone and not idle:
                return None
            return self._worth(self._again.popleft())
        batch = self._batcher.pull(now_s, device_free=idle)
        return None if batch is None else self._worth([item.payload for item in batch.items])

    def _worth(self, parts: Sequence[Part]) -> list[Part]:
        """Those that are still worth running; the requests of the others end here."""
        now_s = time.monotonic()
        kept = []
        for part in parts:
            if part.whole.error is not None:
                continue
            held = part.work.held
            error = refusal(held, now_s=now_s, max_deliveries=self._limits.max_deliveries)
            if error is not None or held.lost:
                self._give_up(part.whole, error or ModelFailed("the lease was lost"))
            else:
                kept.append(part)
        return kept

    def _give_up(self, whole: Whole, error: NpufleetError) -> None:
        """The request fails, once, as soon as nothing that runs reads its memory any more."""
        if whole.error is None:
            whole.error = error
            if whole.split:
                self._batcher.drop(lambda item: item.payload.whole is whole)
        if not whole.running and not whole.ended:
            whole.ended = True
            self._fail(whole.work, whole.error)

    def _launch(self, executor: Executor, parts: list[Part]) -> None:
        batching = self.config.batching
        rows = sum(part.rows for part in parts)
        # Pinned where the same bits are wanted whatever runs beside it: sizes differ in kernels.
        wanted = batching.max_batch_size if parts[0].deterministic else rows
        gear = gear_for(wanted, batching.gears, batching.min_batch_size)
        shapes = parts[0].work.request.shapes
        idle = executor.outstanding == 0
        launched_s = time.monotonic()
        future = executor.submit([part.placed for part in parts], shapes=shapes, gear=gear)
        loop = asyncio.get_running_loop()
        limit_s = self._limits.batch_timeout_s * executor.outstanding  # this one, and one before it
        running = _Running(
            executor,
            parts,
            future,
            launched_s,
            idle,
            loop.call_later(limit_s, self._hung, executor),
        )
        self._running.add(running)
        for part in parts:
            part.whole.running += 1
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
        for part in running.parts:
            part.whole.running -= 1
        self._batcher.answered(running.rows, time.monotonic())
        self.pump()  # the device first: it must not wait for what follows
        error = running.future.exception()
        if error is None:
            self._answer(running, running.future.result())
        elif isinstance(error, ExecutorDied):
            self._after_death(running.parts, error)
        elif isinstance(error, NpufleetError):
            self._after_failure(running.parts, error)
        else:
            log.error("a batch failed in a way of its own", exc_info=error)
            self._after_failure(running.parts, ModelFailed(f"{type(error).__name__}: {error}"))
        for part in running.parts:
            if part.whole.error is not None:
                self._give_up(part.whole, part.whole.error)
        self.pump()

    def _answer(self, running: _Running, result: BatchResult) -> None:
        done_s = time.monotonic()
        self._budget.ran(result.execute_ms)
        overhead_ms = (done_s - running.launched_s) * 1000 - result.execute_ms
        self._batcher.observe(
            result.gear, result.execute_ms, overhead_ms=overhead_ms if running.idle else None
        )
        at = 0
        for part in running.parts:
            ran = Ran(
                batch_rows=running.rows,
                gear=result.gear,
                position=at,
                launched_s=running.launched_s,
                done_s=done_s,
                execute_ms=result.execute_ms,
            )
            mine = slice(at, at + part.rows)
            at = mine.stop
            outputs = {name: array[mine] for name, array in result.outputs.items()}
            try:
                outcome = self._outcome(part, ran, outputs)
            except Exception as error:  # edge of a request: its neighbours get their answers
                log.exception("an answer cannot be made", extra={"model": self.config.name})
                sentence = f"no answer can be made: {type(error).__name__}"
                self._give_up(part.whole, ModelFailed(sentence))
            else:
                if outcome is not None:
                    self._finish(part.work, outcome)
        result.release()

    def _outcome(self, part: Part, ran: Ran, outputs: Mapping[str, Array]) -> Outcome | None:
        """Of the part's request, if this was the last one to run, and none has failed."""
        assert self._answers is not None
        whole = part.whole
        if whole.error is not None or not whole.ran(part, ran, outputs):
            return None
        work = whole.work
        return self._answers.success(
            work.held, whole.outputs(), decoded_s=work.decoded_s, ran=whole.summary()
        )

    def _after_failure(self, parts: list[Part], error: NpufleetError) -> None:
        """Halves the batch; the request that stands alone is the guilty one."""
        if len(parts) == 1:
            self._give_up(parts[0].whole, error)
            return
        half = len(parts) // 2
        log.warning(
            "a batch failed, its halves are tried: %s",
            error,
            extra={"model": self.config.name, "requests": len(parts)},
        )
        self._again.extend((parts[:half], parts[half:]))

    def _after_death(self, parts: list[Part], error: ExecutorDied) -> None:
        if not error.running:
            self._again.append(parts)
            return
        for held in {part.work.held for part in parts}:
            held.suspicions += 1
        deaths, most = max(part.work.held.suspicions for part in parts), self._limits.max_suspicions
        if len(parts) == 1 and deaths >= most:
            sentence = f"{error.message}, the {deaths}. time with this request"
            self._give_up(parts[0].whole, ModelFailed(sentence))
        elif len(parts) == 1 or deaths >= most - 1:
            self._again.extend([part] for part in parts)  # the next death has one culprit
        else:
            half = len(parts) // 2
            self._again.extend((parts[:half], parts[half:]))

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


def _batcher(config: ModelConfig) -> Batcher[Part]:
    batching = config.batching
    policy = BatchPolicy(
        batching.max_batch_size,
        batching.max_wait_ms,
        adaptive=batching.policy == "adaptive",
        gears=batching.gears,
        min_batch_size=batching.min_batch_size,
        gear_choice=batching.gear_choice,
    )
    return Batcher(policy)
