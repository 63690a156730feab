"""Who holds each device block, and where in its table: what a moved block must be told to.

Sharing keeps positions: a prefix hit, a fork and a swap in all put a block at the place in the
table where it was in the other one. So a block has one position, however many sequences hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.kvcache.block_pool import BlockPool

_NOBODY = -1


class DeviceBlocks:
    """The pool's blocks, each with the sequences that hold it; O(1) per block and sequence.

    The pool counts references, and every holder is one. A swap in progress may hold a block for
    no sequence (`hold`), until its content has left.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._first = [_NOBODY] * pool.num_blocks
        self._further: dict[int, set[int]] = {}
        self._position = [0] * pool.num_blocks

    def take(self, seq_id: int, position: int) -> int:
        """A fresh block for a sequence. Raises `OutOfBlocks`."""
        block = self.pool.take()
        self._first[block] = seq_id
        self._position[block] = position
        return block

    def share(self, block: int, seq_id: int, position: int) -> None:
        """One more holder for a used or cached block. Raises `InvalidBlock`."""
        self.pool.share(block)
        if self._first[block] == _NOBODY:
            self._first[block] = seq_id
            self._position[block] = position
        else:
            self._further.setdefault(block, set()).add(seq_id)

    def release(self, block: int, seq_id: int) -> None:
        """One holder less. Raises `InvalidBlock`."""
        self.pool.release(block)
        self._leave(block, seq_id)

    def release_all(self, blocks: Sequence[int], seq_id: int) -> None:
        """Release a sequence's blocks, the last one first.

        So that of blocks cached at the same time, a prefix outlives what builds on it.
        """
        for block in reversed(blocks):
            self.release(block, seq_id)

    def hold(self, block: int, seq_id: int) -> None:
        """Turn a sequence's reference into one that `BlockPool.release` ends, without a holder."""
        self._leave(block, seq_id)

    def relocate(self, src: int, dst: int, *, keep: bool) -> tuple[int, list[int]]:
        """Move a used block to a free one: its position, and the sequences to be told.

        See `BlockPool.relocate` for ``keep`` and the errors.
        """
        self.pool.relocate(src, dst, keep=keep)
        holders = self.holders(src)
        self._first[src], self._first[dst] = _NOBODY, self._first[src]
        self._position[dst] = self._position[src]
        if src in self._further:
            self._further[dst] = self._further.pop(src)
        return self._position[dst], holders

    def position(self, block: int) -> int:
        """Where in the tables of its holders ``block`` is."""
        return self._position[block]

    def holders(self, block: int) -> list[int]:
        """The sequences that hold ``block``."""
        first = self._first[block]
        return [] if first == _NOBODY else [first, *self._further.get(block, ())]

    def _leave(self, block: int, seq_id: int) -> None:
        further = self._further.get(block)
        if further is None:
            self._first[block] = _NOBODY
            return
        if self._first[block] == seq_id:
            self._first[block] = further.pop()
        else:
            further.remove(seq_id)
        if not further:
            del self._further[block]
