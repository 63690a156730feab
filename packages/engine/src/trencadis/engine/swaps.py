"""The way to the host and back: its room, its limit, and what it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trencadis.engine.config import DEFAULT_SWAP_SPACE, EngineConfig
from trencadis.engine.devices import Device
from trencadis.engine.errors import ConfigError
from trencadis.kvcache import (
    PADDING_BLOCK,
    PLAN_SIZES,
    BandwidthGovernor,
    BlockCopy,
    CopyPlan,
    Direction,
    KVCacheError,
    split_to_plan_sizes,
    warm_up_defragmenter,
)
from trencadis.kvcache.tensors import KVCache


def plan_host_blocks(
    config: EngineConfig, device: Device, block_bytes: int, blocks_per_sequence: int
) -> int:
    """Host blocks for evicted sequences: as configured, and no more than could be used."""
    if config.num_host_blocks is not None:
        return config.num_host_blocks
    space = config.swap_space
    if space is None:
        shares_memory = device.default_kv_cache_memory is not None
        space = 0.0 if shares_memory else DEFAULT_SWAP_SPACE
    return min(int(space * (1 << 30)) // block_bytes, blocks_per_sequence * config.max_num_seqs)


def swap_governor(config: EngineConfig, block_bytes: int) -> BandwidthGovernor:
    """The limit on swap traffic. Raises `ConfigError` for one that no block fits."""
    try:
        return BandwidthGovernor(block_bytes, config.swap_bandwidth * 1e9)
    except KVCacheError as error:
        raise ConfigError(f"swap_bandwidth {config.swap_bandwidth} GB/s: {error}") from None


def carry_out(moves: CopyPlan, cache: KVCache, device: Device) -> dict[Direction, float]:
    """Carry out the moves of a step in their order; returns seconds by direction of swap.

    A swap is waited for, since otherwise its launch would be measured: the forward pass that
    follows has to wait for it anyway.
    """
    seconds: dict[Direction, float] = {}
    for direction, copies in moves:
        began = time.perf_counter()
        carry_out_batch(direction, copies, cache, device)
        if direction is not Direction.WITHIN:
            device.synchronize()
            taken = time.perf_counter() - began
            seconds[direction] = seconds.get(direction, 0.0) + taken
    cache.wait()
    return seconds


def carry_out_batch(
    direction: Direction, copies: Sequence[BlockCopy], cache: KVCache, device: Device
) -> None:
    """Carry out one batch of copies, in the sizes that warm-up has prepared where that counts."""
    pieces = [copies] if device.dynamic_shapes else split_to_plan_sizes(copies)
    for piece in pieces:
        cache.carry_out([(direction, piece)])
        # Each by itself, as warm-up did it: a lazy device compiles what it collects together.
        device.mark_step()


def warm_up_moves(cache: KVCache, device: Device) -> None:
    """Copy, swap out and swap in once in each plan size, as `carry_out` does."""
    warm_up_defragmenter(
        lambda copies: carry_out_batch(Direction.WITHIN, copies, cache, device), cache.num_blocks
    )
    if cache.num_host_blocks:
        padding = BlockCopy(PADDING_BLOCK, 0)
        for direction in (Direction.OUT, Direction.IN):
            for size in PLAN_SIZES:
                carry_out_batch(direction, [padding] * size, cache, device)
        cache.wait()
