"""The pool of host blocks, which hold the content of swapped sequences."""

from __future__ import annotations

from trencadis.kvcache.block_bitmap import BlockBitmap
from trencadis.kvcache.block_keys import BlockKey
from trencadis.kvcache.errors import OutOfHostBlocks
from trencadis.kvcache.prefix_index import PrefixIndex


class HostBlockPool:
    """Host blocks 0 to ``num_blocks - 1`` with reference counts and an index of their content.

    Swapped sequences that share a block share one host block. A block without references is free
    and its content is lost.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = BlockBitmap(num_blocks)
        self._free.add_range(0, num_blocks)
        self._ref_counts = [0] * num_blocks
        self._prefix_index = PrefixIndex()

    @property
    def num_free_blocks(self) -> int:
        """Host blocks without a reference."""
        return len(self._free)

    def ref_count(self, block: int) -> int:
        """The number of references to ``block``, from sequences and pending swap ins."""
        return self._ref_counts[block]

    def lookup(self, key: BlockKey | None) -> int | None:
        """The host block that holds the content of ``key``, or will after a pending swap out."""
        return None if key is None else self._prefix_index.lookup(key)

    def allocate(self, key: BlockKey | None) -> int:
        """Allocate the lowest free block for the content of ``key``. Raises `OutOfHostBlocks`."""
        block = self._free.lowest()
        if block < 0:
            raise OutOfHostBlocks(
                f"all {self.num_blocks} host blocks are in use: raise num_host_blocks"
            )
        self._free.remove(block)
        self._ref_counts[block] = 1
        if key is not None:
            self._prefix_index.register(key, block)
        return block

    def share(self, block: int) -> None:
        """Add a reference to a used block."""
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Remove a reference; without references a block is free."""
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._prefix_index.drop(block)
            self._free.add(block)

    def reset_prefix_cache(self) -> None:
        """Clear the index, so that no other sequence shares what is on the host now."""
        self._prefix_index = PrefixIndex()
