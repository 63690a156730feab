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
    PADDING_SLOT,
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
        _copy_batch(direction, copies, states, device)
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
    if cache.states is not None:
        _warm_up_states(cache.states, device)


def _warm_up_states(states: StateCache, device: Device) -> None:
    """Copy states in each plan size that has as many copies as there are slots, or fewer."""
    all_slots = [BlockCopy(PADDING_SLOT, PADDING_SLOT)] * states.num_slots
    largest = max(len(piece) for piece in split_to_plan_sizes(all_slots))
    for direction in Direction:
        if direction is Direction.WITHIN or states.num_host_slots:
            for size in PLAN_SIZES[: PLAN_SIZES.index(largest) + 1]:
                padding = [BlockCopy(PADDING_SLOT, PADDING_SLOT)] * size
                _copy_batch(direction, padding, states, device)


def _copy_batch(
    direction: Direction, copies: Sequence[BlockCopy], cache: KVCache | StateCache, device: Device
) -> None:
    """Carry out one batch of copies; on a device that compiles shapes, in warmed-up sizes."""
    pieces = [copies] if device.dynamic_shapes else split_to_plan_sizes(copies)
    for piece in pieces:
        cache.carry_out([(direction, piece)])
        # One mark per piece, as in warm-up: a lazy device compiles what lies between two marks.
        device.mark_step()
