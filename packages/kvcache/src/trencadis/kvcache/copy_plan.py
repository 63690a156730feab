"""Block copies as values. `trencadis.kvcache.tensors` carries them out.

The copies of one batch are carried out at once: every source is read before any destination is
written. So a batch may exchange two blocks, and the order of its copies has no meaning. Batches
are carried out in the order in which they were made; `CopyPlan` keeps this order for a step.
"""

from __future__ import annotations

import reprlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import repeat
from operator import index
from typing import NamedTuple

from trencadis.kvcache.errors import InvalidSetting

PLAN_SIZES = (8, 16, 32, 64, 128, 256, 512)
"""Buckets for the number of copies in a batch (seed 000): devices compile a graph for each."""


class BlockCopy(NamedTuple):
    """Copies the content of block ``src`` to block ``dst``, in every layer.

    The `Direction` of the batch says which of the two are device blocks and which host blocks.
    """

    src: int
    dst: int


Copies = tuple[BlockCopy, ...]


def as_block_copies(copies: Sequence[BlockCopy]) -> Copies:
    """The pairs as copies. Raises `InvalidSetting` for anything but pairs of integers."""
    try:
        return tuple(BlockCopy(index(src), index(dst)) for src, dst in copies)
    except (TypeError, ValueError) as error:
        raise InvalidSetting(
            f"block copies must be (source, destination) pairs of block ids, got "
            f"{reprlib.repr(copies)}: pass what the block manager returned"
        ) from error


class SwapCopies(NamedTuple):
    """The swap copies that are due now. Carry out ``out`` before ``in_``."""

    out: Copies
    in_: Copies


class Direction(Enum):
    """The source and the destination memory of a batch of copies."""

    WITHIN = "within"
    """Device to device: copy-on-write, defragmentation."""
    OUT = "out"
    """Device to host: swap out."""
    IN = "in"
    """Host to device: swap in."""


def plan_size(num_copies: int) -> int:
    """The smallest of `PLAN_SIZES` that holds ``num_copies`` copies (512 at most)."""
    return PLAN_SIZES[bisect_left(PLAN_SIZES, num_copies)]


def pad_copies(copies: Sequence[BlockCopy], size: int) -> Copies:
    """The copies padded to ``size`` by repeating the last copy, which changes no other block."""
    return (*copies, *repeat(copies[-1], size - len(copies))) if copies else ()


def split_to_plan_sizes(copies: Sequence[BlockCopy]) -> Iterator[Copies]:
    """Split a batch of a `CopyPlan` into batches of `PLAN_SIZES`, the last one padded.

    For devices that compile a graph for each size. Carrying out the parts one after the other has
    the same effect as the batch: only swaps have batches of more than 512 copies, and a swap never
    writes a block that it reads. Raises `InvalidSetting` for anything but pairs of block ids.
    """
    copies = as_block_copies(copies)
    largest = PLAN_SIZES[-1]
    for first in range(0, len(copies), largest):
        part = copies[first : first + largest]
        yield pad_copies(part, plan_size(len(part)))


class CopyPlan:
    """The block copies of one step, as ``(direction, copies)`` batches in order.

    The order matters: a block that one operation released can be the destination of a later copy.
    Consecutive copies of one direction are joined into one batch if the result is the same, so
    most steps have one batch per direction.
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
        """Append the copies that one call of the block manager returned.

        Raises `InvalidSetting` for anything but a `Direction` and pairs of block ids.
        """
        if not isinstance(direction, Direction):
            raise InvalidSetting(f"direction must be a Direction, got {direction!r}: pass one")
        copies = as_block_copies(copies)
        if not copies:
            return
        if not self._can_join(direction, copies):
            self._batches.append((direction, []))
            self._written = set()
        self._batches[-1][1].extend(copies)
        self._written.update(copy.dst for copy in copies)

    def _can_join(self, direction: Direction, copies: Sequence[BlockCopy]) -> bool:
        if not self._batches or self._batches[-1][0] is not direction:
            return False
        written = {copy.dst for copy in copies}
        if direction is not Direction.WITHIN:
            return self._written.isdisjoint(written)
        # Within the device, source and destination ids are of the same memory. A larger batch
        # would be split, possibly between the two copies of an exchange.
        if len(self._batches[-1][1]) + len(copies) > PLAN_SIZES[-1]:
            return False
        return self._written.isdisjoint(written | {copy.src for copy in copies})
