"""How a batch of decoding sequences lies in the cache, for attention that reads it in one piece.

The attention reads the blocks ``0 .. num_blocks - 1`` with no gather, and multiplies each with the
query of the batch row that owns it. A block that several rows share can be one row's only; each
further row gets an extra pair (block, row), and those few blocks are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.kvcache.block_table import Blocks
from trencadis.kvcache.errors import InvalidSetting

NO_OWNER = -1

Int32Array = npt.NDArray[np.int32]


@attrs.frozen(eq=False)
class DecodeLayout:
    """Which batch row reads which block, and how many of the block's slots are its own.

    ``owner``: ``int32[num_blocks]``, the row that owns each block of the contiguous prefix,
    `NO_OWNER` for the padding block, for free ones and for those of sequences not in the batch.
    ``used``: ``int32[num_blocks]``, slots to attend to in each, 0 where there is no owner.
    ``extra_block``, ``extra_owner``, ``extra_used``: ``int32[num_extra]``, the same for the pairs
    beyond a block's first owner.
    """

    owner: Int32Array
    used: Int32Array
    extra_block: Int32Array
    extra_owner: Int32Array
    extra_used: Int32Array

    @property
    def num_blocks(self) -> int:
        """Length of the contiguous prefix, the padding block 0 included."""
        return len(self.owner)

    @property
    def num_extra(self) -> int:
        """(Block, row) pairs beyond the prefix."""
        return len(self.extra_block)


def lay_out(
    tables: Sequence[Blocks],
    num_tokens: Sequence[int],
    block_size: int,
    num_blocks: int | None = None,
) -> DecodeLayout:
    """The layout of one block table and one number of slots per batch row.

    ``num_blocks`` is the length of the prefix; None ends it at the highest block of these tables.
    Takes no Python step per block. Raises `InvalidSetting` where ``num_blocks`` is too short.
    """
    lengths = np.fromiter(map(len, tables), np.int32, len(tables))
    blocks = np.concatenate(tables) if tables else np.empty(0, np.int32)
    needed = int(blocks.max(initial=0)) + 1
    if num_blocks is not None and num_blocks < needed:
        raise InvalidSetting(
            f"num_blocks {num_blocks} ends before block {needed - 1} of this batch: "
            f"pass at least {needed}"
        )
    rows = np.repeat(np.arange(len(tables), dtype=np.int32), lengths)
    slots = np.full(len(blocks), block_size, np.int32)
    slots[np.cumsum(lengths) - 1] = np.asarray(num_tokens, np.int32) - (lengths - 1) * block_size

    owner = np.full(num_blocks or needed, NO_OWNER, np.int32)
    used = np.zeros(len(owner), np.int32)
    # Of several values for one index NumPy keeps the last; reversed, that is the first row.
    owner[blocks[::-1]] = rows[::-1]
    used[blocks[::-1]] = slots[::-1]
    extra = np.flatnonzero(owner[blocks] != rows)
    return DecodeLayout(owner, used, blocks[extra], rows[extra], slots[extra])
