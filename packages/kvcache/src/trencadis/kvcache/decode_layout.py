"""The layout of a decode batch: which row reads which block of the KV cache.

Contiguous attention reads the blocks ``0 .. num_blocks - 1`` without a gather and multiplies each
block with the query of the batch row that owns it. A block has one owner. Every further row that
shares the block gets an extra (block, row) pair, and the blocks of these few pairs are gathered.
Or the first blocks of the prefix have no owners, and each of them is read once for all rows.
Attention over lists of blocks has no prefix: all its blocks are such pairs (`lay_out_pairs`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.kvcache.config import MAX_BLOCK_SIZE, PADDING_BLOCK
from trencadis.kvcache.errors import InvalidSetting
from trencadis.kvcache.validators import integer

_BLOCK_SIZE = integer(1, MAX_BLOCK_SIZE, remedy="pass that of the cache")

NO_OWNER = -1
"""The owner of a block that no row of the batch reads."""

Int32Array = npt.NDArray[np.int32]


@attrs.frozen(eq=False)
class DecodeLayout:
    """Which batch row reads which block, and how many slots of the block it attends to.

    ``owner``: ``int32[num_blocks]``, the row that owns each block of the contiguous prefix, or
    `NO_OWNER` for the padding block, free blocks and blocks of sequences outside the batch.
    ``used``: ``int32[num_blocks]``, the slots to attend to in each block, 0 without an owner.
    ``extra_block``, ``extra_owner``, ``extra_used``: ``int32[num_extra]``, the block, row and
    slots of each extra pair.
    ``shared_used``: ``int32[rows, num_shared]``, the slots that each row attends to in each of the
    first blocks, which have no owners and no extra pairs then.
    ``start``, ``extra_start``, ``shared_start``: beside each of these, the position that the
    block's first slot has in the row's sequence. It follows from the order of the row's block
    table: the same block can be at another place of another row.
    """

    owner: Int32Array
    used: Int32Array
    extra_block: Int32Array
    extra_owner: Int32Array
    extra_used: Int32Array
    shared_used: Int32Array
    start: Int32Array
    extra_start: Int32Array
    shared_start: Int32Array

    @property
    def num_blocks(self) -> int:
        """Length of the contiguous prefix, the padding block 0 included."""
        return len(self.owner)

    @property
    def num_extra(self) -> int:
        """Number of extra (block, row) pairs."""
        return len(self.extra_block)


def lay_out(
    block_tables: Sequence[Int32Array],
    num_tokens: Sequence[int],
    block_size: int,
    num_blocks: int | None = None,
    num_shared: int = 0,
) -> DecodeLayout:
    """The layout of a batch whose row ``i`` has ``block_tables[i]`` and ``num_tokens[i]`` slots.

    ``num_blocks`` is the length of the contiguous prefix, usually a bucket; by default the prefix
    ends with the highest block of these tables. The first ``num_shared`` of its blocks are read for
    all rows. No Python loop runs over the blocks. Raises `InvalidSetting` if a block is outside the
    prefix, if ``num_shared`` is, or if a row does not have exactly the blocks that its slots need:
    a swapped sequence, which has none, is not part of a batch. Padding blocks 0 at the beginning
    of a table stand for blocks that were given back, and are not read.
    """
    blocks, rows, slots, starts = _pairs(block_tables, num_tokens, block_size)
    needed = int(blocks.max(initial=0)) + 1
    if num_blocks is not None and (type(num_blocks) is not int or num_blocks < needed):
        remedy = f"pass at least {needed}"
        if type(num_blocks) is not int or num_blocks < 1:
            num_blocks = integer(1, remedy=remedy).checked("num_blocks", num_blocks)
        if num_blocks < needed:
            raise InvalidSetting(
                f"num_blocks {num_blocks} ends before block {needed - 1} of this batch: {remedy}"
            )
    owner = np.full(num_blocks or needed, NO_OWNER, np.int32)
    used, start = np.zeros((2, len(owner)), np.int32)
    if type(num_shared) is not int or not 0 <= num_shared <= len(owner):
        remedy = "pass a part of the prefix"
        num_shared = integer(0, len(owner), remedy=remedy).checked("num_shared", num_shared)
    shared_used, shared_start = np.zeros((2, len(block_tables), num_shared), np.int32)
    if num_shared:
        shared = blocks < num_shared
        shared_used[rows[shared], blocks[shared]] = slots[shared]
        shared_start[rows[shared], blocks[shared]] = starts[shared]
        blocks, rows, slots, starts = (x[~shared] for x in (blocks, rows, slots, starts))
    # NumPy keeps the last of several values for one index. In reverse order that is the first row.
    owner[blocks[::-1]] = rows[::-1]
    used[blocks[::-1]] = slots[::-1]
    start[blocks[::-1]] = starts[::-1]
    extra = np.flatnonzero(owner[blocks] != rows)
    return DecodeLayout(
        *(owner, used, blocks[extra], rows[extra], slots[extra], shared_used),
        *(start, starts[extra], shared_start),
    )


def lay_out_pairs(
    block_tables: Sequence[Int32Array], num_tokens: Sequence[int], block_size: int
) -> DecodeLayout:
    """The layout of a batch that reads its own blocks only, each gathered: no prefix, all pairs.

    A block that several rows share is one pair for each. Arguments and errors are those of
    `lay_out`.
    """
    blocks, rows, slots, starts = _pairs(block_tables, num_tokens, block_size)
    nothing, none_shared = np.empty(0, np.int32), np.empty((len(block_tables), 0), np.int32)
    return DecodeLayout(
        *(nothing, nothing, blocks, rows, slots, none_shared), *(nothing, starts, none_shared)
    )


def _pairs(
    block_tables: Sequence[Int32Array], num_tokens: Sequence[int], block_size: int
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
    """Block, row, slots and start of each (block, row) pair, row after row. Checks arguments."""
    if type(block_size) is not int or not 1 <= block_size <= MAX_BLOCK_SIZE:
        block_size = _BLOCK_SIZE.checked("block_size", block_size)
    lengths, blocks, tokens = _as_arrays(block_tables, num_tokens)
    slots_of_last = tokens - (lengths - 1) * block_size
    incomplete = np.flatnonzero((lengths < 1) | (slots_of_last < 1) | (slots_of_last > block_size))
    if len(incomplete):
        row = int(incomplete[0])
        raise InvalidSetting(
            f"row {row} has {lengths[row]} blocks of {block_size} for {tokens[row]} slots: "
            "pass the block table of each sequence with its number of slots"
        )
    lowest = blocks.min(initial=PADDING_BLOCK + 1)
    if lowest < PADDING_BLOCK:
        raise InvalidSetting(f"block {lowest} is in a block table: pass tables of a block manager")
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    slots = np.full(len(blocks), block_size, np.int32)
    ends = np.cumsum(lengths)
    slots[ends - 1] = slots_of_last
    places = np.arange(len(blocks), dtype=np.int32) - np.repeat(ends - lengths, lengths)
    starts = (places * block_size).astype(np.int32)
    if lowest > PADDING_BLOCK:
        return blocks, rows, slots, starts
    held = blocks != PADDING_BLOCK
    if (held[:-1] & ~held[1:] & (places[1:] > 0)).any():
        raise InvalidSetting(
            "block 0 is in a block table after another block: pass tables of a block manager"
        )
    return blocks[held], rows[held], slots[held], starts[held]


def _as_arrays(
    block_tables: Sequence[Int32Array], num_tokens: Sequence[int]
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """The lengths of the tables, their blocks one after the other, and the slots of each row."""
    try:
        lengths = np.fromiter(map(len, block_tables), np.int32, len(block_tables))
        blocks = np.concatenate(block_tables) if len(lengths) else np.empty(0, np.int32)
        tokens = np.asarray(num_tokens, None if len(num_tokens) else np.int32)
    except (TypeError, ValueError, OverflowError) as error:
        raise _not_a_batch(block_tables, num_tokens) from error
    kinds = blocks.dtype.kind + tokens.dtype.kind
    if kinds != "ii" or blocks.ndim != 1 or tokens.shape != lengths.shape:
        raise _not_a_batch(block_tables, num_tokens)
    return lengths, blocks, tokens


def _not_a_batch(block_tables: object, num_tokens: object) -> InvalidSetting:
    return InvalidSetting(
        "block_tables must be integer arrays, and num_tokens an integer for each, got "
        f"{reprlib.repr(block_tables)} and {reprlib.repr(num_tokens)}: pass a table and a number "
        "of slots for each row"
    )
