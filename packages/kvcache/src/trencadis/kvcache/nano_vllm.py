"""Our block manager with the methods of nano-vllm's, for its scheduler.

    import nanovllm.engine.scheduler
    from trencadis.kvcache.nano_vllm import NanoBlockManager

    nanovllm.engine.scheduler.BlockManager = NanoBlockManager

Nothing of nano-vllm is imported. Its sequences keep their block tables, which are lists: a new
block is appended to them, and our manager is called once a block, not once a token.
"""

from __future__ import annotations

from typing import Protocol

from trencadis.kvcache.config import CacheConfig
from trencadis.kvcache.manager import AllocStatus, BlockManager
from trencadis.kvcache.prefix_cache import PrefixKeys


class NanoSequence(Protocol):
    """What is used of nano-vllm's ``Sequence``. ``len()`` is the number of its tokens."""

    seq_id: int
    token_ids: list[int]
    block_table: list[int]
    num_cached_tokens: int
    num_scheduled_tokens: int

    def __len__(self) -> int: ...


class NanoBlockManager:
    """nano-vllm's ``BlockManager``: blocks 0 to ``num_blocks - 1``, full blocks shared by content.

    ``manager`` is the `BlockManager` behind it. Its block 0 is padding, so nano-vllm's block b is
    its block b + 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        config = CacheConfig(num_blocks=num_blocks + 1, block_size=block_size, watermark=0.0)
        self.manager = BlockManager(config)
        self._keys: dict[int, PrefixKeys] = {}

    def can_allocate(self, seq: NanoSequence) -> int:
        """The number of cached blocks, or -1 where the sequence does not fit now."""
        keys = self.manager.hasher(seq.token_ids)
        if self.manager.can_allocate(seq.token_ids, prefix_keys=keys) is not AllocStatus.OK:
            return -1
        self._keys = {seq.seq_id: keys}  # of the sequence asked last, which `allocate` follows
        return self.manager.num_cached_prefix_blocks(keys, num_tokens=len(seq))

    def allocate(self, seq: NanoSequence, num_cached_blocks: int) -> None:
        """Fill the block table and ``num_cached_tokens``; the count is that of `can_allocate`."""
        keys = self._keys.pop(seq.seq_id, None)
        seq.num_cached_tokens = self.manager.allocate(seq.seq_id, seq.token_ids, prefix_keys=keys)
        seq.block_table.extend((self.manager.block_table(seq.seq_id) - 1).tolist())

    def deallocate(self, seq: NanoSequence) -> None:
        self.manager.free(seq.seq_id)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def can_append(self, seq: NanoSequence) -> bool:
        needed = len(seq) % self.block_size == 1 % self.block_size
        return self.manager.pool.num_free_blocks >= needed

    def may_append(self, seq: NanoSequence) -> None:
        """A block for the last token, if it is the first of one."""
        if len(seq) % self.block_size == 1 % self.block_size:
            self._append_until(seq, len(seq))
            seq.block_table.append(int(self.manager.block_table(seq.seq_id)[-1]) - 1)

    def hash_blocks(self, seq: NanoSequence) -> None:
        """Let later prompts share the blocks that the scheduled tokens fill."""
        computed = seq.num_cached_tokens + seq.num_scheduled_tokens
        if seq.num_cached_tokens // self.block_size < computed // self.block_size:
            self._append_until(seq, computed)
            self.manager.mark_computed(seq.seq_id, computed)

    def _append_until(self, seq: NanoSequence, num_tokens: int) -> None:
        num_slots = self.manager.num_tokens(seq.seq_id)
        if num_slots < num_tokens:
            self.manager.append(seq.seq_id, seq.token_ids[num_slots:num_tokens])
