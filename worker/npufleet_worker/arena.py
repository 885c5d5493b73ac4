"""Memory that the supervisor and its executors share: request rows one way, outputs the other.

Anonymous files (memfd) that are inherited by descriptor: nothing to name, nothing to leave behind.
Knows nothing of requests, batches or processes, and no locks: one thread allocates and frees.
"""

import bisect
import fcntl
import math
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from npufleet.tensors import Array

ALIGNMENT = 64

# Mappings are never closed by hand: an array of numpy keeps its mapping alive, but does not keep
# `mmap.close` from pulling the memory away under it.

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python names it from 3.13 on


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """A piece of an arena, in bytes; `nbytes` is what was asked for."""

    offset: int
    nbytes: int


class Arena:
    """A bounded heap that this process writes and others may only read.

    `fd` is for inheritance. First fit; neighbours that are free grow together again.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = aligned(max(size_bytes, 1))
        self.fd = os.memfd_create("npufleet-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size_bytes)
        self._memory = mmap.mmap(self.fd, self.size_bytes)
        _seal(self.fd)
        self._free = [(0, self.size_bytes)]
        self._used: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """What is free in all; no single block need be as large."""
        return self.size_bytes - sum(self._used.values())

    def allocate(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes`, its content undefined; None where none is large enough."""
        size = aligned(max(nbytes, 1))
        for index, (offset, room) in enumerate(self._free):
            if room < size:
                continue
            if room == size:
                del self._free[index]
            else:
                self._free[index] = (offset + size, room - size)
            self._used[offset] = size
            return Block(offset, nbytes)
        return None

    def free(self, block: Block) -> None:
        """Give a block back; ValueError for one that is not allocated."""
        size = self._used.pop(block.offset, None)
        if size is None:
            raise ValueError(f"{block} is not allocated")
        offset = block.offset
        index = bisect.bisect(self._free, (offset,))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            before, room = self._free.pop(index)
            offset, size = before, room + size
        self._free.insert(index, (offset, size))

    def array(self, block: Block, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> Array:
        """The block as a writable array; ValueError where the shape is larger than the block."""
        if math.prod(shape) * np.dtype(dtype).itemsize > block.nbytes:
            raise ValueError(f"{dtype} of shape {shape} does not fit {block}")
        return np.ndarray(shape, dtype, self._memory, block.offset)

    def close(self) -> None:
        """Close the descriptor. The memory goes with the last array and the arena itself."""
        os.close(self.fd)


class Window:
    """Another process' arena, to be read: `fd` is the arena's, inherited."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)

    def array(self, offset: int, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> Array:
        """A read-only array at that offset; ValueError or TypeError beyond the end."""
        return np.ndarray(shape, dtype, self._memory, offset)


class Region:
    """Outputs of one batch at a time: one process grows and writes it, the other one reads.

    `fd` is inherited. Growing never moves what a reader has mapped.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("npufleet-outputs", os.MFD_CLOEXEC) if fd is None else fd
        self._memory: mmap.mmap | None = None

    def grow(self, nbytes: int) -> None:
        """Make room for `nbytes` (the writing side)."""
        if os.fstat(self.fd).st_size < nbytes:
            os.ftruncate(self.fd, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.reach(nbytes)

    def reach(self, nbytes: int) -> None:
        """Map at least `nbytes`; ValueError where the region is smaller than that."""
        if nbytes == 0 or (self._memory is not None and len(self._memory) >= nbytes):
            return
        size = os.fstat(self.fd).st_size
        if size < nbytes:
            raise ValueError(f"the region has {size} bytes, not {nbytes}")
        self._memory = mmap.mmap(self.fd, size)

    def array(self, offset: int, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> Array:
        """An array at that offset of what is mapped; ValueError or TypeError beyond the end."""
        if math.prod(shape) == 0:
            return np.empty(shape, dtype)
        if self._memory is None:
            raise ValueError("nothing of the region is mapped")
        return np.ndarray(shape, dtype, self._memory, offset)

    def close(self) -> None:
        """Close the descriptor; arrays that are still about keep the memory until they go."""
        self._memory = None
        os.close(self.fd)


def aligned(size: int) -> int:
    """The next multiple of ALIGNMENT: where a further array may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _seal(fd: int) -> None:
    """Fix the size, and let nobody map it for writing from now on (this process has)."""
    with suppress(OSError):  # a kernel without it is still right, only not proof against bugs
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
