"""The state machine checks every layout that it comes by; here are the shapes and the padding."""

from __future__ import annotations

import numpy as np
import pytest

from trencadis.kvcache import BlockManager, CacheConfig, InvalidSetting


def make() -> BlockManager:
    manager = BlockManager(CacheConfig(num_blocks=32, block_size=4))
    for seq_id in (1, 2):
        manager.allocate(seq_id, range(10))
        manager.mark_computed(seq_id, 10)
    manager.allocate(3, [7])
    return manager


def test_a_shared_block_is_its_first_rows_and_an_extra_pair_of_the_others() -> None:
    layout = make().decode_layout([2, 1, 3])
    assert layout.owner.tolist() == [-1, 0, 0, 1, 0, 2]
    assert layout.used.tolist() == [0, 4, 4, 2, 2, 1]
    assert layout.extra_block.tolist() == [1, 2]
    assert layout.extra_owner.tolist() == [1, 1]
    assert layout.extra_used.tolist() == [4, 4]
    assert (layout.num_blocks, layout.num_extra) == (6, 2)


def test_blocks_of_sequences_outside_the_batch_have_no_owner() -> None:
    layout = make().decode_layout([3])
    assert layout.owner.tolist() == [-1] * 5 + [0]
    assert layout.num_extra == 0


def test_the_prefix_is_padded_to_a_bucket() -> None:
    layout = make().decode_layout([1], num_blocks=8)
    assert layout.owner.tolist() == [-1, 0, 0, 0, -1, -1, -1, -1]
    assert layout.used.tolist() == [0, 4, 4, 2, 0, 0, 0, 0]
    with pytest.raises(InvalidSetting, match="num_blocks 3 ends before block 3"):
        make().decode_layout([1], num_blocks=3)


def test_an_empty_batch_reads_the_padding_block_alone() -> None:
    layout = make().decode_layout([])
    assert layout.owner.tolist() == [-1]
    assert layout.num_extra == 0


def test_every_array_is_of_32_bit_integers() -> None:
    layout = make().decode_layout([1, 2])
    for array in (layout.owner, layout.used, layout.extra_block, layout.extra_owner):
        assert array.dtype == np.int32
