"""`check_allocator`: sound allocators pass, and it finds each of the planted faults."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import Phase, settings
from nano_sequence import NanoSequence

from trencadis.kvcache import AllocStatus, BlockManager, CacheConfig, OutOfBlocks
from trencadis.kvcache.nano_vllm import NanoBlockManager
from trencadis.kvcache.testing import DEFAULT_SETTINGS, AllocatorFault, check_allocator

FIRST_FAULT = settings(
    DEFAULT_SETTINGS, max_examples=4000, stateful_step_count=25, phases=[Phase.generate]
)
"""Without the search for the shortest example, which takes seconds."""

Copies = list[tuple[int, int]]


class Ours:
    """`BlockManager` with the methods of `PagedAllocator`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        config = CacheConfig(num_blocks=num_blocks + 1, block_size=block_size, watermark=0.0)
        self.manager = BlockManager(config)
        self.mark_computed, self.free = self.manager.mark_computed, self.manager.free
        self.block_table, self.fork = self.manager.block_table, self.manager.fork

    @property
    def num_free_blocks(self) -> int:
        return self.manager.pool.num_free_blocks

    def allocate(self, seq_id: int, token_ids: Sequence[int]) -> int | None:
        if self.manager.can_allocate(token_ids) is not AllocStatus.OK:
            return None
        return self.manager.allocate(seq_id, token_ids)

    def append(self, seq_id: int, token_id: int) -> Copies | None:
        try:
            return [(copy.src, copy.dst) for copy in self.manager.append(seq_id, [token_id])]
        except OutOfBlocks:
            return None


class Nano:
    """A block manager with nano-vllm's methods, called as its scheduler does."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager = NanoBlockManager(num_blocks, block_size)
        self.sequences: dict[int, NanoSequence] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.manager.manager.pool.num_free_blocks

    def allocate(self, seq_id: int, token_ids: Sequence[int]) -> int | None:
        seq = NanoSequence(seq_id, list(token_ids))
        num_cached = self.manager.can_allocate(seq)
        if num_cached < 0:
            return None
        self.manager.allocate(seq, num_cached)
        self.sequences[seq_id] = seq
        return seq.num_cached_tokens

    def append(self, seq_id: int, token_id: int) -> Copies | None:
        seq = self.sequences[seq_id]
        seq.token_ids.append(token_id)
        if not self.manager.can_append(seq):
            seq.token_ids.pop()
            return None
        self.manager.may_append(seq)
        return []

    def mark_computed(self, seq_id: int, num_tokens: int) -> None:
        seq = self.sequences[seq_id]
        seq.num_scheduled_tokens = num_tokens - seq.num_cached_tokens
        self.manager.hash_blocks(seq)
        seq.num_cached_tokens = num_tokens

    def free(self, seq_id: int) -> None:
        self.manager.deallocate(self.sequences.pop(seq_id))

    def block_table(self, seq_id: int) -> list[int]:
        return self.sequences[seq_id].block_table


class Toy:
    """A small sound allocator, whose methods the faults below replace. Full blocks are shared."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.unused = list(range(num_blocks))
        self.references = [0] * num_blocks
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.known: dict[tuple[int, ...], int] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self.unused)

    def key(self, tokens: Sequence[int], end: int) -> tuple[int, ...]:
        return tuple(tokens[:end])

    def can_take(self, num_blocks: int) -> bool:
        return num_blocks <= len(self.unused)

    def take(self) -> int:
        block = self.unused.pop()
        self.references[block] = 1
        return block

    def allocate(self, seq_id: int, token_ids: Sequence[int]) -> int | None:
        ends = range(self.size, len(token_ids), self.size)
        shared = []
        for end in ends:
            if self.key(token_ids, end) not in self.known:
                break
            shared.append(self.known[self.key(token_ids, end)])
        num_new = (len(token_ids) - 1) // self.size + 1 - len(shared)
        if not self.can_take(num_new):
            return None
        for block in shared:
            self.references[block] += 1
        self.tables[seq_id] = shared + [self.take() for _ in range(num_new)]
        self.tokens[seq_id] = list(token_ids)
        return len(shared) * self.size

    def append(self, seq_id: int, token_id: int) -> Copies | None:
        table, tokens = self.tables[seq_id], self.tokens[seq_id]
        is_new = len(tokens) % self.size == 0
        last = table[-1]
        if is_new or self.must_copy(last):
            if not self.can_take(1):
                return None
            block = self.take()
        tokens.append(token_id)
        if is_new:
            table.append(block)
        elif self.must_copy(last):
            table[-1] = block
            self.references[last] -= 1
            return [(last, block)]
        return []

    def must_copy(self, block: int) -> bool:
        return self.references[block] > 1

    def mark_computed(self, seq_id: int, num_tokens: int) -> None:
        for end in range(self.size, num_tokens + 1, self.size):
            key = self.key(self.tokens[seq_id], end)
            self.known.setdefault(key, self.tables[seq_id][end // self.size - 1])

    def fork(self, seq_id: int, child_id: int) -> None:
        self.tables[child_id] = list(self.tables[seq_id])
        self.tokens[child_id] = list(self.tokens[seq_id])
        for block in self.tables[seq_id]:
            self.references[block] += 1

    def free(self, seq_id: int) -> None:
        del self.tokens[seq_id]
        for block in self.tables.pop(seq_id):
            self.release(block)

    def release(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            self.known = {key: known for key, known in self.known.items() if known != block}
            self.unused.append(block)

    def block_table(self, seq_id: int) -> list[int]:
        return self.tables[seq_id]


class ForgetsTheLastBlock(Toy):
    def free(self, seq_id: int) -> None:
        self.tables[seq_id].pop()
        super().free(seq_id)


class FreesSharedBlocks(Toy):
    def release(self, block: int) -> None:
        self.references[block] = 1
        super().release(block)


class HashesABlockAlone(Toy):
    def key(self, tokens: Sequence[int], end: int) -> tuple[int, ...]:
        return tuple(tokens[end - self.size : end])


class WritesSharedBlocks(Toy):
    def must_copy(self, block: int) -> bool:
        return False


class SharesBeforeItIsComputed(Toy):
    def allocate(self, seq_id: int, token_ids: Sequence[int]) -> int | None:
        cached = super().allocate(seq_id, token_ids)
        if cached is not None:
            self.mark_computed(seq_id, len(token_ids))
        return cached


class KeepsTheKeysOfFreeBlocks(Toy):
    def release(self, block: int) -> None:
        known = self.known
        super().release(block)
        self.known = known


class LeavesOneBlock(Toy):
    def can_take(self, num_blocks: int) -> bool:
        return num_blocks < len(self.unused)


class LosesABlockWhereItRejects(Toy):
    def can_take(self, num_blocks: int) -> bool:
        if not super().can_take(num_blocks) and self.unused:
            self.take()
            return False
        return super().can_take(num_blocks)


class AppendsNoBlock(Toy):
    def append(self, seq_id: int, token_id: int) -> Copies | None:
        self.tokens[seq_id].append(token_id)
        return []


class CachesTheWholePrompt(Toy):
    def allocate(self, seq_id: int, token_ids: Sequence[int]) -> int | None:
        cached = super().allocate(seq_id, token_ids)
        return len(token_ids) if cached else cached


@pytest.mark.parametrize("allocator", [Toy, Ours, Nano])
def test_a_sound_allocator_passes(allocator: type) -> None:
    check_allocator(allocator, settings(DEFAULT_SETTINGS, max_examples=15))


@pytest.mark.parametrize(
    ("allocator", "fault"),
    [
        (ForgetsTheLastBlock, "blocks are in tables and"),
        (FreesSharedBlocks, "blocks are in tables and|another content"),
        (HashesABlockAlone, "another content|each once"),
        (WritesSharedBlocks, "another content"),
        (SharesBeforeItIsComputed, "another content"),
        (KeepsTheKeysOfFreeBlocks, "blocks are in tables and|another content|each once"),
        (LeavesOneBlock, "is rejected though"),
        (LosesABlockWhereItRejects, "is rejected|blocks are in tables and"),
        (AppendsNoBlock, "tokens have the blocks"),
        (CachesTheWholePrompt, "one must be left"),
    ],
)
def test_a_planted_fault_is_found(allocator: type, fault: str) -> None:
    with pytest.raises(AllocatorFault, match=fault):
        check_allocator(allocator, FIRST_FAULT)
