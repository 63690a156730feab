from __future__ import annotations

from typing import Any

import pytest

from trencadis.kvcache import (
    BandwidthGovernor,
    BlockCopy,
    BlockManager,
    CacheConfig,
    DefragConfig,
    Defragmenter,
    DuplicateSequence,
    InvalidBlock,
    InvalidSetting,
    NotResident,
    NotSwapped,
    OutOfBlocks,
    OutOfHostBlocks,
    UnknownSequence,
)

PROMPT = list(range(10))


def make(num_blocks: int = 16, num_host_blocks: int = 8, **settings: Any) -> BlockManager:
    """``governed`` limits swaps to one block per second with bursts of two."""
    governor = None
    if settings.pop("governed", False):
        governor = BandwidthGovernor(bytes_per_block=1, bytes_per_s=1, window_s=2)
    config = CacheConfig(
        num_blocks=num_blocks, block_size=4, num_host_blocks=num_host_blocks, **settings
    )
    return BlockManager(config, governor=governor)


def compute(manager: BlockManager, seq_id: int, tokens: list[int]) -> None:
    manager.allocate(seq_id, tokens)
    manager.mark_computed(seq_id, len(tokens))


def num_computed_tokens(manager: BlockManager, seq_id: int) -> int:
    return manager._sequences[seq_id].num_computed_tokens


def use_all_device_blocks(manager: BlockManager) -> None:
    manager.allocate(99, [77] * 4 * manager.pool.num_free_blocks)


def test_a_sequence_is_swapped_out_and_in() -> None:
    manager = make(enable_prefix_caching=False)
    compute(manager, 1, PROMPT)
    assert manager.swap_out([1], now=3.5) == ((1, 0), (2, 1), (3, 2))
    assert manager.pool.num_used_blocks == 0
    assert manager.host_pool.num_free_blocks == 5
    assert not manager.is_resident(1)
    manager.allocate(2, [9])
    assert manager.swap_in([1], now=4.0) == ((0, 2), (1, 3), (2, 4))
    assert manager.block_table(1).tolist() == [2, 3, 4]
    assert (manager.num_tokens(1), num_computed_tokens(manager, 1)) == (10, 10)
    assert manager.host_pool.num_free_blocks == 8


def test_only_computed_blocks_are_copied() -> None:
    manager = make()
    manager.allocate(1, PROMPT)
    manager.mark_computed(1, 5)
    assert len(manager.swap_out([1])) == 2
    manager.reset_prefix_cache()
    assert len(manager.swap_in([1])) == 2
    assert len(manager.block_table(1)) == 3
    assert num_computed_tokens(manager, 1) == 5


def test_blocks_shared_by_a_group_are_copied_once_and_stay_shared() -> None:
    manager = make(enable_prefix_caching=False)
    compute(manager, 1, PROMPT)
    manager.fork(1, 2)
    manager.append(2, [5])
    manager.mark_computed(2, 11)
    assert len(manager.swap_out([1, 2])) == 4
    assert len(manager.swap_in([1, 2])) == 4
    first, second = manager.block_table(1).tolist(), manager.block_table(2).tolist()
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert manager.pool.num_used_blocks == 4


def test_content_on_the_host_is_not_copied_out_again() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    compute(manager, 2, [*PROMPT, 50])
    assert len(manager.swap_out([1])) == 3
    assert manager.swap_out([2]) == ((4, 3),)
    assert manager.host_pool.num_free_blocks == 4


def test_content_cached_on_the_device_is_not_copied_in() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    manager.swap_out([1])
    # The two full blocks are cached; the partial one has no key.
    assert len(manager.swap_in([1])) == 1
    assert manager.host_pool.num_free_blocks == 8


def test_blocks_of_another_sequence_stay_on_the_device() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    compute(manager, 2, PROMPT)
    manager.swap_out([1])
    assert manager.pool.num_used_blocks == 3
    assert manager.swap_in([1]) == ((2, 3),)
    assert manager.block_table(1).tolist()[:2] == manager.block_table(2).tolist()[:2]


def test_a_swap_out_needs_free_host_blocks() -> None:
    manager = make(num_host_blocks=2)
    compute(manager, 1, PROMPT[:8])
    compute(manager, 2, [7, *PROMPT])
    use_all_device_blocks(manager)
    assert manager.can_swap_out([1])
    assert not manager.can_swap_out([2])
    with pytest.raises(OutOfHostBlocks, match="3 host blocks are needed and 2 are free"):
        manager.swap_out([2])
    assert manager.is_resident(2)
    assert manager.host_pool.num_free_blocks == 2


def test_content_that_the_host_has_already_needs_no_second_host_block() -> None:
    manager = make(num_host_blocks=4)
    compute(manager, 1, PROMPT)
    compute(manager, 2, [*PROMPT[:8], 50, 51])
    assert len(manager.swap_out([1])) == 3
    assert manager.can_swap_out([2]), "its first two blocks are on the host, and one is free"
    assert len(manager.swap_out([2])) == 1
    assert manager.host_pool.num_free_blocks == 0


def test_a_swap_in_needs_free_device_blocks_above_the_watermark() -> None:
    manager = make(num_blocks=9, watermark=0.25)
    compute(manager, 1, PROMPT)
    manager.swap_out([1])
    manager.allocate(2, [50] * 16)
    assert not manager.can_swap_in([1])
    manager.allocate(3, [60] * 8)
    with pytest.raises(OutOfBlocks):
        manager.swap_in([1])
    manager.free(2)
    assert manager.can_swap_in([1])


def test_a_swapped_sequence_cannot_run_and_a_resident_one_cannot_be_swapped_in() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    with pytest.raises(NotSwapped):
        manager.swap_in([1])
    with pytest.raises(NotSwapped):
        manager.can_swap_in([1])
    manager.swap_out([1])
    for operation in (
        lambda: manager.append(1, [5]),
        lambda: manager.fork(1, 2),
        lambda: manager.mark_computed(1, 10),
        lambda: manager.swap_out([1]),
        lambda: manager.can_swap_out([1]),
        lambda: manager.blocks_to_append(1),
    ):
        with pytest.raises(NotResident):
            operation()


def test_freeing_a_swapped_sequence_frees_its_host_blocks() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    manager.swap_out([1])
    manager.free(1)
    assert manager.host_pool.num_free_blocks == 8


def test_deferred_swap_outs_follow_in_order_and_keep_their_device_blocks_used() -> None:
    manager = make(governed=True, enable_prefix_caching=False)
    compute(manager, 1, PROMPT)
    compute(manager, 2, PROMPT[:4])
    assert manager.swap_out([1], now=0.0) == ((1, 0), (2, 1))
    assert manager.swap_out([2], now=0.0) == ()
    assert manager.pool.num_used_blocks == 2
    assert not manager.can_swap_in([1])
    with pytest.raises(NotSwapped, match="swap out of sequence 1 is not complete"):
        manager.swap_in([1], now=0.0)
    assert manager.resume_swaps(now=1.0) == (((3, 2),), ())
    assert manager.can_swap_in([1])
    assert not manager.can_swap_in([2])
    assert manager.resume_swaps(now=2.0) == (((4, 3),), ())
    assert manager.pool.num_used_blocks == 0


def test_a_sequence_is_resident_only_after_its_last_copy() -> None:
    manager = make(governed=True, enable_prefix_caching=False)
    compute(manager, 1, PROMPT)
    manager.swap_out([1], now=0.0)
    manager.resume_swaps(now=1.0)
    assert manager.swap_in([1], now=3.0) == ((0, 1), (1, 2))
    assert not manager.is_resident(1)
    assert manager.host_pool.num_free_blocks == 7
    assert manager.resume_swaps(now=4.0) == ((), ((2, 3),))
    assert manager.is_resident(1)
    assert manager.host_pool.num_free_blocks == 8


def test_content_of_a_pending_swap_in_is_not_shared() -> None:
    manager = make(governed=True)
    compute(manager, 1, PROMPT[:9])
    manager.swap_out([1], now=0.0)
    manager.resume_swaps(now=9.0)
    compute(manager, 2, [70] * 4 * 15)
    manager.free(2)
    manager.reset_prefix_cache()
    manager.swap_in([1], now=9.0)
    assert manager.allocate(3, PROMPT[:9]) == 0


def test_content_is_shared_again_after_a_swap_in() -> None:
    manager = make(num_blocks=5)
    compute(manager, 1, PROMPT)
    manager.swap_out([1])
    compute(manager, 2, [70] * 16)
    manager.free(2)
    assert len(manager.swap_in([1])) == 3
    assert manager.allocate(3, PROMPT) == 8


@pytest.mark.parametrize("where", ["host", "swapping in"])
def test_after_a_reset_swapped_content_is_not_shared(where: str) -> None:
    manager = make(num_blocks=32, num_host_blocks=16, governed=True)
    compute(manager, 1, PROMPT)
    manager.swap_out([1], now=0.0)
    manager.resume_swaps(now=9.0)
    compute(manager, 2, [70] * 4 * 31)
    manager.free(2)
    if where == "swapping in":
        manager.swap_in([1], now=9.0)
        manager.reset_prefix_cache()
        manager.resume_swaps(now=99.0)
        assert manager.is_resident(1)
        compute(manager, 3, PROMPT[:5])
        assert manager.allocate(4, PROMPT) == 4
    else:
        manager.reset_prefix_cache()
        compute(manager, 3, PROMPT)
        moves = list(manager.swap_out([3], now=99.0))
        moves += manager.resume_swaps(now=999.0).out
        assert len(moves) == 3


@pytest.mark.parametrize("direction", ["out", "in"])
def test_freeing_a_sequence_cancels_its_pending_transfers(direction: str) -> None:
    manager = make(governed=True, enable_prefix_caching=False)
    compute(manager, 1, PROMPT)
    manager.swap_out([1], now=0.0)
    if direction == "in":
        manager.resume_swaps(now=5.0)
        manager.swap_in([1], now=5.0)
    manager.free(1)
    assert manager.pool.num_free_blocks == manager.pool.num_usable_blocks
    assert manager.host_pool.num_free_blocks == 8
    assert manager.resume_swaps(now=99.0) == ((), ())


def test_pending_transfers_follow_defragmented_blocks() -> None:
    manager = make(governed=True, enable_prefix_caching=False)
    manager.allocate(1, [1] * 32)
    compute(manager, 2, PROMPT)
    manager.swap_out([2], now=0.0)
    manager.free(1)
    plan = Defragmenter(manager, DefragConfig(threshold=0)).defragment()
    assert plan is not None
    assert plan.copies == (BlockCopy(11, 1),)
    assert manager.resume_swaps(now=1.0) == (((1, 2),), ())


@pytest.mark.parametrize("governed", [True, False])
@pytest.mark.parametrize("now", [float("nan"), float("inf"), "0", None])
def test_a_swap_at_no_time_is_refused_and_changes_nothing(now: Any, governed: bool) -> None:
    manager = make(governed=governed, enable_prefix_caching=False)
    compute(manager, 1, PROMPT[:8])
    with pytest.raises(InvalidSetting, match="now must be a finite number"):
        manager.swap_out([1], now=now)
    assert manager.is_resident(1)
    assert len(manager.swap_out([1], now=0.0)) == 2
    for call in (lambda: manager.swap_in([1], now=now), lambda: manager.resume_swaps(now)):
        with pytest.raises(InvalidSetting, match="now must be a finite number"):
            call()
    assert len(manager.swap_in([1], now=9.0)) == 2


@pytest.mark.parametrize("seq_ids", [None, 5, 1.5])
def test_ids_that_are_no_list_are_refused(seq_ids: Any) -> None:
    manager = make()
    for call in (manager.swap_out, manager.swap_in, manager.can_swap_out, manager.can_swap_in):
        with pytest.raises(InvalidSetting, match="seq_ids must be sequence ids"):
            call(seq_ids)


def test_one_unknown_sequence_keeps_the_others_where_they_are() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    compute(manager, 2, [50])
    with pytest.raises(UnknownSequence):
        manager.swap_out([1, 7])
    with pytest.raises(DuplicateSequence):
        manager.swap_out([1, 2, 1])
    assert manager.is_resident(1)
    manager.swap_out([1])
    with pytest.raises(NotSwapped):
        manager.swap_in([1, 2])
    assert not manager.is_resident(1)


def test_every_sample_of_a_swapped_group_becomes_resident() -> None:
    manager = make(governed=True, enable_prefix_caching=False)
    compute(manager, 1, PROMPT)
    manager.fork(1, 2)
    manager.fork(1, 3)
    manager.swap_out([1, 2, 3], now=0.0)
    manager.resume_swaps(now=9.0)
    manager.swap_in([1, 2, 3], now=9.0)
    assert not any(manager.is_resident(seq_id) for seq_id in (1, 2, 3))
    manager.resume_swaps(now=99.0)
    assert all(manager.is_resident(seq_id) for seq_id in (1, 2, 3))
    for seq_id in (1, 2, 3):
        manager.append(seq_id, [seq_id])


@pytest.mark.parametrize("gone", [1, 2])
def test_the_other_sample_becomes_resident_when_the_first_is_freed_on_its_way(gone: int) -> None:
    manager = make(governed=True, enable_prefix_caching=False)
    compute(manager, 1, PROMPT)
    manager.fork(1, 2)
    manager.swap_out([1, 2], now=0.0)
    manager.resume_swaps(now=9.0)
    manager.swap_in([1, 2], now=9.0)
    manager.free(gone)
    assert manager.resume_swaps(now=99.0) == ((), ((1, 2), (2, 3)))
    assert manager.is_resident(3 - gone)
    manager.free(3 - gone)
    assert manager.pool.num_free_blocks == manager.pool.num_usable_blocks
    assert manager.host_pool.num_free_blocks == 8


@pytest.mark.parametrize("direction", ["out", "in"])
def test_transfers_on_their_way_follow_a_moved_block(direction: str) -> None:
    manager = make(governed=True, enable_prefix_caching=False)
    compute(manager, 1, PROMPT)
    manager.swap_out([1], now=0.0)
    if direction == "in":
        manager.resume_swaps(now=9.0)
        manager.swap_in([1], now=9.0)
    manager.relocate([BlockCopy(3, 9)])
    assert manager.resume_swaps(now=99.0) == (
        (((9, 2),), ()) if direction == "out" else ((), ((1, 2), (2, 9)))
    )
    assert manager.pool.num_used_blocks == (0 if direction == "out" else 3)


@pytest.mark.parametrize("block", [-1, 8, "1", 1.5, None])
def test_a_host_block_outside_the_pool_is_refused(block: Any) -> None:
    pool = make().host_pool
    for operation in (pool.ref_count, pool.share, pool.release):
        with pytest.raises(InvalidBlock, match="is not one of 0 to 7"):
            operation(block)


def test_a_free_host_block_is_neither_shared_nor_released() -> None:
    pool = make().host_pool
    for operation in (pool.share, pool.release):
        with pytest.raises(InvalidBlock, match="host block 0 is not in use"):
            operation(0)
    assert pool.num_free_blocks == 8


def test_a_prefix_hit_is_not_evicted_to_bring_back_another_sequence_of_the_group() -> None:
    manager = make(num_blocks=3, watermark=0)
    compute(manager, 2, [2] * 4)  # a full block, which stays in the prefix cache
    manager.swap_out([2])
    compute(manager, 1, [1] * 3)
    manager.swap_out([1])
    compute(manager, 3, [3] * 4)
    manager.free(3)  # cached after the block of sequence 2, so it is evicted later
    assert len(manager.swap_in([1, 2])) == 1
    assert all(manager.is_resident(seq_id) for seq_id in (1, 2))


def test_a_swap_in_counts_the_blocks_that_it_takes_out_of_the_prefix_cache() -> None:
    manager = make(num_blocks=4, watermark=0)
    compute(manager, 1, PROMPT)
    manager.swap_out([1])
    manager.allocate(2, [50])
    assert manager.num_cached_prefix_blocks(manager.hasher(PROMPT)) == 2
    assert not manager.can_swap_in([1])
    with pytest.raises(OutOfBlocks, match="3 blocks are needed and 2 are free"):
        manager.swap_in([1])
    assert not manager.is_resident(1)
    manager.free(2)
    assert len(manager.swap_in([1])) == 1


def test_content_that_was_freed_on_the_host_is_copied_out_again() -> None:
    manager = make()
    compute(manager, 1, PROMPT)
    manager.swap_out([1])
    manager.free(1)
    compute(manager, 2, PROMPT)
    assert len(manager.swap_out([2])) == 3
    assert manager.host_pool.num_free_blocks == 5


@pytest.mark.parametrize("where", ["on its way out", "on the host", "on its way in"])
def test_a_freed_group_gives_all_its_blocks_back(where: str) -> None:
    manager = make(governed=True, enable_prefix_caching=False)
    compute(manager, 1, PROMPT)
    manager.fork(1, 2)
    manager.append(2, [5])
    manager.mark_computed(2, 11)
    manager.swap_out([1, 2], now=0.0)
    if where != "on its way out":
        manager.resume_swaps(now=2.0)
    if where == "on its way in":
        manager.swap_in([1, 2], now=3.0)
    for seq_id in (1, 2):
        manager.free(seq_id)
    assert manager.pool.num_free_blocks == manager.pool.num_usable_blocks
    assert manager.host_pool.num_free_blocks == 8
    assert manager.resume_swaps(now=99.0) == ((), ())


def test_a_sequence_on_its_way_to_the_device_can_neither_run_nor_be_swapped() -> None:
    manager = make(governed=True, enable_prefix_caching=False)
    compute(manager, 1, PROMPT)
    manager.swap_out([1], now=0.0)
    manager.resume_swaps(now=1.0)
    manager.swap_in([1], now=1.0)
    for operation in (
        lambda: manager.append(1, [5]),
        lambda: manager.fork(1, 2),
        lambda: manager.mark_computed(1, 10),
        lambda: manager.blocks_to_append(1),
        lambda: manager.swap_out([1], now=1.0),
        lambda: manager.can_swap_out([1]),
    ):
        with pytest.raises(NotResident):
            operation()
    for now in (50.0, 99.0):
        manager.resume_swaps(now=now)
    assert manager.append(1, [5]) == ()
