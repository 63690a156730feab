from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from trencadis.kvcache import (
    PLAN_SIZES,
    BlockCopy,
    BlockManager,
    BlockRemapper,
    CacheConfig,
    DefragConfig,
    Defragmenter,
    InvalidSetting,
    warm_up_defragmenter,
)
from trencadis.kvcache.tensors import KVCache, LayerShape


def fragmented(num_blocks: int, used: set[int], **settings: Any) -> BlockManager:
    """A manager whose used blocks, one computed sequence each, are exactly ``used``."""
    settings.setdefault("enable_prefix_caching", False)
    manager = BlockManager(CacheConfig(num_blocks=num_blocks, block_size=1, **settings))
    for block in range(1, num_blocks):
        manager.allocate(block, [block])
        manager.mark_computed(block, 1)
    for block in range(1, num_blocks):
        if block not in used:
            manager.free(block)
    return manager


def used_blocks(manager: BlockManager) -> set[int]:
    return set(manager.pool.iter_used_descending())


@pytest.mark.parametrize(("highest", "due"), [(32, False), (33, False), (34, True)])
def test_defragmentation_is_due_above_the_threshold(highest: int, due: bool) -> None:
    manager = fragmented(64, {highest})
    defragmenter = Defragmenter(manager)
    assert defragmenter.config.threshold == 32
    assert defragmenter.is_due() is due
    assert (defragmenter.defragment() is not None) is due


@given(st.sets(st.integers(1, 59)), st.integers(0, 40))
def test_the_used_blocks_become_contiguous_by_the_fewest_copies(
    used: set[int], threshold: int
) -> None:
    manager = fragmented(60, used)
    defragmenter = Defragmenter(manager, DefragConfig(threshold=threshold))
    plan = defragmenter.defragment()
    if max(used, default=0) - threshold <= len(used):
        assert plan is None
        assert used_blocks(manager) == used
        return
    assert plan is not None
    assert manager.pool.highest_used_block == plan.highest_after == plan.num_used == len(used)
    # Lower bound: each block above n must move to 1..n, and a copy moves a single block.
    assert len(plan.copies) == plan.num_moved == sum(block > len(used) for block in used)
    assert defragmenter.num_moved == plan.num_moved
    assert all(src > len(used) >= dst for src, dst in plan.copies)
    assert defragmenter.defragment() is None
    for seq_id in used:
        assert manager.block_table(seq_id)[0] == dict(plan.copies).get(seq_id, seq_id)


def test_a_plan_has_at_most_512_copies_and_the_next_plan_continues() -> None:
    manager = fragmented(2001, set(range(1201, 2001)))
    defragmenter = Defragmenter(manager)
    first = defragmenter.defragment()
    assert first is not None
    assert (len(first.copies), first.padded_size) == (512, 512)
    assert (first.highest_before, first.highest_after) == (2000, 1488)
    second = defragmenter.defragment()
    assert second is not None
    assert (len(second.copies), second.padded_size) == (288, 512)
    assert used_blocks(manager) == set(range(1, 801))


def test_content_that_is_kept_is_not_evicted_for_the_last_copy_of_a_plan() -> None:
    manager = fragmented(1200, set(range(600, 1200)), enable_prefix_caching=True)
    manager.allocate(5000, [5000])  # in place of the content of block 1,
    manager.free(5000)  # which is empty now and takes one copy of the 512; all others take two
    num_cached = manager.pool.num_cached_blocks
    plan = Defragmenter(manager, DefragConfig(keep_from=0.0)).defragment()
    assert plan is not None
    assert (len(plan.copies), plan.num_moved) == (511, 256)
    assert manager.pool.num_cached_blocks == num_cached


@pytest.mark.parametrize(("moves", "size"), [(1, 8), (8, 8), (9, 16), (33, 64), (129, 256)])
def test_plans_are_padded_to_a_warmed_size_without_touching_other_blocks(
    moves: int, size: int
) -> None:
    manager = fragmented(800, set(range(800 - moves, 800)))
    plan = Defragmenter(manager).defragment()
    assert plan is not None
    assert (len(plan.copies), len(plan.padded_copies), plan.padded_size) == (moves, size, size)
    assert set(plan.padded_copies) == set(plan.copies)


def test_a_block_shared_by_forks_moves_once_for_all_of_them() -> None:
    manager = fragmented(64, {63})
    for child in (100, 101, 102):
        manager.fork(63, child)
    plan = Defragmenter(manager).defragment()
    assert plan is not None
    assert plan.copies == (BlockCopy(63, 1),)
    assert [int(manager.block_table(seq_id)[0]) for seq_id in (63, 100, 101, 102)] == [1] * 4


def test_a_moved_block_moves_again_for_its_remaining_sequences() -> None:
    manager = fragmented(64, {1, 2, 3, 63})
    for child in (100, 101, 102):
        manager.fork(63, child)
    defragmenter = Defragmenter(manager, DefragConfig(threshold=0))
    assert defragmenter.defragment() is not None
    for seq_id in (1, 2, 3, 63, 101):
        manager.free(seq_id)
    plan = defragmenter.defragment()
    assert plan is not None
    assert plan.copies == (BlockCopy(4, 1),)
    assert [int(manager.block_table(seq_id)[0]) for seq_id in (100, 102)] == [1, 1]


def test_a_block_shared_by_prefix_hit_moves_once_and_stays_cached() -> None:
    manager = fragmented(64, {62, 63}, enable_prefix_caching=True)
    assert manager.allocate(100, [63, 1]) == 1
    plan = Defragmenter(manager, DefragConfig(keep_from=2.0)).defragment()
    assert plan is not None
    assert plan.num_moved == 2
    assert manager.block_table(100)[0] == manager.block_table(63)[0]
    assert manager.allocate(101, [63, 2]) == 1


def test_blocks_without_computed_slots_move_without_a_copy() -> None:
    manager = fragmented(64, {50})
    manager.free(50)
    manager.allocate(100, range(40))
    for seq_id in range(200, 220):
        manager.allocate(seq_id, [1])
    manager.free(100)
    plan = Defragmenter(manager).defragment()
    assert plan is not None
    assert (plan.num_moved, plan.copies, plan.padded_copies, plan.padded_size) == (20, (), (), 0)


@pytest.mark.parametrize(
    ("keep_from", "reused", "kept"),
    [(0.05, False, False), (0.05, True, True), (0.0, False, True), (2.0, True, False)],
)
def test_cached_content_at_a_destination_is_kept_from_the_given_reuse_probability(
    keep_from: float, reused: bool, kept: bool
) -> None:
    manager = fragmented(64, {63}, enable_prefix_caching=True)
    if reused:
        manager.allocate(100, [1, 7])
        manager.free(100)
    plan = Defragmenter(manager, DefragConfig(keep_from=keep_from)).defragment()
    assert plan is not None
    assert plan.copies == (((63, 1), (1, 63)) if kept else ((63, 1),))
    assert manager.allocate(101, [1, 8]) == kept


def test_a_miss_of_evicted_content_raises_the_reuse_rate() -> None:
    manager = fragmented(64, {63}, enable_prefix_caching=True)
    assert manager.pool.reuse.rate == 0
    Defragmenter(manager, DefragConfig(keep_from=2.0)).defragment()
    manager.allocate(100, [1, 7])
    assert manager.pool.reuse.rate > 0


@pytest.mark.parametrize("sizes", [PLAN_SIZES, PLAN_SIZES[:4], (8,)])
@pytest.mark.parametrize("num_blocks", [2, 5])
def test_the_warm_up_runs_every_size_and_leaves_the_cache_unchanged(
    sizes: tuple[int, ...], num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache = KVCache(
        layers=[LayerShape(2, 2, 2)] * 2,
        num_blocks=num_blocks,
        block_size=4,
        dtype=torch.float32,
    )
    parts = [part(layer) for part in (cache.key, cache.value) for layer in range(2)]
    for part in parts:
        part.uniform_()
    before, lengths = torch.stack(parts), []

    def copy(copies: Any) -> None:
        lengths.append(len(copies))
        cache.copy(copies)
        assert not torch.equal(torch.stack(parts), before) or len(lengths) % 2 == 0

    with caplog.at_level(logging.INFO, "trencadis.kvcache"):
        assert warm_up_defragmenter(copy, num_blocks, sizes)
    assert lengths == [*sizes, *sizes[: len(sizes) % 2]]
    assert torch.equal(torch.stack(parts), before)
    assert caplog.messages == [
        f"Warming up defragmenter with thresholds: {list(sizes)}",
        "Defragmenter warmup completed successfully",
    ]


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_the_warm_up_is_skipped_with_a_warning_for_fewer_than_two_blocks(
    num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trencadis.kvcache"):
        assert not warm_up_defragmenter(lambda copies: pytest.fail(str(copies)), num_blocks)
    assert caplog.messages[-1] == (
        f"Skipping defragmenter warmup, insufficient blocks ({num_blocks})"
    )
    assert caplog.records[-1].levelno == logging.WARNING


def test_a_plan_size_of_an_exchange_is_warmed_up_and_none_below() -> None:
    sizes: list[int] = []
    assert warm_up_defragmenter(lambda copies: sizes.append(len(copies)), 2, (2, 3))
    assert sizes == [2, 3]
    with pytest.raises(InvalidSetting, match="size must be an integer from 2 to"):
        warm_up_defragmenter(lambda copies: pytest.fail(str(copies)), 2, (1, 2))


@pytest.mark.parametrize(
    "arguments", [(None, 4), (print, "4"), (print, -1), (print, 4, 8), (print, 4, (8, "9"))]
)
def test_a_warm_up_with_wrong_arguments_copies_nothing(arguments: Any) -> None:
    with pytest.raises(InvalidSetting):
        warm_up_defragmenter(*arguments)


def test_the_sizes_are_those_of_seed_000() -> None:
    assert PLAN_SIZES == (8, 16, 32, 64, 128, 256, 512)


@pytest.mark.parametrize("debug", [True, False])
def test_plans_are_logged_with_debug(debug: bool, caplog: pytest.LogCaptureFixture) -> None:
    manager = fragmented(64, {60, 63})
    config = DefragConfig.from_env({"VLLM_DEBUG": "buckets, defrag" if debug else "buckets"})
    with caplog.at_level(logging.INFO, "trencadis.kvcache"):
        Defragmenter(manager, config).defragment()
    line = "defragmentation done max_id_used=63->2 num_used=2 moved=2/8"
    assert caplog.messages == [line] * debug


def soak(steps: int) -> int:
    """Random allocations and frees, defragmented at every step; returns the plans made.

    A move repeats the last one if it takes the same content from the same block to the same block.
    """
    rng = random.Random(5)
    manager = BlockManager(CacheConfig(num_blocks=400, block_size=4))
    defragmenter = Defragmenter(manager, DefragConfig(threshold=8))
    alive: list[int] = []
    last: set[tuple[int, int, int, int]] = set()
    plans = 0
    for seq_id in range(steps):
        if alive and (rng.random() < 0.5 or manager.pool.num_free_blocks < 10):
            manager.free(alive.pop(rng.randrange(len(alive))))
        else:
            length = rng.randint(1, 40)
            manager.allocate(seq_id, [rng.randrange(9) for _ in range(length)])
            manager.mark_computed(seq_id, length)
            alive.append(seq_id)
        before = {seq: manager.block_table(seq).tolist() for seq in alive}
        plan = defragmenter.defragment()
        if plan is None:
            continue
        plans += 1
        moves = {
            (seq, position, src, dst)
            for seq, blocks in before.items()
            for position, (src, dst) in enumerate(
                zip(blocks, manager.block_table(seq).tolist(), strict=True)
            )
            if src != dst
        }
        assert {(src, dst) for _, _, src, dst in moves} == set(plan.copies[: plan.num_moved])
        # Used content only moves down, so no later plan can move it back.
        assert all(dst < src for _, _, src, dst in moves)
        assert moves.isdisjoint(last)
        assert defragmenter.defragment() is None
        last = moves
    return plans


def test_no_move_is_repeated() -> None:
    assert soak(3_000) > 30


@pytest.mark.soak
def test_no_move_is_repeated_in_100_000_steps() -> None:
    assert soak(100_000) > 1_000


def test_shared_blocks_take_their_places_beside_moves_of_other_blocks() -> None:
    """One does not put the other off: sharing may change, and the cache scatter, in every step."""
    manager = fragmented(40, {*range(1, 9), 20})
    manager.fork(8, 100)
    defragmenter = Defragmenter(manager, DefragConfig(threshold=4), shared_within=4)
    plan = defragmenter.defragment()
    assert plan is not None
    assert (plan.highest_after, plan.num_moved, len(plan.copies)) == (9, 2, 3)
    assert manager.block_table(20).tolist() == [9]
    assert manager.block_table(8)[0] == manager.block_table(100)[0] < 4
    assert defragmenter.defragment() is None


def test_a_shared_block_that_moves_down_takes_its_place_in_the_next_plan() -> None:
    """All copies of a plan are carried out at once."""
    manager = fragmented(40, {*range(1, 9), 20})
    manager.fork(20, 100)
    defragmenter = Defragmenter(manager, DefragConfig(threshold=4), shared_within=4)
    for blocks in ([9], [1]):
        assert defragmenter.defragment() is not None
        assert manager.block_table(20).tolist() == manager.block_table(100).tolist() == blocks
    assert defragmenter.defragment() is None


def test_cached_content_at_the_place_of_a_shared_block_is_kept_where_others_is() -> None:
    for keep_from, num_copies in ((2.0, 1), (0.0, 2)):
        config = CacheConfig(num_blocks=20, block_size=1)
        manager = BlockManager(config)
        for block in range(1, 8):
            manager.allocate(block, [block])
            manager.mark_computed(block, 1)
        manager.fork(7, 100)
        manager.free(1)
        settings = DefragConfig(threshold=10, keep_from=keep_from)
        plan = Defragmenter(manager, settings, shared_within=2).defragment()
        assert plan is not None
        assert len(plan.copies) == num_copies
        assert manager.block_table(100).tolist() == [1]


def test_a_block_remapper_has_no_shared_blocks_to_rearrange() -> None:
    with pytest.raises(InvalidSetting, match="shared_within 3 needs a BlockManager"):
        Defragmenter(BlockRemapper(20), shared_within=3)
