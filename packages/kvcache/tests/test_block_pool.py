from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache import BlockPool, InvalidBlock, InvalidSetting, OutOfBlocks
from trencadis.kvcache.block_key import BlockKey


def key(name: str) -> BlockKey:
    return BlockKey(name.encode(), name.encode(), None, b"")


def take(pool: BlockPool, count: int) -> list[int]:
    return [pool.allocate() for _ in range(count)]


def cache(pool: BlockPool, block: int) -> None:
    """Leave a used block free, with content that the index knows."""
    pool.prefix_index.register(key(str(block)), block)
    pool.release(block)


def test_the_lowest_free_block_is_allocated_and_never_the_padding_block() -> None:
    pool = BlockPool(8)
    assert take(pool, 4) == [1, 2, 3, 4]
    pool.release(3)
    pool.release(2)
    assert take(pool, 3) == [2, 3, 5]


def test_an_exhausted_pool_raises_and_does_not_change() -> None:
    pool = BlockPool(3)
    take(pool, 2)
    with pytest.raises(OutOfBlocks, match="all 2 blocks are in use"):
        pool.allocate()
    assert (pool.num_used_blocks, pool.num_free_blocks, pool.highest_used_block) == (2, 0, 2)


def test_a_shared_block_is_free_after_its_last_reference() -> None:
    pool = BlockPool(4)
    block = pool.allocate()
    pool.share(block)
    assert pool.is_shared(block)
    pool.release(block)
    assert (pool.ref_count(block), pool.num_used_blocks) == (1, 1)
    pool.release(block)
    assert (pool.ref_count(block), pool.num_used_blocks) == (0, 0)


@pytest.mark.parametrize("block", [0, -1, 8, 99])
def test_ids_outside_the_pool_are_refused(block: int) -> None:
    pool = BlockPool(8)
    for operation in (pool.share, pool.release, pool.ref_count):
        with pytest.raises(InvalidBlock, match=f"block {block} is not one of 1 to 7"):
            operation(block)


def test_a_double_free_is_refused() -> None:
    pool = BlockPool(4)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(InvalidBlock, match="block 1 is not in use: it was released more often"):
        pool.release(block)
    assert pool.num_free_blocks == 3


def test_an_empty_block_cannot_be_shared() -> None:
    with pytest.raises(InvalidBlock, match="is empty"):
        BlockPool(4).share(2)


def test_cached_blocks_are_free_and_evicted_after_the_empty_ones_oldest_first() -> None:
    pool = BlockPool(5)
    take(pool, 4)
    for block in (3, 1, 2):
        cache(pool, block)
    assert (pool.num_free_blocks, pool.num_cached_blocks) == (3, 3)
    pool.release(4)
    assert take(pool, 4) == [4, 3, 1, 2]
    assert len(pool.prefix_index) == 0


def test_a_cached_block_that_is_shared_again_keeps_its_content() -> None:
    pool = BlockPool(3)
    take(pool, 2)
    cache(pool, 1)
    cache(pool, 2)
    pool.share(1)
    assert pool.allocate() == 2
    assert 1 in pool.prefix_index


def test_highest_used_block_follows_every_release() -> None:
    pool = BlockPool(2000)
    blocks = take(pool, 1500)
    for block in reversed(blocks[1:]):
        pool.release(block)
        assert pool.highest_used_block == block - 1
    pool.release(1)
    assert pool.highest_used_block == 0


def test_with_decode_buckets_a_cached_block_inside_is_evicted_first() -> None:
    pool = BlockPool(16, decode_buckets=(4, 8))
    take(pool, 3)
    cache(pool, 2)
    # The bucket of 4 blocks, padding included, has no empty block left.
    assert pool.allocate() == 2
    assert pool.allocate() == 4


def test_without_decode_buckets_nothing_is_evicted_while_a_block_is_empty() -> None:
    pool = BlockPool(16)
    take(pool, 3)
    cache(pool, 2)
    assert pool.allocate() == 4
    assert 2 in pool.prefix_index


def test_with_decode_buckets_the_oldest_of_all_buckets_inside_is_evicted() -> None:
    pool = BlockPool(9, decode_buckets=(4, 8))
    take(pool, 8)
    for block in (6, 2, 8, 1):
        cache(pool, block)
    # Block 8 is beyond the bucket in use, and comes when the others are gone.
    assert take(pool, 4) == [6, 2, 1, 8]


def test_relocation_moves_references_and_content() -> None:
    pool = BlockPool(8)
    take(pool, 5)
    pool.share(5)
    pool.prefix_index.register(key("content"), 5)
    pool.release(2)
    pool.relocate(5, 2, keep=False)
    assert (pool.ref_count(5), pool.ref_count(2), pool.highest_used_block) == (0, 2, 4)
    assert pool.prefix_index.lookup(key("content")) == 2
    assert pool.allocate() == 5


@pytest.mark.parametrize("keep", [True, False])
def test_relocation_onto_cached_content_exchanges_or_evicts_it(keep: bool) -> None:
    pool = BlockPool(8)
    take(pool, 5)
    cache(pool, 2)
    pool.relocate(5, 2, keep=keep)
    assert pool.prefix_index.lookup(key("2")) == (5 if keep else None)
    assert pool.num_cached_blocks == keep


def test_relocation_moves_only_a_used_block_to_a_free_block() -> None:
    pool = BlockPool(8)
    take(pool, 2)
    for src, dst in ((1, 2), (3, 4), (5, 1)):
        with pytest.raises(InvalidBlock, match=f"cannot move block {src} to {dst}"):
            pool.relocate(src, dst, keep=False)


@pytest.mark.parametrize("block", ["1", 1.0, None, [1]])
def test_an_id_that_is_no_integer_is_refused(block: Any) -> None:
    pool = BlockPool(8)
    pool.allocate()
    for operation in (pool.share, pool.release, pool.ref_count, pool.is_shared):
        with pytest.raises(InvalidBlock, match="is not one of 1 to 7"):
            operation(block)
    with pytest.raises(InvalidBlock):
        pool.relocate(1, block, keep=False)
    assert pool.ref_count(1) == 1


def test_the_integers_of_a_block_table_are_block_ids() -> None:
    pool = BlockPool(8)
    pool.allocate()
    pool.release(np.int32(1))  # type: ignore[arg-type]
    pool.prefix_index.register(key("1"), pool.allocate())
    pool.release(np.int32(1))  # type: ignore[arg-type]
    pool.share(np.int32(1))  # type: ignore[arg-type]
    pool.relocate(np.int32(1), np.int32(2), keep=False)  # type: ignore[arg-type]
    assert pool.highest_used_block == 2
    assert pool.allocate() == 1
    assert pool.ref_count(np.int32(2)) == 1  # type: ignore[arg-type]


@given(
    num_blocks=st.integers(2, 1200),
    max_cells=st.integers(1, 600),
    released=st.sets(st.integers(1, 1199)),
    cached=st.sets(st.integers(1, 1199)),
)
def test_a_map_shows_each_block_once_in_a_bounded_number_of_cells(
    num_blocks: int, max_cells: int, released: set[int], cached: set[int]
) -> None:
    pool = BlockPool(num_blocks)
    blocks = take(pool, num_blocks - 1)
    for block in blocks:
        if block in cached:
            cache(pool, block)
        elif block in released:
            pool.release(block)
    used = set(blocks) - cached - released

    shown = pool.block_map(max_cells)

    assert len(shown.used) == len(shown.cached) <= max_cells
    assert shown.blocks_per_cell == -(-(num_blocks - 1) // max_cells), "as many cells as asked"
    for i, (num_used, num_cached) in enumerate(zip(shown.used, shown.cached, strict=True)):
        start = 1 + i * shown.blocks_per_cell
        cell = set(blocks) & set(range(start, start + shown.blocks_per_cell))
        assert (num_used, num_cached) == (len(cell & used), len(cell & cached))
    assert sum(shown.used) == pool.num_used_blocks
    assert sum(shown.cached) == pool.num_cached_blocks
    assert shown.num_used_runs == sum(block - 1 not in used for block in used)
    assert (shown.num_blocks, shown.highest_used_block) == (num_blocks - 1, max(used, default=0))


@pytest.mark.parametrize("cells", [0, -1, True, "8", 1.5])
def test_a_map_without_cells_is_refused(cells: Any) -> None:
    with pytest.raises(InvalidSetting, match="max_cells must be an integer from 1"):
        BlockPool(8).block_map(cells)
