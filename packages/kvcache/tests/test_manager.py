from __future__ import annotations

from typing import Any

import pytest

from trencadis.kvcache import (
    AllocStatus,
    BlockCopy,
    BlockManager,
    CacheConfig,
    DuplicateSequence,
    InvalidBlock,
    InvalidSetting,
    KVCacheError,
    NotComputed,
    OutOfBlocks,
    UnknownSequence,
)

PROMPT = list(range(10))


def make(num_blocks: int = 16, **settings: Any) -> BlockManager:
    return BlockManager(CacheConfig(num_blocks=num_blocks, block_size=4, **settings))


def compute(manager: BlockManager, seq_id: int, tokens: list[int], **keys: Any) -> int:
    cached = manager.allocate(seq_id, tokens, **keys)
    manager.mark_computed(seq_id, len(tokens))
    return cached


def table(manager: BlockManager, seq_id: int) -> list[int]:
    blocks: list[int] = manager.block_table(seq_id).tolist()
    return blocks


def state(manager: BlockManager) -> object:
    return (
        manager.pool.num_free_blocks,
        manager.pool.highest_used_block,
        [manager.pool.ref_count(block) for block in range(1, manager.config.num_blocks)],
        [
            (s.seq_id, list(s.token_ids), s.block_table.view.tolist())
            for s in manager._sequences.values()
        ],
    )


def test_allocate_reserves_slots_for_all_tokens_of_a_prompt() -> None:
    manager = make()
    assert manager.allocate(1, PROMPT) == 0
    assert table(manager, 1) == [1, 2, 3]
    assert manager.num_tokens(1) == 10
    pool = manager.pool
    assert (pool.num_used_blocks, pool.num_free_blocks, pool.highest_used_block) == (3, 12, 3)


def test_the_block_table_cannot_be_written() -> None:
    manager = make()
    manager.allocate(1, PROMPT)
    with pytest.raises(ValueError, match="read-only"):
        manager.block_table(1)[0] = 5


def test_full_blocks_of_a_computed_prompt_are_shared() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    assert manager.allocate(2, PROMPT) == 8
    assert table(manager, 2) == [1, 2, 4]


def test_nothing_is_shared_before_it_is_computed() -> None:
    manager = make()
    manager.allocate(1, PROMPT)
    manager.mark_computed(1, 7)
    assert manager.allocate(2, PROMPT) == 4


def test_a_fully_cached_prompt_recomputes_its_last_block() -> None:
    manager = make()
    compute(manager, 1, PROMPT[:8])
    assert manager.allocate(2, PROMPT[:8]) == 4
    assert table(manager, 2) == [1, 3]


def test_content_stays_cached_after_its_sequence_is_freed() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    manager.free(1)
    assert manager.pool.num_free_blocks == manager.pool.num_usable_blocks
    assert manager.allocate(2, PROMPT) == 8


def test_generated_tokens_are_cached() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    for token in range(20, 26):
        manager.append(1, [token])
        manager.mark_computed(1, manager.num_tokens(1))
    manager.free(1)
    assert manager.allocate(2, [*PROMPT, *range(20, 26), 99]) == 16


@pytest.mark.parametrize("length", [10, 3])
def test_different_extra_keys_share_nothing(length: int) -> None:
    manager = make()
    manager.allocate(1, PROMPT[:length], prefix_keys=manager.hasher(PROMPT[:length], ("tenant",)))
    manager.mark_computed(1, length)
    manager.append(1, [7] * 9)
    manager.mark_computed(1, length + 9)
    tokens = PROMPT[:length] + [7] * 9
    manager.free(1)
    assert manager.can_allocate(tokens, extra_keys=("other",)) is AllocStatus.OK
    assert manager.allocate(2, tokens) == 0
    assert manager.allocate(3, tokens, extra_keys=("other",)) == 0
    assert manager.allocate(4, [*tokens, 99], extra_keys=("tenant",)) == (length + 9) // 4 * 4


def test_without_prefix_caching_nothing_is_shared() -> None:
    manager = make(enable_prefix_caching=False)
    compute(manager, 1, PROMPT)
    assert manager.allocate(2, PROMPT) == 0
    manager.free(1)
    assert manager.pool.num_cached_blocks == 0


def test_after_a_reset_nothing_computed_before_is_shared() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    compute(manager, 2, [50, *PROMPT])
    manager.free(2)
    manager.reset_prefix_cache()
    manager.append(1, [7] * 4)
    manager.mark_computed(1, 14)
    assert manager.allocate(3, [*PROMPT, *[7] * 4]) == 0
    assert manager.allocate(4, [50, *PROMPT]) == 0


def test_alloc_status_is_ok_later_or_never() -> None:
    manager = make(9, watermark=0.25)
    assert manager.can_allocate(range(32)) is AllocStatus.OK
    assert manager.can_allocate(range(33)) is AllocStatus.NEVER
    manager.allocate(1, PROMPT)
    assert manager.can_allocate(range(12)) is AllocStatus.OK
    assert manager.can_allocate(range(13)) is AllocStatus.LATER


def test_spare_blocks_are_left_besides_the_watermark() -> None:
    manager = make(9, watermark=0.25, num_host_blocks=8)
    manager.allocate(1, PROMPT)
    manager.allocate(2, [50] * 4)
    manager.mark_computed(2, 4)
    assert manager.can_allocate(range(4), num_spare=1) is AllocStatus.OK
    assert manager.can_allocate(range(4), num_spare=2) is AllocStatus.LATER
    manager.swap_out([2])
    assert manager.can_swap_in([2], num_spare=2)
    assert not manager.can_swap_in([2], num_spare=3)


def test_prefix_hits_on_used_blocks_need_no_free_blocks() -> None:
    manager = make(5, watermark=0)
    compute(manager, 1, PROMPT)
    assert manager.can_allocate(range(50, 60)) is AllocStatus.LATER
    assert manager.can_allocate(PROMPT) is AllocStatus.OK
    assert manager.allocate(2, PROMPT) == 8
    assert manager.pool.num_free_blocks == 0


def test_prefix_hits_on_cached_blocks_need_free_blocks() -> None:
    manager = make(4, watermark=0)
    compute(manager, 1, PROMPT)
    manager.free(1)
    assert manager.allocate(2, [50]) == 0
    with pytest.raises(OutOfBlocks, match="3 blocks are needed and 2 are free"):
        manager.allocate(3, PROMPT)


def test_append_allocates_a_block_only_when_the_last_block_is_full() -> None:
    manager = make()
    manager.allocate(1, PROMPT)
    assert [manager.blocks_to_append(1, n) for n in (0, 1, 2, 3, 6, 7)] == [0, 0, 0, 1, 1, 2]
    assert manager.append(1, [1, 2]) == ()
    assert len(table(manager, 1)) == 3
    assert manager.append(1, [3]) == ()
    assert table(manager, 1) == [1, 2, 3, 4]


def test_a_long_sequence_keeps_its_first_blocks() -> None:
    manager = make(64, enable_prefix_caching=False)
    manager.allocate(1, [7])
    for _ in range(40):
        manager.append(1, [7] * 4)
    assert table(manager, 1) == list(range(1, 42))


def test_a_fork_shares_until_one_of_the_two_is_appended() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    manager.fork(1, 2)
    assert table(manager, 2) == table(manager, 1) == [1, 2, 3]
    assert manager.blocks_to_append(2) == 1
    assert manager.append(2, [5]) == (BlockCopy(3, 4),)
    assert manager.append(1, [6]) == ()
    assert (table(manager, 1), table(manager, 2)) == ([1, 2, 3], [1, 2, 4])


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    manager = make()
    compute(manager, 1, PROMPT[:8])
    manager.fork(1, 2)
    assert manager.append(2, [5]) == ()
    assert manager.append(1, [6]) == ()
    assert (table(manager, 1), table(manager, 2)) == ([1, 2, 4], [1, 2, 3])


def test_many_samples_share_the_prompt_and_are_freed_separately() -> None:
    manager = make()
    compute(manager, 0, PROMPT)
    for child in range(1, 6):
        manager.fork(0, child)
    assert manager.pool.num_used_blocks == 3
    for child in range(6):
        manager.append(child, [child])
    assert manager.pool.num_used_blocks == 2 + 6
    for child in range(6):
        manager.free(child)
    assert manager.pool.num_used_blocks == 0


def test_a_sequence_with_uncomputed_slots_cannot_be_forked() -> None:
    manager = make()
    manager.allocate(1, PROMPT)
    manager.mark_computed(1, 9)
    with pytest.raises(NotComputed, match="10 slots and 9 of them"):
        manager.fork(1, 2)


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        (lambda m: m.allocate(1, [5]), DuplicateSequence),
        (lambda m: m.allocate(9, []), InvalidSetting),
        (lambda m: m.allocate(9, range(400)), OutOfBlocks),
        (lambda m: m.allocate(9, [5], prefix_keys=m.hasher(PROMPT)), InvalidSetting),
        (lambda m: m.allocate(9, [1 << 40]), OverflowError),
        (lambda m: m.append(7, [5]), UnknownSequence),
        (lambda m: m.append(1, [5] * 400), OutOfBlocks),
        (lambda m: m.append(2, [5] * 400), OutOfBlocks),
        (lambda m: m.append(1, [1 << 40]), OverflowError),
        (lambda m: m.append(2, [5] * 9 + [1 << 40]), OverflowError),
        (lambda m: m.fork(7, 8), UnknownSequence),
        (lambda m: m.fork(1, 2), DuplicateSequence),
        (lambda m: m.fork(1, 1), DuplicateSequence),
        (lambda m: m.free(7), UnknownSequence),
        (lambda m: m.block_table(7), UnknownSequence),
        (lambda m: m.num_tokens(7), UnknownSequence),
        (lambda m: m.mark_computed(1, 11), InvalidSetting),
        (lambda m: m.mark_computed(7, 1), UnknownSequence),
        (lambda m: m.swap_out([1]), KVCacheError),
        (lambda m: m.swap_out([1, 1]), DuplicateSequence),
        (lambda m: m.swap_out([1, 7]), UnknownSequence),
        (lambda m: m.swap_in([1]), KVCacheError),
        (lambda m: m.swap_in([7]), UnknownSequence),
    ],
)
def test_an_impossible_operation_raises_a_typed_error_and_changes_nothing(
    operation: Any, error: type[Exception]
) -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    manager.fork(1, 2)
    before = state(manager)
    with pytest.raises(error):
        operation(manager)
    assert state(manager) == before


def test_a_second_free_is_refused() -> None:
    manager = make()
    manager.allocate(1, PROMPT)
    manager.free(1)
    with pytest.raises(UnknownSequence, match="sequence 1 has no blocks"):
        manager.free(1)
    assert manager.pool.num_free_blocks == manager.pool.num_usable_blocks


@pytest.mark.parametrize("src", [-1, 0, 8, 10**9])
def test_a_block_outside_the_pool_is_not_relocated(src: int) -> None:
    manager = BlockManager(CacheConfig(num_blocks=8, block_size=2))
    manager.allocate(1, [1, 2, 3])
    with pytest.raises(InvalidBlock, match=f"block {src} is not one of 1 to 7"):
        manager.relocate([BlockCopy(src, 3)])
