"""What is known of the models of a fleet: their signatures, live workers and queue lengths.

Workers publish it in Redis; this is the reading side, cached and refreshed in the background, which
the gateway and the client share. Knows nothing of model files.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import redis
from redis.asyncio import Redis

from npufleet.errors import ModelNotFound, Overloaded, Unavailable
from npufleet.keys import LANES, RATE_FIELD, FleetKeys, check_model
from npufleet.signature import Signature

log = logging.getLogger(__name__)

_MISS_PAUSE_S = 0.2
"""At most one extra refresh per this long, however many ask for a model that is not there."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model as it was read last.

    `queued` counts the entries of each lane, waiting and in flight together, and `queued_bytes` is
    about what they take; `rate_per_s` is what the live workers can end together (0: not known).
    """

    signature: Signature
    workers: tuple[str, ...] = ()
    queued: Mapping[str, int] = field(default_factory=dict)
    queued_bytes: Mapping[str, int] = field(default_factory=dict)
    rate_per_s: float = 0.0

    def refusal(self, lane: str, *, timeout_ms: int) -> Overloaded | None:
        """Why a request had better not be queued, if so: the lane's bytes, or its deadline.

        What is ahead of it are the lanes that are served before its own, and its own.
        """
        limit = self.signature.limits.max_queue_bytes
        held = self.queued_bytes.get(lane, 0)
        ahead = sum(self.queued.get(name, 0) for name in LANES[: LANES.index(lane) + 1])
        wait_s = ahead / self.rate_per_s if self.rate_per_s else 0.0
        if held > limit:
            return Overloaded(
                f"about {held >> 20} MB wait in lane {lane!r}, its bound is {limit >> 20} MB; "
                "try again later",
                retry_after_s=max(1.0, wait_s * (1 - limit / held)),
            )
        if wait_s * 1000 > timeout_ms:
            return Overloaded(
                f"{ahead} requests are ahead and take about {wait_s:.1f} s, more than the "
                f"{timeout_ms} ms that this one has",
                retry_after_s=max(1.0, wait_s - timeout_ms / 1000),
            )
        return None


class Registry:
    """The cached view; `live_s` is how old a heartbeat may be for its worker to count as live."""

    def __init__(
        self, client: Redis, *, prefix: str, live_s: float = 15.0, refresh_s: float = 2.0
    ) -> None:
        self._client = client
        self._keys = FleetKeys(prefix)
        self._live_s = live_s
        self._refresh_s = refresh_s
        self._states: Mapping[str, ModelState] = {}
        self._read_at_s = float("-inf")
        self._reading = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._unreadable: set[str] = set()

    async def start(self) -> None:
        """Reads once if the server can be reached, and then every `refresh_s`."""
        self._task = asyncio.create_task(self._keep(), name="registry refresh")
        with contextlib.suppress(Unavailable):
            await self.refresh()

    async def close(self) -> None:
        """Ends the refreshing; a read under way ends by itself, within the client's timeout."""
        if self._task is not None:
            self._stopping.set()  # not cancelled: redis-py may lose the cancellation of a read
            await self._task

    async def get(self, model: str) -> ModelState:
        """The model's state; ModelNotFound names the models that exist."""
        state = self._states.get(model)
        if state is not None:
            return state
        check_model(model)
        async with self._reading:
            if self._age_s() > _MISS_PAUSE_S:
                await self._read()
        state = self._states.get(model)
        if state is None:
            known = ", ".join(sorted(self._states)) or "none yet; no worker has registered one"
            raise ModelNotFound(f"there is no model {model!r}; models: {known}")
        return state

    async def all(self) -> Mapping[str, ModelState]:
        """All models by name, no older than the refresh interval while Redis can be reached."""
        if not self._states:
            async with self._reading:
                if self._age_s() > _MISS_PAUSE_S:
                    await self._read()
        return self._states

    async def refresh(self) -> None:
        """Reads now; Unavailable when Redis cannot be reached."""
        async with self._reading:
            await self._read()

    def _age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._read_at_s

    async def _keep(self) -> None:
        failed = False
        while not await self._stopped_within(self._refresh_s):
            try:
                await self.refresh()
                failed = False
            except Unavailable as error:
                if not failed:
                    log.warning("cannot read the registry: %s", error)
                failed = True

    async def _stopped_within(self, limit_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), limit_s)
        return self._stopping.is_set()

    async def _read(self) -> None:
        try:
            names = sorted(map(_text, await self._client.smembers(self._keys.models)))
            time_s, micros = await self._client.time()
            now_ms = time_s * 1000 + micros // 1000
            found = {name: await self._read_model(name, now_ms) for name in names}
        except (redis.RedisError, OSError) as error:
            raise Unavailable(f"cannot read from Redis: {error}", retry_after_s=1) from None
        self._states = {name: state for name, state in found.items() if state is not None}
        self._read_at_s = asyncio.get_running_loop().time()

    async def _read_model(self, name: str, now_ms: int) -> ModelState | None:
        try:
            keys = self._keys.model(name)
        except ModelNotFound:
            self._complain(name)
            return None
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hgetall(keys.signature)
        pipeline.zrangebyscore(keys.workers, now_ms - self._live_s * 1000, "+inf")
        for lane in keys.lanes:
            pipeline.xlen(lane)
        for lane in keys.lanes:
            pipeline.memory_usage(lane, samples=5)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        sizes = answers[-len(LANES) :]
        wrong = [answer for answer in answers[: -len(LANES)] if isinstance(answer, Exception)]
        if not wrong and b"signature" not in answers[0]:
            return None
        signature = None if wrong else _signature(answers[0][b"signature"])
        if signature is None or signature.model != name:
            self._complain(name)
            return None
        self._unreadable.discard(name)
        workers = tuple(map(_text, answers[1]))
        # An ACL or a server of another kind may forbid MEMORY: then the bound in bytes is off.
        known = [0 if isinstance(size, Exception) else size or 0 for size in sizes]
        return ModelState(
            signature=signature,
            workers=workers,
            queued=dict(zip(LANES, answers[2 : 2 + len(LANES)], strict=True)),
            queued_bytes=dict(zip(LANES, known, strict=True)),
            rate_per_s=sum(_rate(answers[0], worker) for worker in workers),
        )

    def _complain(self, name: str) -> None:
        """Once per name: a registry that anybody can write to must not stop anything."""
        if name not in self._unreadable:
            self._unreadable.add(name)
            log.warning("unreadable model in the registry", extra={"model": name[:128]})


def _rate(fields: Mapping[bytes, bytes], worker: str) -> float:
    try:
        return max(0.0, float(fields.get(f"{RATE_FIELD}{worker}".encode(), b"0")))
    except ValueError:
        return 0.0


def _signature(raw: bytes) -> Signature | None:
    try:
        return Signature.from_json(raw)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode(errors="replace")
