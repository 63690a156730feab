"""Plans: which block is copied to where. They are values; `trencadis.kvcache.tensors` acts on them.

The copies of one plan happen *at once*: every source is read before any destination is written.
So a plan may exchange two blocks, and the order of its copies carries no meaning. Plans are
carried out in the order in which they were made; `MovePlan` keeps that order for a whole step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import repeat
from typing import NamedTuple

PLAN_SIZES = (8, 16, 32, 64, 128, 256, 512)
"""Copies per plan for which a device has compiled graphs (seed 000); plans are padded to one."""


class BlockCopy(NamedTuple):
    """The whole content of block ``src`` replaces that of block ``dst``, in every layer.

    Which memory the ids mean is told by the `Direction` of the plan.
    """

    src: int
    dst: int


Copies = tuple[BlockCopy, ...]


class SwapCopies(NamedTuple):
    """Copies between device and host that are due now; carry out ``out`` before ``in_``."""

    out: Copies
    in_: Copies


class Direction(Enum):
    """Between which memories the copies of a plan go."""

    WITHIN = "within"
    """Device to device: copy on write, defragmentation."""
    OUT = "out"
    """Device to host: swap out."""
    IN = "in"
    """Host to device: swap in."""


def pad_copies(copies: Sequence[BlockCopy], size: int) -> Copies:
    """The copies filled up to ``size`` by repeating the last, which writes nothing else."""
    return (*copies, *repeat(copies[-1], size - len(copies))) if copies else ()


def in_plan_sizes(copies: Sequence[BlockCopy]) -> Iterator[Copies]:
    """The copies of a batch in pieces of `PLAN_SIZES`, the last one padded.

    For devices that compile each new size. The pieces are for one after the other, which gives what
    the batch would: those of a `MovePlan` do not write what others of them read.
    """
    most = PLAN_SIZES[-1]
    for first in range(0, len(copies), most):
        piece = copies[first : first + most]
        yield pad_copies(piece, PLAN_SIZES[bisect_left(PLAN_SIZES, len(piece))])


class MovePlan:
    """The copies of one step, in the order in which the manager asked for them.

    A block that one call gave up may be the destination of the next call's copy, so the order
    counts. Neighbouring copies of one direction are joined into one batch while that changes
    nothing, which leaves most steps with one batch per direction.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[Direction, list[BlockCopy]]] = []
        self._written: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._batches)

    def __iter__(self) -> Iterator[tuple[Direction, Copies]]:
        for direction, copies in self._batches:
            yield direction, tuple(copies)

    def add(self, direction: Direction, copies: Sequence[BlockCopy]) -> None:
        """Append the copies that one call of the manager returned."""
        if not copies:
            return
        if not self._joins(direction, copies):
            self._batches.append((direction, []))
            self._written = set()
        self._batches[-1][1].extend(copies)
        self._written.update(copy.dst for copy in copies)

    def _joins(self, direction: Direction, copies: Sequence[BlockCopy]) -> bool:
        if not self._batches or self._batches[-1][0] is not direction:
            return False
        # Source and destination are ids of the same memory only within the device.
        reads = {copy.src for copy in copies} if direction is Direction.WITHIN else set()
        return self._written.isdisjoint(reads | {copy.dst for copy in copies})
