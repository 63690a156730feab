"""Copies KV blocks: swap out, swap in, copy-on-write and defragmentation.

The scheduler decides which blocks are copied (`CopyPlan`); this module copies them, in sizes that
were warmed up where the device compiles each size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from trencadis.engine.devices import Device
from trencadis.kvcache import (
    PADDING_BLOCK,
    PLAN_SIZES,
    BlockCopy,
    CopyPlan,
    DefragConfig,
    Direction,
    split_to_plan_sizes,
    warm_up_defragmenter,
)
from trencadis.kvcache.state_cache import StateCache
from trencadis.kvcache.tensors import KVCache


def copy_blocks(moves: CopyPlan, cache: KVCache, device: Device) -> dict[Direction, float]:
    """Carry out the moves of a step in order; returns the seconds spent on each swap direction.

    Waits for a swap to end, because launching it takes no time that could be measured. The forward
    pass that follows has to wait for it in any case.
    """
    seconds: dict[Direction, float] = {}
    for direction, copies in moves:
        began = time.perf_counter()
        _copy_batch(direction, copies, cache, device)
        if direction is not Direction.WITHIN:
            device.synchronize()
            elapsed = time.perf_counter() - began
            seconds[direction] = seconds.get(direction, 0.0) + elapsed
    cache.wait()
    return seconds


def copy_states(
    moves: CopyPlan, states: StateCache, device: Device, swap_s: Mapping[Direction, float]
) -> dict[Direction, float]:
    """Carry out the copies of states; returns ``swap_s`` with their seconds added."""
    seconds = dict(swap_s)
    for direction, copies in moves:
        began = time.perf_counter()
        states.carry_out([(direction, copies)])
        if direction is not Direction.WITHIN:
            device.synchronize()
            elapsed = time.perf_counter() - began
            seconds[direction] = seconds.get(direction, 0.0) + elapsed
    return seconds


def warm_up_copies(cache: KVCache, device: Device, defrag: DefragConfig) -> None:
    """Copy, swap out and swap in once in each plan size, exactly as `copy_blocks` does.

    ``defrag`` says whether the defragmenter is warmed up. Where it is off, copies on write still
    use the plan sizes.
    """
    directions = [Direction.OUT, Direction.IN] if cache.num_host_blocks else []
    if defrag.enabled and defrag.warm_up:
        warm_up_defragmenter(
            lambda copies: _copy_batch(Direction.WITHIN, copies, cache, device), cache.num_blocks
        )
    elif defrag.warm_up:
        directions.append(Direction.WITHIN)
    padding = BlockCopy(PADDING_BLOCK, 0)
    for direction in directions:
        for size in PLAN_SIZES:
            _copy_batch(direction, [padding] * size, cache, device)
    cache.wait()


def _copy_batch(
    direction: Direction, copies: Sequence[BlockCopy], cache: KVCache, device: Device
) -> None:
    """Carry out one batch of copies; on a device that compiles shapes, in warmed-up sizes."""
    pieces = [copies] if device.dynamic_shapes else split_to_plan_sizes(copies)
    for piece in pieces:
        cache.carry_out([(direction, piece)])
        # One mark per piece, as in warm-up: a lazy device compiles what lies between two marks.
        device.mark_step()
