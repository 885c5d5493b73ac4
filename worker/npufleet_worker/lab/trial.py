"""One model in a real executor process, to be tried out: rows go in, batches come back.

Rows take the way of a worker's requests (decoder, arena, executor). Knows nothing of Redis, and
nothing of what is tried.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from npufleet.errors import ConfigurationError, ModelFailed
from npufleet.inputs import wire_inputs
from npufleet.signature import Signature
from npufleet.tensors import Array
from npufleet.wire import Body
from npufleet_worker.arena import Arena
from npufleet_worker.batching import gear_for
from npufleet_worker.decoder import Decoder, Request
from npufleet_worker.device import BatchResult, Executor
from npufleet_worker.lab.samples import Sample
from npufleet_worker.repository import (
    Batching,
    ModelConfig,
    fit,
    load_model,
    load_repository,
    signature_of,
)


@dataclass(frozen=True, slots=True)
class Room:
    """What a trial may take: shared memory for its rows, pixels of a picture, time of a batch."""

    arena_bytes: int
    max_pixels: int
    batch_timeout_s: float


class Trial:
    """A loaded model; made by `open_trial`. For the event loop's thread only."""

    def __init__(self, config: ModelConfig, executor: Executor, arena: Arena, room: Room) -> None:
        self.config = config
        self.signature: Signature = signature_of(config, executor.inputs, executor.outputs)
        self._room = room
        self._executor = executor
        self._decoder = Decoder(
            self.signature, arena, image=config.image, max_pixels=room.max_pixels
        )

    @property
    def gears(self) -> tuple[int, ...]:
        """The batch sizes that are worth trying: the model's gears, else the powers of two."""
        batching = self.config.batching
        if batching.gears:
            least = gear_for(1, batching.gears, batching.min_batch_size)
            return tuple(g for g in batching.gears if least <= g <= batching.max_batch_size)
        return powers(batching.min_batch_size, batching.max_batch_size)

    def place(self, samples: Sequence[Sample]) -> list[Request]:
        """The samples in memory; a RequestError where one does not fit the model."""
        placed = []
        for sample in samples:
            request = self._decoder.place(Body(wire_inputs(self.signature, sample)), 1)
            if request is None:
                raise ConfigurationError(
                    f"{len(samples)} rows do not fit {self._room.arena_bytes >> 20} MB of shared "
                    "memory: give fewer, or raise NPUFLEET_ARENA_MB"
                )
            self._decoder.fill(request)
            placed.append(request)
        shapes = {request.shapes for request in placed}
        if len(shapes) > 1:
            raise ConfigurationError(f"the samples have different shapes: {sorted(shapes)}")
        return placed

    @property
    def room(self) -> int:
        """Batches that `submit` would take now."""
        return self._executor.room

    def submit(self, rows: Sequence[Request], gear: int) -> "asyncio.Future[BatchResult]":
        """Hand over a batch of these rows, padded up to `gear`; a row may be in it many times."""
        placed = [row.placed for row in rows]
        return self._executor.submit(placed, shapes=rows[0].shapes, gear=gear)

    async def answer(self, batch: "asyncio.Future[BatchResult]") -> BatchResult:
        """The result, in time; ModelFailed otherwise."""
        limit_s = self._room.batch_timeout_s
        try:
            return await asyncio.wait_for(batch, limit_s)
        except TimeoutError:
            raise ModelFailed(f"a batch of {self.config.name} ran for {limit_s:g} s") from None

    async def run(self, rows: Sequence[Request], gear: int) -> dict[str, Array]:
        """The outputs of one batch, by name, without the padding."""
        result = await self.answer(self.submit(rows, gear))
        outputs = {name: array.copy() for name, array in result.outputs.items()}
        result.release()
        return outputs


@asynccontextmanager
async def open_trial(
    config: ModelConfig, room: Room, *, change: Callable[[Batching], Batching] | None = None
) -> AsyncIterator[Trial]:
    """The model, loaded; its process is gone when this ends. ConfigurationError as for a worker.

    `change` gives the batching to try, from that of the model with the gears of its file.
    """
    arena = Arena(room.arena_bytes)
    try:
        executor = await Executor.start(config, arena)
        try:
            fitted = fit(config, executor.gears)
            if change is not None:
                fitted = replace(fitted, batching=change(fitted.batching))
            yield Trial(fitted, executor, arena, room)
        finally:
            await executor.close(limit_s=1)
    finally:
        arena.close()


def find(models: Path, name: str) -> ModelConfig:
    """The configuration of a model; ConfigurationError names those that exist."""
    if not (models / name).is_dir() or not name:
        found = load_repository(models)
        names = sorted({*(config.name for config in found.configs), *found.problems})
        known = f"models: {', '.join(names)}" if names else "there is none"
        raise ConfigurationError(f"there is no model {name!r} in {models}; {known}")
    return load_model(models / name)


def powers(least: int, most: int) -> tuple[int, ...]:
    """The powers of two from `least` to `most`, and both ends."""
    doubled = (1 << exponent for exponent in range(most.bit_length()))
    return tuple(sorted({least, most, *(size for size in doubled if least <= size <= most)}))
