"""Shared memory: blocks never overlap, nothing is lost, and the reader cannot write."""

import mmap
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npufleet_worker.arena import ALIGNMENT, Arena, Block, Region, Window


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 50)), max_size=80))
def test_blocks_never_overlap_and_all_memory_comes_back(steps: list[tuple[int, int]]) -> None:
    """Any order of allocating and freeing; in the end the whole arena is one piece again."""
    arena = Arena(4096)
    held: list[Block] = []
    for nbytes, choice in steps:
        if choice % 3 == 0 and held:
            arena.free(held.pop(choice % len(held)))
        elif block := arena.allocate(nbytes):
            held.append(block)
            held.sort()
        for a, b in pairwise(held):
            assert a.offset + max(a.nbytes, 1) <= b.offset
        assert all(b.offset % ALIGNMENT == 0 and b.offset + b.nbytes <= 4096 for b in held)
    for block in held:
        arena.free(block)
    assert arena.free_bytes == 4096
    whole = arena.allocate(4096)
    assert whole is not None
    arena.close()


def test_arrays_outlive_their_arena() -> None:
    """A reply may still be on its way out when a worker closes."""
    arena = Arena(1024)
    block = arena.allocate(8)
    assert block is not None
    array = arena.array(block, "<i4", (2,))
    array[:] = [1, 2]
    arena.close()
    del arena
    assert array.tolist() == [1, 2]


def test_a_full_arena_says_so_and_stays_usable() -> None:
    """The bound holds: the caller waits and tries again."""
    arena = Arena(256)
    first, second = arena.allocate(128), arena.allocate(100)
    assert first is not None
    assert second is not None
    assert arena.allocate(1) is None
    arena.free(first)
    assert arena.allocate(129) is None
    assert arena.allocate(128) == first
    arena.close()


def test_freeing_twice_is_an_error() -> None:
    """It would give two requests the same memory."""
    arena = Arena(256)
    block = arena.allocate(10)
    assert block is not None
    arena.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        arena.free(block)
    arena.close()


def test_an_array_larger_than_its_block_is_an_error() -> None:
    """It would reach into a neighbour."""
    arena = Arena(1024)
    block = arena.allocate(40)
    assert block is not None
    assert arena.array(block, "<f4", (2, 5)).shape == (2, 5)
    with pytest.raises(ValueError, match="does not fit"):
        arena.array(block, "<f4", (11,))
    arena.close()


def test_what_is_written_is_seen_through_the_window() -> None:
    """The executor's side maps the same memory, and can only read."""
    arena = Arena(1024)
    arena.allocate(64)
    block = arena.allocate(8)
    assert block is not None
    window = Window(arena.fd)
    arena.array(block, "<i4", (2,))[:] = [7, 8]
    seen = window.array(block.offset, "<i4", (2,))
    assert seen.tolist() == [7, 8]
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1
    with pytest.raises((ValueError, TypeError)):
        window.array(1024, "<i4", (2,))
    arena.array(block, "<i4", (2,))[0] = 9
    arena.close()
    assert seen.tolist() == [9, 8]


def test_the_kernel_refuses_an_executor_that_would_write_inputs() -> None:
    """A backend gone wild in another process cannot touch other requests, nor cut the memory."""
    arena = Arena(mmap.PAGESIZE)
    code = """
import mmap, os, sys
fd = int(sys.argv[1])
tries = [lambda: mmap.mmap(fd, 4096), lambda: os.write(fd, b"x"), lambda: os.ftruncate(fd, 0)]
for attempt in tries:
    try:
        attempt()
    except PermissionError:
        print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(arena.fd)],
        pass_fds=[arena.fd], capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["refused"] * 3
    arena.close()


def test_a_region_grows_under_a_reader_that_has_it_mapped() -> None:
    """Old views stay right, and the reader maps more when told a larger size."""
    reader = Region()
    writer = Region(os.dup(reader.fd))
    writer.grow(16)
    writer.array(0, "<i4", (4,))[:] = [1, 2, 3, 4]
    reader.reach(16)
    old = reader.array(0, "<i4", (4,))
    writer.grow(1 << 20)
    writer.array((1 << 20) - 4, "<i4", (1,))[0] = 5
    reader.reach(1 << 20)
    assert old.tolist() == [1, 2, 3, 4]
    assert reader.array((1 << 20) - 4, "<i4", (1,)).tolist() == [5]
    writer.close()
    reader.close()
    assert old.tolist() == [1, 2, 3, 4]


def test_a_region_is_never_read_beyond_its_end() -> None:
    """The kernel would answer with SIGBUS; a wrong size in a message must not do that."""
    region = Region()
    region.grow(100)
    with pytest.raises(ValueError, match="not 8192"):
        region.reach(8192)
    assert region.array(0, np.float32, (0, 3)).shape == (0, 3)
    region.close()
