"""One model, served: takes its entries, has them run, publishes, keeps its leases, drains.

The wiring of a model's parts and the loops that drive them. Knows nothing of how any part works.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import time
from concurrent.futures import Executor as Threads
from dataclasses import dataclass

from npufleet.connection import Link, ReplyError
from npufleet.endpoint import Endpoint
from npufleet.errors import NpufleetError
from npufleet.keys import LANES, FleetKeys
from npufleet.settings import Settings
from npufleet.signature import Signature
from npufleet_worker.arena import Arena
from npufleet_worker.clock import ServerClock
from npufleet_worker.decoder import Decoder
from npufleet_worker.held import Arrival, Held, Ledger
from npufleet_worker.intake import Intake, Work
from npufleet_worker.lanes import Lanes
from npufleet_worker.leases import Leases
from npufleet_worker.metrics import Metrics
from npufleet_worker.outcomes import Answers
from npufleet_worker.publisher import Outcome, Publisher, ReplyLife, failure
from npufleet_worker.rate import Rate
from npufleet_worker.repository import ModelConfig, digest_of, fit, signature_of
from npufleet_worker.runner import RunLimits, Runner

log = logging.getLogger(__name__)

_UNPUBLISHED_MOST = 1000
"""Outcomes that may wait for Redis before no more is taken."""

_ROOM_LIMIT_S = 1.0

_WAIT_MOST = 8
_TAKE_S = 0.5
"""A take is due this often, whatever the blocked reads bring: only it finds what was given back."""


@dataclass(frozen=True, slots=True)
class Host:
    """What all services of one worker process share."""

    settings: Settings
    endpoint: Endpoint
    link: Link
    keys: FleetKeys
    name: str
    consumer: str
    threads: Threads
    metrics: Metrics


class Service:
    """One model of one worker: `start`, then `tasks` run until `drain`, and `close` at last."""

    def __init__(self, host: Host, config: ModelConfig) -> None:
        settings, keys = host.settings, host.keys.model(config.name)
        self.model = config.name
        self.tasks: list[asyncio.Task[None]] = []
        self._host = host
        self._keys = keys
        self._clock = ServerClock()
        self._ledger = Ledger()
        self._arena = Arena(settings.arena_mb << 20)
        self._lanes = Lanes(host.link, host.endpoint, keys, host.consumer, self._clock)
        self._leases = Leases(host.link, keys, host.consumer)
        self._publisher = Publisher(
            host.link,
            keys,
            host.consumer,
            life=ReplyLife(settings.direct_reply_ttl_s, settings.max_reply_ttl_s),
            max_dead=settings.max_dead,
            done=self._published,
        )
        self._runner = Runner(
            config,
            self._arena,
            limits=RunLimits(
                settings.batch_timeout_s, settings.max_suspicions, settings.max_deliveries
            ),
            metrics=host.metrics,
            finish=self._finished,
            fail=self._failed,
        )
        self._intake: Intake | None = None
        self._decoder: Decoder | None = None
        self._stopping = False
        self._more = True
        self._taken_s = 0.0
        self._rate = Rate(time.monotonic())

    def reasons(self) -> list[str]:
        """Why this model is not served as it should be; empty when it is."""
        if self._runner.restarting:
            return [f"{self.model}: {self._runner.restarting} executors are being started again"]
        return []

    async def start(self) -> None:
        """Loads and warms up, then registers; ConfigurationError where the file is no good."""
        executor = await self._runner.start()
        config = self._runner.config = fit(self._runner.config, executor.gears)
        signature = signature_of(config, executor.inputs, executor.outputs)
        digest = await asyncio.get_running_loop().run_in_executor(
            self._host.threads, digest_of, config.path
        )
        self._runner.ready(
            Answers(signature, config.classification, worker=self._host.name, model_digest=digest)
        )
        self._decoder = Decoder(
            signature,
            self._arena,
            image=config.image,
            max_pixels=self._host.settings.max_image_pixels,
            buckets=config.buckets,
        )
        self._intake = Intake(
            self._host.link,
            self._keys,
            self._decoder,
            self._ledger,
            signature=signature,
            clock=self._clock,
            threads=self._host.threads,
            max_deliveries=self._host.settings.max_deliveries,
            ready=self._runner.add,
            expect=self._runner.expect,
            fail=self._refused,
        )
        await self._lanes.start()
        await self._leases.register(signature)
        await self._leases.beat(self._clock, lease_s=self._host.settings.lease_s)
        self._host.metrics.held.labels(self.model).set_function(self._ledger.__len__)
        loops = [
            self._read(self._intake),
            self._publisher.run(),
            self._keep_leases(signature),
            self._claim(self._intake),
            self._runner.keep(),
        ]
        self.tasks = [asyncio.create_task(loop, name=f"{self.model}") for loop in loops]

    async def drain(self, limit_s: float) -> None:
        """Stops reading, finishes what runs, publishes it, and gives the rest back."""
        self._stopping = True
        self._ledger.room.set()
        reader, *_ = self.tasks
        try:
            async with asyncio.timeout(limit_s):
                await self._lanes.wake()
                await self._runner.stop()
                await self._publisher.drained()
                await asyncio.wait([reader])
        except TimeoutError:
            log.warning("drain took too long", extra={"model": self.model})
        # Nothing may be claimed or announced once it is given back, however long others drain.
        await self._end_tasks()
        given_back = await self._leases.leave()
        log.info("model drained", extra={"model": self.model, "given_back": given_back})

    async def _end_tasks(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def close(self) -> None:
        await self._end_tasks()
        if self._intake is not None:
            self._intake.close()
        await self._runner.close()
        await self._lanes.close()
        self._arena.close()

    async def _read(self, intake: Intake) -> None:
        """Keeps what is held at its budget: takes what is there, and waits when nothing is."""
        delay_s = 0.05
        while not self._stopping:
            try:
                await self._read_once(intake)
                delay_s = 0.05
            except (NpufleetError, ReplyError) as error:
                if delay_s == 0.05:
                    log.warning("cannot read: %s", error, extra={"model": self.model})
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
                delay_s = min(delay_s * 2, 2.0)
                await self._lanes.wait_connected()

    async def _read_once(self, intake: Intake) -> None:
        room = self._runner.budget_rows - self._ledger.rows
        if room <= 0 or len(self._publisher) >= _UNPUBLISHED_MOST:
            self._ledger.room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ROOM_LIMIT_S):
                    await self._ledger.room.wait()
            return
        now_s = time.monotonic()
        if self._more or now_s - self._taken_s > _TAKE_S:
            self._taken_s = now_s
            arrivals = await self._lanes.take(room)
            self._more = len(arrivals) == room
        else:
            # A count is per lane, so that three times as many may come.
            most = max(1, min(_WAIT_MOST, room // len(LANES)))
            self._rate.waited()
            arrivals = await self._lanes.wait(most)
            self._more = len(arrivals) >= most
        self._accept(intake, arrivals)

    def _accept(self, intake: Intake, arrivals: list[Arrival]) -> None:
        if not self._stopping:  # what comes too late is given back with the rest
            intake.accept(arrivals)

    async def _keep_leases(self, signature: Signature) -> None:
        lease_s = self._host.settings.lease_s
        while True:
            await asyncio.sleep(lease_s / 3)
            try:
                rate_per_s = self._rate.measure(time.monotonic())
                await self._leases.register(signature, rate_per_s=rate_per_s)
                await self._leases.beat(self._clock, lease_s=lease_s)
                lost = await self._leases.renew(self._ledger.all())
            except (NpufleetError, ReplyError) as error:
                log.warning("cannot renew leases: %s", error, extra={"model": self.model})
                continue
            # Not those that were published meanwhile, and not again those that are known as lost.
            lost = [held for held in lost if self._ledger.find(held.key) and not held.lost]
            for held in lost:
                held.lost = True
            if lost:
                log.warning("leases were lost", extra={"model": self.model, "entries": len(lost)})

    async def _claim(self, intake: Intake) -> None:
        """Ten times a lease, so that a worker's death costs little more than its lease.

        Some are taken however full this worker is, since nobody else may come.
        """
        lease_s = self._host.settings.lease_s
        for turn in itertools.count(1):
            await asyncio.sleep(lease_s / 10 * random.uniform(0.9, 1.1))
            try:
                while self._leases.may_claim(lease_s) and self._runner.budget_rows:
                    claimed = await self._lanes.claim(lease_s)
                    if claimed:
                        log.info(
                            "claimed entries of a worker that is gone",
                            extra={"model": self.model, "entries": len(claimed)},
                        )
                    self._accept(intake, claimed)
                    if not claimed or self._ledger.rows >= self._runner.budget_rows:
                        break
                if turn % 100 == 0:
                    await self._leases.reap()
            except (NpufleetError, ReplyError) as error:
                log.warning("cannot claim: %s", error, extra={"model": self.model})

    def _finished(self, work: Work, outcome: Outcome) -> None:
        self._release(work)
        self._ledger.settle(work.held)
        self._publisher.add([outcome])

    def _failed(self, work: Work, error: NpufleetError) -> None:
        self._release(work)
        self._refused(work.held, error)

    def _refused(self, held: Held, error: NpufleetError) -> None:
        if held.lost:
            self._ledger.remove(held)
            return
        self._ledger.settle(held)
        outcome = failure(held, error, model=self.model, worker=self._host.name)
        self._publisher.add([outcome])

    def _release(self, work: Work) -> None:
        assert self._decoder is not None
        assert self._intake is not None
        self._decoder.release(work.request)
        self._intake.place_waiting()

    def _published(self, outcome: Outcome, word: str) -> None:
        self._ledger.remove(outcome.held)
        self._rate.ended()
        code = outcome.error.code if outcome.error else "ok"
        self._host.metrics.outcomes.labels(self.model, code if word == "ok" else word).inc()
        if word == "ok" and outcome.kind == "dead":
            log.error(
                "buried a request: %s",
                outcome.error,
                extra={"model": self.model, "id": outcome.held.wire_id, "code": code},
            )
