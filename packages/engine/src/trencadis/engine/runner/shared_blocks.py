"""Host blocks in memory that another process maps: those of the ranks, whose tiers the core has.

Linux keeps such memory as long as a process has it open or mapped (memfd_create(2)), so none is
left after processes that were killed.
"""

from __future__ import annotations

import mmap
import os
import weakref
from itertools import chain

import attrs

from trencadis.kvcache import Content


@attrs.frozen
class BlockFile:
    """A piece of each host block: ``block_bytes`` at its place in the file at ``path``."""

    path: str
    block_bytes: int


class SharedBlocks:
    """Gives the memory of ``num_blocks`` host blocks; ``files`` has it for other processes."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.files: list[BlockFile] = []

    def allocate(self, num_bytes: int) -> mmap.mmap:
        """Zeroed memory for a piece of every block. Raises `OSError`."""
        descriptor = os.memfd_create("trencadis-blocks")
        try:
            os.ftruncate(descriptor, num_bytes)
            memory = mmap.mmap(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(memory, os.close, descriptor)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.files.append(BlockFile(path, num_bytes // self._num_blocks))
        return memory


@attrs.frozen
class StagingFiles:
    """Where the staging blocks of a process are: ``num_blocks`` host blocks from ``first`` on."""

    first: int
    num_blocks: int
    files: tuple[BlockFile, ...]

    def contents(self) -> list[list[memoryview]]:
        """The memory of each of the blocks, in pieces. Raises `OSError`."""
        blocks: list[list[memoryview]] = [[] for _ in range(self.num_blocks)]
        for file in self.files:
            descriptor = os.open(file.path, os.O_RDWR)
            try:
                memory = memoryview(mmap.mmap(descriptor, 0))
            finally:
                os.close(descriptor)
            for number, pieces in enumerate(blocks, self.first):
                start = number * file.block_bytes
                pieces.append(memory[start : start + file.block_bytes])
        return blocks


def joined_contents(of_processes: list[StagingFiles]) -> list[Content]:
    """The content of each block of several processes, one after the other."""
    contents = [files.contents() for files in of_processes]
    return [[*chain(*pieces)] for pieces in zip(*contents, strict=True)]
