"""Shapes and padding of decode layouts. The state machine checks the layouts of many batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trencadis.kvcache import (
    BlockManager,
    CacheConfig,
    DecodeLayout,
    InvalidSetting,
    lay_out,
    lay_out_pairs,
)

BLOCK_SIZE = 4


def lay_out_batch(
    seq_ids: list[int], num_blocks: int | None = None, num_shared: int = 0
) -> DecodeLayout:
    """Sequences 1 and 2 share two full blocks; sequence 3 has one token."""
    manager = BlockManager(CacheConfig(num_blocks=32, block_size=BLOCK_SIZE))
    for seq_id in (1, 2):
        manager.allocate(seq_id, range(10))
        manager.mark_computed(seq_id, 10)
    manager.allocate(3, [7])
    return lay_out(
        [manager.block_table(seq_id) for seq_id in seq_ids],
        [manager.num_tokens(seq_id) for seq_id in seq_ids],
        BLOCK_SIZE,
        num_blocks,
        num_shared,
    )


def test_the_first_row_owns_a_shared_block_and_other_rows_get_extra_pairs() -> None:
    layout = lay_out_batch([2, 1, 3])
    assert layout.owner.tolist() == [-1, 0, 0, 1, 0, 2]
    assert layout.used.tolist() == [0, 4, 4, 2, 2, 1]
    assert layout.extra_block.tolist() == [1, 2]
    assert layout.extra_owner.tolist() == [1, 1]
    assert layout.extra_used.tolist() == [4, 4]
    assert (layout.num_blocks, layout.num_extra) == (6, 2)


def test_blocks_of_sequences_outside_the_batch_have_no_owner() -> None:
    layout = lay_out_batch([3])
    assert layout.owner.tolist() == [-1] * 5 + [0]
    assert layout.num_extra == 0


def test_shared_blocks_have_no_owner_and_a_place_in_each_row() -> None:
    layout = lay_out_batch([2, 1, 3], num_shared=3)
    assert layout.owner.tolist() == [-1, -1, -1, 1, 0, 2]
    assert layout.used.tolist() == [0, 0, 0, 2, 2, 1]
    assert layout.shared_used.tolist() == [[0, 4, 4], [0, 4, 4], [0, 0, 0]]
    assert layout.num_extra == 0
    assert lay_out_batch([2, 1, 3], num_shared=2).extra_block.tolist() == [2]
    for number in (-1, 7, 1.0, True):
        with pytest.raises(InvalidSetting, match="num_shared"):
            lay_out_batch([2, 1, 3], num_shared=number)


@pytest.mark.parametrize("num_shared", range(7))
def test_every_row_reads_the_same_slots_however_many_blocks_are_shared(num_shared: int) -> None:
    tables = [np.array(table, np.int32) for table in ([2, 1], [1, 2, 4], [5])]
    num_tokens = [7, 12, 1]

    def slots(layout: DecodeLayout) -> set[tuple[int, int, int, int]]:
        """(row, block, slots, position of the first) of all that is read."""
        owned = zip(layout.owner, range(layout.num_blocks), layout.used, layout.start, strict=True)
        extra = (layout.extra_owner, layout.extra_block, layout.extra_used, layout.extra_start)
        rows, blocks = np.indices(layout.shared_used.shape).reshape(2, -1)
        shared = (rows, blocks, layout.shared_used.ravel(), layout.shared_start.ravel())
        pairs = [*owned, *zip(*extra, strict=True), *zip(*shared, strict=True)]
        return {tuple(map(int, pair)) for pair in pairs if pair[2]}

    layout = lay_out(tables, num_tokens, BLOCK_SIZE, num_shared=num_shared)
    assert slots(layout) == slots(lay_out_pairs(tables, num_tokens, BLOCK_SIZE))


def test_the_prefix_is_padded_to_a_bucket() -> None:
    layout = lay_out_batch([1], num_blocks=8)
    assert layout.owner.tolist() == [-1, 0, 0, 0, -1, -1, -1, -1]
    assert layout.used.tolist() == [0, 4, 4, 2, 0, 0, 0, 0]
    with pytest.raises(InvalidSetting, match="num_blocks 3 ends before block 3"):
        lay_out_batch([1], num_blocks=3)


def test_the_ends_of_the_sizes_of_a_layout_are_accepted_and_nothing_beyond() -> None:
    table = [np.array([1], np.int32)]
    assert lay_out(table, [1], 1, 2).used.tolist() == [0, 1]
    assert lay_out(table, [1 << 24], 1 << 24).used.tolist() == [0, 1 << 24]
    for block_size in (0, (1 << 24) + 1):
        with pytest.raises(InvalidSetting, match="block_size must be an integer from 1 to 16777"):
            lay_out(table, [1], block_size)
    assert lay_out(table, [1], 4, num_shared=0).num_blocks == 2
    assert lay_out(table, [1], 4, num_shared=2).shared_used.tolist() == [[0, 1]]
    for num_shared in (-1, 3):
        with pytest.raises(InvalidSetting, match="num_shared must be an integer from 0 to 2"):
            lay_out(table, [1], 4, num_shared=num_shared)
    assert lay_out([], [], 4, 1).owner.tolist() == [-1]
    with pytest.raises(InvalidSetting, match="num_blocks must be an integer of at least 1, got 0"):
        lay_out([], [], 4, 0)


def test_an_empty_batch_reads_only_the_padding_block() -> None:
    layout = lay_out_batch([])
    assert layout.owner.tolist() == [-1]
    assert layout.num_extra == 0


def test_without_a_prefix_every_block_of_every_row_is_a_pair() -> None:
    tables = [np.array(table, np.int32) for table in ([3, 1], [3, 5, 2])]
    layout = lay_out_pairs(tables, [6, 12], BLOCK_SIZE)
    assert (layout.num_blocks, layout.num_extra) == (0, 5)
    assert layout.extra_block.tolist() == [3, 1, 3, 5, 2]
    assert layout.extra_owner.tolist() == [0, 0, 1, 1, 1]
    assert layout.extra_used.tolist() == [4, 2, 4, 4, 4]
    assert lay_out_pairs([], [], BLOCK_SIZE).num_extra == 0
    with pytest.raises(InvalidSetting, match="row 1 has 3 blocks of 4 for 13 slots"):
        lay_out_pairs(tables, [6, 13], BLOCK_SIZE)


def test_every_array_is_of_32_bit_integers() -> None:
    layout = lay_out_batch([1, 2])
    for array in (layout.owner, layout.used, layout.extra_block, layout.extra_owner):
        assert array.dtype == np.int32


@pytest.mark.parametrize(
    ("tables", "num_tokens"),
    [
        ([[1, 2], []], [8, 0]),  # a swapped sequence
        ([[]], [1]),
        ([[1, 2]], [4]),
        ([[1, 2]], [9]),
        ([[1]], [0]),
        ([[1], [2, 3]], [4, -8]),
    ],
)
def test_a_row_whose_blocks_do_not_fit_its_slots_is_refused(
    tables: list[list[int]], num_tokens: list[int]
) -> None:
    arrays = [np.array(table, np.int32) for table in tables]
    with pytest.raises(InvalidSetting, match=r"row \d has \d blocks of 4 for -?\d slots"):
        lay_out(arrays, num_tokens, BLOCK_SIZE)


@pytest.mark.parametrize(
    ("tables", "num_tokens"),
    [
        (None, [1]),
        ([5], [1]),
        ([np.array([1.5])], [1]),
        ([np.array([[1]])], [1]),
        ([np.array([1])], ["1"]),
        ([np.array([1])], [1.5]),
        ([np.array([1])], [1, 2]),
        ([np.array([1])], None),
        (["12"], [5]),
    ],
)
def test_anything_but_a_table_and_a_number_for_each_row_is_refused(
    tables: Any, num_tokens: Any
) -> None:
    with pytest.raises(InvalidSetting, match="block_tables must be integer arrays"):
        lay_out(tables, num_tokens, BLOCK_SIZE)


@pytest.mark.parametrize("block", [0, -1])
def test_a_table_with_the_padding_block_is_refused(block: int) -> None:
    with pytest.raises(InvalidSetting, match=f"block {block} is in a block table"):
        lay_out([np.array([1, block])], [8], BLOCK_SIZE)
    with pytest.raises(InvalidSetting, match=f"block {block} is in a block table"):
        lay_out([np.array([2]), np.array([1, block, 3])], [1, 12], BLOCK_SIZE)


def test_blocks_that_were_given_back_are_not_read() -> None:
    tables = [np.array([0, 0, 3], np.int32), np.array([0, 1], np.int32)]
    layout = lay_out(tables, [10, 8], BLOCK_SIZE)
    assert layout.owner.tolist() == [-1, 1, -1, 0]
    assert layout.used.tolist() == [0, 4, 0, 2]
    assert layout.start.tolist() == [0, 4, 0, 8]
    assert lay_out_pairs(tables, [10, 8], BLOCK_SIZE).extra_block.tolist() == [3, 1]


@pytest.mark.parametrize("number", ["4", 4.5, None, -1, 1 << 40])
def test_a_block_size_is_a_positive_integer(number: Any) -> None:
    with pytest.raises(InvalidSetting, match="block_size"):
        lay_out([np.array([1])], [4], number)
    if number is not None and number != 1 << 40:
        with pytest.raises(InvalidSetting, match="num_blocks"):
            lay_out([np.array([1])], [4], 4, number)


def test_each_row_attends_to_its_own_slots_of_a_shared_block() -> None:
    tables = [np.array([1], np.int32), np.array([1], np.int32)]
    layout = lay_out(tables, [2, 4], BLOCK_SIZE)
    assert (layout.owner.tolist(), layout.used.tolist()) == ([-1, 0], [0, 2])
    assert (layout.extra_owner.tolist(), layout.extra_used.tolist()) == ([1], [4])
