from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache import (
    AllocStatus,
    BlockCopy,
    BlockManager,
    CacheConfig,
    CannotCopy,
    DefragConfig,
    Defragmenter,
    DuplicateSequence,
    InvalidBlock,
    InvalidSetting,
    KVCacheError,
    NotComputed,
    OutOfBlocks,
    RequestHasher,
    UnknownSequence,
)
from trencadis.kvcache.prefix_cache import blake2b_digest

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


def test_a_sequence_that_reads_no_cached_blocks_still_caches_its_own() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    manager.free(1)
    assert manager.can_allocate(PROMPT, reads_cache=False) is AllocStatus.OK
    assert manager.allocate(2, PROMPT, reads_cache=False) == 0
    manager.reset_prefix_cache()
    manager.free(2)
    assert manager.allocate(3, PROMPT, reads_cache=False) == 0
    manager.mark_computed(3, len(PROMPT))
    assert manager.allocate(4, [*PROMPT, 99]) == len(PROMPT) // 4 * 4


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
        (lambda m: m.allocate(9, [1 << 40]), InvalidSetting),
        (lambda m: m.append(7, [5]), UnknownSequence),
        (lambda m: m.append(1, [5] * 400), OutOfBlocks),
        (lambda m: m.append(2, [5] * 400), OutOfBlocks),
        (lambda m: m.append(1, [1 << 40]), InvalidSetting),
        (lambda m: m.append(2, [5] * 9 + [1 << 40]), InvalidSetting),
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


@pytest.mark.parametrize("seq_id", [-1, 0, -(10**30), np.int64(7)])
def test_any_integer_is_a_sequence_id(seq_id: int) -> None:
    manager = make()
    compute(manager, seq_id, PROMPT)
    manager.fork(seq_id, 50)
    plan = Defragmenter(manager, DefragConfig(threshold=0))
    compute(manager, 51, [9] * 4)
    assert plan.defragment() is None
    manager.relocate([BlockCopy(1, 9)])
    assert table(manager, seq_id) == table(manager, 50) == [9, 2, 3]
    manager.free(50)
    manager.relocate([BlockCopy(9, 1)])
    assert table(manager, seq_id) == [1, 2, 3]
    manager.free(seq_id)
    manager.free(51)
    assert manager.pool.num_used_blocks == 0


@pytest.mark.parametrize("seq_id", ["request-1", 1.0, True, None, [1], (1,)])
def test_another_sequence_id_is_refused(seq_id: Any) -> None:
    manager = make()
    compute(manager, 5, PROMPT)
    for operation in (lambda: manager.allocate(seq_id, PROMPT), lambda: manager.fork(5, seq_id)):
        with pytest.raises(InvalidSetting, match="seq_id must be an integer"):
            operation()
    for operation in (manager.free, manager.block_table, manager.num_tokens, manager.is_resident):
        with pytest.raises(UnknownSequence):
            operation(seq_id)
    assert seq_id not in manager


@pytest.mark.parametrize(
    "bad",
    [
        (1, 9),  # its source was moved already
        (9, 8),  # its source is free
        (3, 7),  # its destination was used already
        (3, 2),  # its destination is used
        (0, 8),  # the padding block
        (3, 16),  # outside the pool
        (7, 9),  # its source is the destination of another move
    ],
)
def test_a_bad_move_leaves_the_moves_before_it_undone(bad: tuple[int, int]) -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    before = state(manager)
    with pytest.raises(InvalidBlock):
        manager.relocate([BlockCopy(1, 7), BlockCopy(*bad)])
    assert state(manager) == before
    assert manager.pool.prefix_index.match(manager.hasher(PROMPT).blocks)[0][0] == 1


def test_moves_that_are_no_pairs_are_refused() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    for moves in (None, 5, [5], [(1,)], [(1, 2, 3)], [("1", 2)], [(1.5, 9)]):
        with pytest.raises(InvalidSetting, match="block copies must be"):
            manager.relocate(moves)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="keep"):
        manager.relocate([BlockCopy(1, 9)], keep=None)  # type: ignore[arg-type]


def test_an_empty_destination_is_not_copied_back() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    assert manager.relocate([BlockCopy(1, 9)], keep=[9]) == (BlockCopy(1, 9),)


@pytest.mark.parametrize("num_tokens", ["4", 4.0, None, True, -1, float("nan")])
def test_a_number_of_tokens_is_a_natural_number(num_tokens: Any) -> None:
    manager = make()
    manager.allocate(1, PROMPT)
    for operation in (manager.mark_computed, manager.blocks_to_append):
        with pytest.raises(InvalidSetting, match="num_tokens must be an integer"):
            operation(1, num_tokens)
    manager.mark_computed(1, np.int64(8))
    assert manager.allocate(2, PROMPT) == 8


@pytest.mark.parametrize(
    "token_ids",
    ["abc", [1.5], ["1"], [None], [1 << 31], [-(1 << 31) - 1], [[1]], {"a": 1}],
)
def test_tokens_that_are_no_32_bit_integers_are_refused(token_ids: Any) -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    before = state(manager)
    for operation in (
        lambda: manager.allocate(2, token_ids),
        lambda: manager.append(1, token_ids),
        lambda: manager.hasher(token_ids),
    ):
        with pytest.raises(InvalidSetting, match="token ids must be integers"):
            operation()
    assert state(manager) == before


@pytest.mark.parametrize("token_ids", [bytes(range(10)), np.arange(10), range(10)])
def test_tokens_may_be_any_sequence_of_integers(token_ids: Any) -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    assert manager.allocate(2, token_ids) == 8


@pytest.mark.parametrize("token_ids", [[], (), None, 7, iter([5]), range(10**30)])
def test_a_prompt_has_at_least_one_token(token_ids: Any) -> None:
    for operation in (make().can_allocate, lambda prompt: make().allocate(1, prompt)):
        with pytest.raises(InvalidSetting, match="a prompt must have at least one token"):
            operation(token_ids)


def test_a_prompt_longer_than_the_cache_is_refused_before_it_is_read() -> None:
    manager = make()
    assert manager.can_allocate(range(10**15)) is AllocStatus.NEVER
    with pytest.raises(OutOfBlocks, match="need more than the 15 blocks of the cache"):
        manager.allocate(1, range(10**15))


def test_a_hasher_of_another_block_size_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="blocks of 8 tokens and the cache blocks of 4"):
        BlockManager(CacheConfig(num_blocks=8, block_size=4), hasher=RequestHasher(8))


def test_a_digest_that_fails_changes_nothing_and_can_be_retried() -> None:
    calls = 0

    def fails_at_first(parent: bytes, content: bytes) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("no entropy")
        return blake2b_digest(parent, content)

    manager = BlockManager(
        CacheConfig(num_blocks=16, block_size=4), hasher=RequestHasher(4, fails_at_first)
    )
    manager.allocate(1, [1])
    manager.append(1, PROMPT)
    with pytest.raises(OSError, match="no entropy"):
        manager.mark_computed(1, 11)
    manager.mark_computed(1, 11)
    assert manager.allocate(2, [1, *PROMPT]) == 8


@pytest.mark.parametrize("digest", ["", None, 5, [1]])
def test_a_digest_that_is_no_bytes_is_refused(digest: Any) -> None:
    with pytest.raises(InvalidSetting, match="digest must return bytes"):
        RequestHasher(2, lambda parent, content: digest)([1, 2])


def test_an_argument_of_another_type_is_refused() -> None:
    config = CacheConfig(num_blocks=8, block_size=4)
    for build in (
        lambda: BlockManager({"num_blocks": 8}),  # type: ignore[arg-type]
        lambda: BlockManager(config, hasher=len),  # type: ignore[arg-type]
        lambda: BlockManager(config, governor=20e9),  # type: ignore[arg-type]
        lambda: Defragmenter(config),  # type: ignore[arg-type]
        lambda: Defragmenter(BlockManager(config), {}),  # type: ignore[arg-type]
        lambda: BlockManager(config).allocate(1, [5], prefix_keys=[]),  # type: ignore[arg-type]
        lambda: BlockManager(config).num_cached_prefix_blocks(()),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidSetting, match="must be of type"):
            build()


@pytest.mark.parametrize("num_spare", [-1, None, "2", 1.5, True])
def test_a_number_of_spare_blocks_is_a_natural_number(num_spare: Any) -> None:
    manager = make(num_host_blocks=4)
    compute(manager, 1, PROMPT)
    manager.swap_out([1])
    for ask in (partial(manager.can_allocate, PROMPT), partial(manager.can_swap_in, [1])):
        with pytest.raises(InvalidSetting, match="num_spare must be an integer of at least 0"):
            ask(num_spare=num_spare)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"]
)
def test_a_manager_is_not_copied_because_both_would_give_away_the_same_blocks(copied: Any) -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    before = state(manager)
    for owner in (manager, Defragmenter(manager)):
        if owner is manager or copied is not copy.copy:
            with pytest.raises(CannotCopy, match="a BlockManager of 16 blocks cannot be copied"):
                copied(owner)
    assert state(manager) == before


@given(
    cached=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
)
def test_as_many_prefix_blocks_are_promised_as_are_shared(
    cached: list[int], prompt: list[int]
) -> None:
    manager = make()
    compute(manager, 1, cached)
    keys = manager.hasher(prompt)
    promised = manager.num_cached_prefix_blocks(keys, num_tokens=len(prompt))
    assert manager.allocate(2, prompt, prefix_keys=keys) == promised * 4
    assert promised <= manager.num_cached_prefix_blocks(keys) <= promised + 1


def test_the_last_blocks_of_a_sequence_are_evicted_first() -> None:
    manager = make(6, watermark=0)
    compute(manager, 1, list(range(16)))
    manager.free(1)
    manager.allocate(2, [50] * 8)  # one block was empty, so one cached block is evicted
    assert manager.num_cached_prefix_blocks(manager.hasher(range(16))) == 3


def test_a_fork_has_keys_of_its_own() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    manager.fork(1, 2)
    for seq_id, token in ((1, 60), (2, 70)):
        manager.append(seq_id, [token] * 6)
        manager.mark_computed(seq_id, 16)
    for token in (60, 70):
        assert manager.num_cached_prefix_blocks(manager.hasher([*PROMPT, *[token] * 6])) == 4


def test_a_fork_made_after_a_reset_shares_nothing_either() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    manager.reset_prefix_cache()
    manager.fork(1, 2)
    manager.append(2, [7] * 6)
    manager.mark_computed(2, 16)
    assert manager.num_cached_prefix_blocks(manager.hasher([*PROMPT, *[7] * 6])) == 0
    assert manager.pool.num_cached_blocks == 0


def test_a_fork_without_prefix_caching_is_never_cached() -> None:
    manager = make(enable_prefix_caching=False)
    compute(manager, 1, PROMPT)
    manager.fork(1, 2)
    manager.append(2, [7] * 6)
    manager.mark_computed(2, 16)
    manager.free(2)
    assert manager.pool.num_cached_blocks == 0


@pytest.mark.parametrize("first_to_go", [1, 2, 3])
def test_the_remaining_owners_of_a_shared_block_are_told_of_its_moves(first_to_go: int) -> None:
    manager = make()
    compute(manager, 1, PROMPT[:4])
    manager.fork(1, 2)
    manager.fork(1, 3)
    remaining = {1, 2, 3} - {first_to_go}
    manager.free(first_to_go)
    manager.relocate([BlockCopy(1, 9)])
    assert [table(manager, seq_id) for seq_id in remaining] == [[9], [9]]
    manager.free(remaining.pop())
    manager.relocate([BlockCopy(9, 5)])
    last = remaining.pop()
    assert table(manager, last) == [5]
    manager.free(last)
    assert manager.pool.num_used_blocks == 0
    assert not manager._references._others


def test_a_prompt_waits_until_its_cached_blocks_fit_too() -> None:
    manager = make(4, watermark=0)
    compute(manager, 1, PROMPT)
    manager.free(1)
    manager.allocate(2, [50])
    assert manager.num_cached_prefix_blocks(manager.hasher(PROMPT)) == 2
    assert manager.can_allocate(PROMPT) is AllocStatus.LATER
    manager.free(2)
    assert manager.can_allocate(PROMPT) is AllocStatus.OK


def test_a_refused_allocation_takes_no_cached_block() -> None:
    manager = make(4, watermark=0)
    compute(manager, 1, PROMPT)
    manager.free(1)
    manager.allocate(2, [50])
    before = state(manager)
    with pytest.raises(OutOfBlocks):
        manager.allocate(3, PROMPT)
    assert state(manager) == before


# Slots that are given back, and tokens that come later than their slots.


def test_truncated_slots_give_their_blocks_back() -> None:
    manager = make()
    manager.allocate(1, PROMPT)
    manager.truncate(1, 4)
    assert table(manager, 1) == [1]
    assert manager.pool.num_used_blocks == 1
    manager.append(1, PROMPT[4:])
    assert table(manager, 1) == [1, 2, 3]


@pytest.mark.parametrize("num_tokens", [0, 11, 2.0, True, None])
def test_as_many_slots_stay_as_there_are_and_one_at_least(num_tokens: Any) -> None:
    manager = make()
    manager.allocate(1, PROMPT)
    before = state(manager)
    with pytest.raises(InvalidSetting, match="num_tokens"):
        manager.truncate(1, num_tokens)
    assert state(manager) == before


@pytest.mark.parametrize("has_reader", [False, True])
def test_content_that_is_written_again_after_a_truncation_has_no_prefix_hit(
    has_reader: bool,
) -> None:
    """A rejected draft filled the second block; what replaces it is another content."""
    manager = make()
    compute(manager, 1, [*PROMPT[:8], 0])
    if has_reader:
        assert manager.allocate(2, [*PROMPT[:8], 1]) == 8
    manager.truncate(1, 6)
    if has_reader:
        manager.free(2)
    manager.append(1, [70, 71, 72])
    assert manager.allocate(3, [*PROMPT[:8], 2]) == 4, "the first block is the same"
    manager.mark_computed(1, 9)
    assert manager.allocate(4, [*PROMPT[:6], 70, 71, 2]) == 8, "the new content is shared"


def test_a_truncated_sequence_writes_a_copy_of_a_block_that_another_reads() -> None:
    manager = make()
    compute(manager, 1, [*PROMPT[:8], 0])
    manager.allocate(2, [*PROMPT[:8], 1])
    manager.truncate(1, 6)
    assert manager.append(1, [70]) == (BlockCopy(2, table(manager, 1)[1]),)
    assert table(manager, 2)[:2] == [1, 2]


def test_a_slot_can_get_its_token_until_it_is_computed() -> None:
    manager = make()
    compute(manager, 1, PROMPT[:7])
    manager.append(1, [-1])
    manager.set_last_token(1, 7)
    assert manager.num_computed_tokens(1) == 7
    manager.mark_computed(1, 8)
    assert manager.num_computed_tokens(1) == 8
    assert manager.allocate(2, PROMPT[:9]) == 8
    with pytest.raises(InvalidSetting, match="set it before mark_computed"):
        manager.set_last_token(1, 9)
    with pytest.raises(InvalidSetting, match="token ids must be"):
        manager.append(1, [0])
        manager.set_last_token(1, 1 << 40)


def test_a_long_sequence_holds_the_blocks_of_its_window() -> None:
    """32,768 tokens with a window of 1,024 in blocks of 128: 8 blocks and a part, not 256."""
    manager = BlockManager(CacheConfig(num_blocks=300, block_size=128, windows=(1024,)))
    manager.allocate(1, range(32768))
    for end in range(2048, 32769, 2048):
        manager.mark_computed(1, end)
        assert manager.pool.num_used_blocks == 256 - (end - 1024) // 128
    for token in range(300):
        manager.append(1, [token])
        manager.mark_computed(1, 32769 + token)
        assert manager.pool.num_used_blocks <= 9
    assert manager.allocate(2, [*range(32768), 0]) == 32768, "what the window sees is cached"
    assert manager.pool.num_used_blocks == 9 + 8 + 1 - 6, "six of them are shared"


def test_a_prefix_hit_needs_what_the_window_sees() -> None:
    manager = make(num_blocks=6, windows=(5,))
    compute(manager, 1, PROMPT[:9])
    assert table(manager, 1) == [0, 2, 3]
    assert manager.allocate(2, PROMPT[:9]) == 8, "the first block is not needed"
    assert table(manager, 2)[:2] == [0, 2]
    with pytest.raises(InvalidSetting, match="block 0, which was given back"):
        manager.truncate(1, 4)
    assert manager.num_tokens(1) == 9
    manager.allocate(3, [50, 51, 52, 53])
    manager.allocate(4, [60])
    assert manager.num_cached_prefix_blocks(manager.hasher(PROMPT[:4])) == 0, "it was evicted"
    assert manager.num_cached_prefix_blocks(manager.hasher(PROMPT[:8])) == 2
