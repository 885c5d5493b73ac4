"""Real executor processes with an arena of their own, for tests."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np

from npufleet.tensors import Array
from npufleet_worker.arena import Arena
from npufleet_worker.device import BatchResult, Executor, Placed
from npufleet_worker.repository import Batching, ExecutorSpec, ModelConfig

BACKENDS = "tests.support.plain_backends"


def plain(
    folder: Path, backend: str = "Obedient", *, batching: Batching | None = None
) -> ModelConfig:
    """The configuration of one of tests.support.plain_backends, with `folder` for its files."""
    return ModelConfig(
        name="m",
        version=1,
        path=folder / "model.plain",
        batching=batching or Batching(max_batch_size=8),
        executor=ExecutorSpec(backend=f"{BACKENDS}:{backend}"),
    )


class Bench:
    """Places requests and runs batches; a request is a list of arrays, one per input."""

    def __init__(self, stack: AsyncExitStack, *, arena_bytes: int = 64 << 20) -> None:
        self.arena = Arena(arena_bytes)
        self._stack = stack

    async def start(self, config: ModelConfig, *, load_limit_s: float = 60) -> Executor:
        executor = await Executor.start(config, self.arena, load_limit_s=load_limit_s)
        self._stack.push_async_callback(executor.close, limit_s=0)
        return executor

    def place(self, arrays: Sequence[Array]) -> Placed:
        blocks = []
        for array in arrays:
            block = self.arena.allocate(array.nbytes)
            assert block is not None
            np.copyto(self.arena.array(block, array.dtype, array.shape), array)
            blocks.append(block)
        return Placed(len(arrays[0]), tuple(blocks))

    def submit(
        self, executor: Executor, *requests: Sequence[Array], gear: int | None = None
    ) -> "asyncio.Future[BatchResult]":
        rows = sum(len(request[0]) for request in requests)
        shapes = [array.shape[1:] for array in requests[0]]
        placed = [self.place(request) for request in requests]
        return executor.submit(placed, shapes=shapes, gear=gear or rows)


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    """A bench whose executors are gone when it ends."""
    async with AsyncExitStack() as stack:
        made = Bench(stack)
        yield made
    made.arena.close()
