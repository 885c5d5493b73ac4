"""The supervisor's handle of one executor: start it, hand it batches, see it die.

Up to two batches are on their way at once, one running and one ahead. Knows nothing of Redis, of
requests beyond their rows, or of when a batch should go.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from npufleet import errors, tensors
from npufleet.errors import ConfigurationError, ModelFailed
from npufleet.tensors import Array
from npufleet_worker.arena import Arena, Block, Region
from npufleet_worker.backends import SLOTS
from npufleet_worker.budget import UNDER_WAY
from npufleet_worker.channel import Done, Failed, Load, Message, Ready, Refused, Run
from npufleet_worker.process import ChildProcess, how_it_ended
from npufleet_worker.repository import ModelConfig

logger = logging.getLogger(__name__)

REGIONS = UNDER_WAY + SLOTS
"""Output regions: for the batches on their way, and for as many results not yet released."""

LOAD_LIMIT_S = 300.0
CLOSE_LIMIT_S = 10.0
_REFUSED_LIMIT_S = 2.0

_MODULE = "npufleet_worker.executor"

_generations = itertools.count(1)


class ExecutorDied(ModelFailed):
    """The process went, and the batch with it.

    `running` tells whether the batch was the one being run, which may have been the reason, or
    was only one ahead. `exit_code` is negative for a signal and None where it is not known;
    `said` is the end of what the process printed.
    """

    def __init__(self, message: str, *, exit_code: int | None, running: bool, said: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.running = running
        self.said = said


@dataclass(frozen=True, slots=True)
class Placed:
    """One request's rows in the arena: a block per input, in the order of `Executor.inputs`."""

    rows: int
    blocks: tuple[Block, ...]


class BatchResult:
    """The rows of a batch, without padding, in the order in which its requests were given.

    `outputs` are read-only arrays by name, valid until `release()`; `execute_ms` is the time from
    launch to completion; `gear` the rows that were run, padding included.
    """

    def __init__(
        self, outputs: dict[str, Array], *, execute_ms: float, gear: int, free: Callable[[], None]
    ) -> None:
        self.outputs = outputs
        self.execute_ms = execute_ms
        self.gear = gear
        self._free: Callable[[], None] | None = free

    def release(self) -> None:
        """Give the memory of the outputs back to the executor; harmless when repeated."""
        if self._free is not None:
            self._free()
            self._free = None


@dataclass(frozen=True, slots=True)
class _Outstanding:
    region: int
    gear: int
    future: "asyncio.Future[BatchResult]"


class Executor:
    """A running executor process with its model loaded; made by `start`.

    `inputs`, `outputs` and `gears` are what the file says (no gears: any batch size); `execute_ms`
    holds the warm-up's time by batch size; `died` completes with the exit code (negative: a signal;
    None: not known) when the process goes, after `close` too. For the event loop's thread only.
    """

    def __init__(self, child: ChildProcess, ready: Ready, regions: Sequence[Region]) -> None:
        self.pid = child.pid
        self.died = child.gone
        self.inputs, self.outputs, self.gears = ready.inputs, ready.outputs, ready.gears
        self.execute_ms = dict(ready.execute_ms)
        self._child = child
        self._regions = regions
        self._free = list(range(len(regions)))
        self._outstanding: dict[int, _Outstanding] = {}
        self._closing = False
        child.on_message = self._on_message
        child.gone.add_done_callback(self._on_gone)

    @classmethod
    async def start(
        cls, config: ModelConfig, arena: Arena, *, load_limit_s: float = LOAD_LIMIT_S
    ) -> Self:
        """Start a process that loads `config.path` and reads its rows from `arena`.

        Raises ConfigurationError, with what the process said, where the model cannot be loaded or
        warmed up, or not within `load_limit_s`. Call it in the main thread (see ChildProcess).
        """
        regions = [Region() for _ in range(REGIONS)]
        descriptors = [arena.fd, *(region.fd for region in regions)]
        name = f"{config.name}/{config.version}"
        child = await ChildProcess.start(name, _MODULE, descriptors)
        try:
            ready = await _loaded(child, config, load_limit_s)
        except BaseException:
            await child.close(limit_s=0)
            _close(regions)
            raise
        logger.info("loaded %s", name, extra={"pid": child.pid, "path": str(config.path)})
        return cls(child, ready, regions)

    @property
    def room(self) -> int:
        """How many batches `submit` would take now; it grows with answers and with `release`."""
        if self._closing or self.died.done():
            return 0
        return min(UNDER_WAY - len(self._outstanding), len(self._free))

    @property
    def outstanding(self) -> int:
        """How many batches are on their way."""
        return len(self._outstanding)

    def submit(
        self, requests: Sequence[Placed], *, shapes: Sequence[tuple[int, ...]], gear: int
    ) -> "asyncio.Future[BatchResult]":
        """Hand over a batch: `shapes` are the row shapes of the inputs, `gear` the rows to run.

        Needs `room`; does not wait for the batch before. The future gives the result, or raises
        ModelFailed where the batch fails, or ExecutorDied. When it is cancelled, the batch runs
        all the same and its answer is dropped; blocks may be freed as soon as it is done.
        """
        if not self.room:
            raise RuntimeError(f"there is no room for another batch ({self.outstanding} under way)")
        self._check(requests, shapes, gear)
        generation = next(_generations)
        region = self._free[-1]
        table = tuple((r.rows, *(block.offset for block in r.blocks)) for r in requests)
        self._child.send(Run(generation, region, gear, tuple(shapes), table))
        self._free.pop()
        future = asyncio.get_running_loop().create_future()
        self._outstanding[generation] = _Outstanding(region, gear, future)
        return future

    async def close(self, *, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Let the batches under way finish, then end the process; SIGKILL after `limit_s`."""
        self._closing = True
        await self._child.close(limit_s=limit_s)
        _close(self._regions)
        self._regions = ()

    def kill(self) -> None:
        """SIGKILL, for a batch that hangs: its future and the next one's raise ExecutorDied."""
        self._child.kill()

    def _check(
        self, requests: Sequence[Placed], shapes: Sequence[tuple[int, ...]], gear: int
    ) -> None:
        """ValueError where the executor would read beyond a block: that is another's data."""
        row_bytes = [
            tensors.DTYPES[spec.dtype].itemsize * math.prod(shape)
            for spec, shape in zip(self.inputs, shapes, strict=True)
        ]
        for request in requests:
            for block, size in zip(request.blocks, row_bytes, strict=True):
                if request.rows * size > block.nbytes:
                    raise ValueError(f"{request.rows} rows of {size} bytes do not fit {block}")
        if not 1 <= sum(request.rows for request in requests) <= gear:
            raise ValueError(f"the rows of {len(requests)} requests do not fit gear {gear}")

    def _on_message(self, message: Message) -> None:
        if not isinstance(message, Done | Failed):
            return
        batch = self._outstanding.pop(message.generation, None)
        if batch is None:
            fields = {"pid": self.pid, "generation": message.generation}
            logger.warning("dropped the answer to a batch that is not under way", extra=fields)
            return
        if isinstance(message, Failed) or batch.future.done():
            self._free.append(batch.region)
            if isinstance(message, Failed) and not batch.future.done():
                batch.future.set_exception(errors.from_wire(message.code, message.message))
            return
        try:
            batch.future.set_result(self._result(message, batch))
        except (ValueError, TypeError, KeyError) as error:
            self._free.append(batch.region)
            sentence = f"the executor's answer cannot be read: {error}"
            batch.future.set_exception(ModelFailed(sentence))

    def _result(self, message: Done, batch: _Outstanding) -> BatchResult:
        region = self._regions[batch.region]
        region.reach(message.region_bytes)
        outputs = {}
        for output in message.outputs:
            dtype = tensors.DTYPES[output.dtype].numpy
            array = region.array(output.offset, dtype, output.shape)
            array.flags.writeable = False
            outputs[output.name] = array
        return BatchResult(
            outputs,
            execute_ms=message.execute_ms,
            gear=batch.gear,
            free=partial(self._free.append, batch.region),
        )

    def _on_gone(self, gone: "asyncio.Future[int | None]") -> None:
        code, said = gone.result(), self._child.said
        if not self._closing or self._outstanding:
            fields = {"pid": self.pid, "exit": code, "batches": self.outstanding}
            logger.error("executor %s %s", self._child.name, how_it_ended(code), extra=fields)
        # The executor runs batches in the order in which they came, so the first was running.
        for position, batch in enumerate(self._outstanding.values()):
            if not batch.future.done():
                sentence = f"the model's process {how_it_ended(code)} while it had this batch"
                batch.future.set_exception(
                    ExecutorDied(sentence, exit_code=code, running=position == 0, said=said)
                )
        self._outstanding.clear()


async def _loaded(child: ChildProcess, config: ModelConfig, limit_s: float) -> Ready:
    """What the executor says once it has loaded; ConfigurationError where it has not."""
    first: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    child.on_message = first.set_result  # an executor says one thing before it is told to run
    batching = config.batching
    sizes = batching.gears or tuple(sorted({batching.min_batch_size, batching.max_batch_size}))
    executor = config.executor
    child.send(Load(str(config.path), executor.backend, executor.threads, sizes))
    waiting: list[asyncio.Future[Any]] = [first, child.gone]
    await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    message = first.result() if first.done() else None
    if isinstance(message, Ready):
        return message
    if isinstance(message, Refused):
        await child.close(limit_s=_REFUSED_LIMIT_S)  # so that all of its words are here
        raise ConfigurationError(f"model {child.name}: {message.message}{_tail(child)}")
    if child.gone.done():
        how = how_it_ended(child.gone.result())
        raise ConfigurationError(f"loading {config.path}: the process {how}{_tail(child)}")
    raise ConfigurationError(f"{config.path} was not loaded within {limit_s:g} s{_tail(child)}")


def _tail(child: ChildProcess) -> str:
    return f"; its last words:\n{child.said.rstrip()}" if child.said.strip() else ""


def _close(regions: Sequence[Region]) -> None:
    for region in regions:
        region.close()
