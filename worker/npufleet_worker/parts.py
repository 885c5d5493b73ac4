"""Requests in parts: one with more rows than a batch may have runs in several, and is one again.

Nearly every request has a single part, which is never copied. Knows nothing of batches, executors
or Redis.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from npufleet.errors import NpufleetError
from npufleet.tensors import Array
from npufleet_worker.arena import Block
from npufleet_worker.device import Placed
from npufleet_worker.intake import Work
from npufleet_worker.outcomes import Ran


class Whole:
    """One request: what has become of its parts. `running` of them are on an executor now."""

    def __init__(self, work: Work, most_rows: int) -> None:
        self.work = work
        self.parts = tuple(_cut(self, work.request.placed, most_rows))
        self.running = 0
        self.error: NpufleetError | None = None
        self.ended = False
        self._ran: dict[int, tuple[Ran, Mapping[str, Array]]] = {}

    @property
    def split(self) -> bool:
        return len(self.parts) > 1

    def ran(self, part: "Part", ran: Ran, outputs: Mapping[str, Array]) -> bool:
        """Keeps a part's outputs, copied where others are to come; whether it was the last one."""
        if self.split:
            outputs = {name: np.array(array) for name, array in outputs.items()}
        self._ran[part.first_row] = ran, outputs
        return len(self._ran) == len(self.parts)

    def outputs(self) -> Mapping[str, Array]:
        """Those of all parts, in the order of their rows; each part must have run."""
        ran = [self._ran[part.first_row][1] for part in self.parts]
        if len(ran) == 1:
            return ran[0]
        return {name: np.concatenate([outputs[name] for outputs in ran]) for name in ran[0]}

    def summary(self) -> Ran:
        """The first part's batch, which is the largest; from the first launch to the last end."""
        runs = [self._ran[part.first_row][0] for part in self.parts]
        return replace(
            runs[0],
            launched_s=min(ran.launched_s for ran in runs),
            done_s=max(ran.done_s for ran in runs),
            execute_ms=sum(ran.execute_ms for ran in runs),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some rows of a request, from `first_row` on, where they lie in the arena."""

    whole: Whole
    first_row: int
    placed: Placed

    @property
    def work(self) -> Work:
        return self.whole.work

    @property
    def rows(self) -> int:
        return self.placed.rows

    @property
    def key(self) -> Hashable:
        """Only parts of equal key may share a batch."""
        return self.work.request.shapes, self.deterministic

    @property
    def deterministic(self) -> bool:
        """Whether it must run in the one gear that its row shapes always run in."""
        return self.work.request.deterministic


def _cut(whole: Whole, placed: Placed, most_rows: int) -> Iterator[Part]:
    if placed.rows <= most_rows:
        yield Part(whole, 0, placed)
        return
    for first in range(0, placed.rows, most_rows):
        rows = min(most_rows, placed.rows - first)
        blocks = tuple(_rows_of(block, placed.rows, first, rows) for block in placed.blocks)
        yield Part(whole, first, Placed(rows, blocks))


def _rows_of(block: Block, of: int, first: int, rows: int) -> Block:
    row_bytes = block.nbytes // of
    return Block(block.offset + first * row_bytes, rows * row_bytes)
