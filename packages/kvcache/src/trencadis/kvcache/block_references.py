"""Which sequences reference each device block, and at which position of their tables.

The defragmenter needs this to update the tables when it moves a block. Prefix hits, forks and
swap ins put a shared block at the same position in every table, so a block has one position.
"""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.kvcache.block_pool import BlockPool

_NO_SEQUENCE = -1


class BlockReferences:
    """The references that sequences have to the blocks of a pool. O(1) per block and sequence.

    The pool counts references; this records which sequences they belong to. A pending swap out
    keeps a reference that belongs to no sequence (see `detach`).
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        # Most blocks belong to one sequence. Only further sequences need a set.
        self._first = [_NO_SEQUENCE] * pool.num_blocks
        self._others: dict[int, set[int]] = {}
        self._position = [0] * pool.num_blocks

    def allocate(self, seq_id: int, position: int) -> int:
        """Allocate a block for a sequence. Raises `OutOfBlocks`."""
        block = self.pool.allocate()
        self._first[block] = seq_id
        self._position[block] = position
        return block

    def share(self, block: int, seq_id: int, position: int) -> None:
        """Add a sequence's reference to a used or cached block. Raises `InvalidBlock`."""
        self.pool.share(block)
        if self._first[block] == _NO_SEQUENCE:
            self._first[block] = seq_id
            self._position[block] = position
        else:
            self._others.setdefault(block, set()).add(seq_id)

    def release(self, block: int, seq_id: int) -> None:
        """Remove a sequence's reference. Raises `InvalidBlock`."""
        self.pool.release(block)
        self._remove(block, seq_id)

    def release_all(self, blocks: Sequence[int], seq_id: int) -> None:
        """Release the blocks of a sequence, the last block first.

        So the last blocks are evicted first, and a cached prefix stays longer than its suffix.
        """
        for block in reversed(blocks):
            self.release(block, seq_id)

    def detach(self, block: int, seq_id: int) -> None:
        """Keep a reference in the pool that no longer belongs to the sequence.

        `BlockPool.release` removes it.
        """
        self._remove(block, seq_id)

    def relocate(self, src: int, dst: int, *, keep: bool) -> tuple[int, list[int]]:
        """Move a used block to a free one; returns its position and its sequences.

        See `BlockPool.relocate` for ``keep`` and the errors.
        """
        self.pool.relocate(src, dst, keep=keep)
        seq_ids = self.sequences(src)
        self._first[src], self._first[dst] = _NO_SEQUENCE, self._first[src]
        self._position[dst] = self._position[src]
        if src in self._others:
            self._others[dst] = self._others.pop(src)
        return self._position[dst], seq_ids

    def position(self, block: int) -> int:
        """The position of a used block in the tables of its sequences."""
        return self._position[block]

    def sequences(self, block: int) -> list[int]:
        """The ids of the sequences that reference ``block``."""
        first = self._first[block]
        return [] if first == _NO_SEQUENCE else [first, *self._others.get(block, ())]

    def _remove(self, block: int, seq_id: int) -> None:
        others = self._others.get(block)
        if others is None:
            self._first[block] = _NO_SEQUENCE
            return
        if self._first[block] == seq_id:
            self._first[block] = others.pop()
        else:
            others.remove(seq_id)
        if not others:
            del self._others[block]
