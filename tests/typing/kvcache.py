"""A runtime keeps its KV cache with a block manager and carries the plans out with torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import assert_type

from trencadis.kvcache import (
    AllocStatus,
    BandwidthGovernor,
    BlockCopy,
    BlockManager,
    CacheConfig,
    CopyPlan,
    Defragmenter,
    DefragPlan,
    Direction,
    OutOfBlocks,
    PrefixKeys,
    lay_out,
)
from trencadis.kvcache.tensors import KVCache, LayerShape


def new_manager() -> BlockManager:
    config = CacheConfig(
        num_blocks=64, block_size=16, num_host_blocks=32, decode_buckets=[16, 32, 64]
    )
    assert_type(config.decode_buckets, tuple[int, ...])
    return BlockManager(config, governor=BandwidthGovernor(bytes_per_block=1 << 20))


def share_a_prefix(manager: BlockManager) -> None:
    prompt = range(40)
    keys = manager.hasher(prompt, ("adapter", 7))
    assert_type(keys, PrefixKeys)
    if manager.can_allocate(prompt, prefix_keys=keys) is AllocStatus.OK:
        assert_type(manager.allocate(1, prompt, prefix_keys=keys), int)
    manager.mark_computed(1, 40)
    manager.fork(1, 2)
    copies = manager.append(2, [41])
    assert_type(copies, tuple[BlockCopy, ...])
    assert_type(manager.block_table(2), npt.NDArray[np.int32])
    layout = lay_out([manager.block_table(1), manager.block_table(2)], [40, 41], 16)
    assert_type(layout.owner, npt.NDArray[np.int32])
    assert_type(manager.pool.num_free_blocks, int)


def plan_of_a_step(manager: BlockManager) -> CopyPlan:
    plan = CopyPlan()
    plan.add(Direction.OUT, manager.swap_out([1, 2], now=0.0))
    plan.add(Direction.IN, manager.swap_in([1, 2], now=0.1))
    due = manager.resume_swaps(now=0.2)
    plan.add(Direction.OUT, due.out)
    defragmented = Defragmenter(manager).defragment()
    assert_type(defragmented, DefragPlan | None)
    if defragmented is not None:
        plan.add(Direction.WITHIN, defragmented.copies)
    for direction, copies in plan:
        assert_type(direction, Direction)
        assert_type([copy.src for copy in copies], list[int])
    return plan


def main() -> None:
    manager = new_manager()
    share_a_prefix(manager)
    cache = KVCache(
        layers=[LayerShape(kv_heads=4, key_width=32, value_width=32)] * 2,
        num_blocks=64,
        block_size=16,
        dtype=torch.bfloat16,
        num_host_blocks=32,
    )
    cache.carry_out(plan_of_a_step(manager))
    cache.wait()
    assert_type(cache.key(0), torch.Tensor)
    try:
        manager.allocate(3, list(range(10_000)))
    except OutOfBlocks as error:
        assert_type(error, OutOfBlocks)
