"""Sizes the host memory and the bandwidth for swapping sequences out of device memory."""

from __future__ import annotations

import psutil

from trencadis.engine.devices import Device
from trencadis.engine.errors import ConfigError
from trencadis.engine.runner.limits import check_memory
from trencadis.engine.settings.capacity_settings import DEFAULT_SWAP_SPACE
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.kvcache import BandwidthGovernor, KVCacheError
from trencadis.warmup import format_bytes

_STAGING_BYTES = 1 << 30
_MIN_STAGING_BLOCKS = 4
_MAX_STAGING_BLOCKS = 256


def num_host_blocks(
    config: EngineConfig,
    device: Device,
    block_bytes: int,
    blocks_per_sequence: int,
    state_bytes: int = 0,
) -> int:
    """Host blocks for swapped sequences.

    As configured, but not more than ``max_num_seqs`` sequences of ``blocks_per_sequence`` blocks
    can fill. Without a setting: 4 GiB for all ranks together where the device has its own memory,
    else none. ``state_bytes``: those of a sequence's state, for which ``max_num_seqs`` sequences
    have space besides. Raises `ConfigError` where the host has less memory.
    """
    host_bytes = psutil.virtual_memory().total
    if config.num_host_blocks is not None:
        check_memory("num_host_blocks", config.num_host_blocks, block_bytes, host_bytes)
        num_bytes = config.num_host_blocks * block_bytes
        of_states = config.max_num_seqs * state_bytes if num_bytes else 0
        if num_bytes + of_states > host_bytes:
            raise ConfigError(
                f"the states of max_num_seqs {config.max_num_seqs} swapped sequences take "
                f"{format_bytes(of_states)} of host memory, num_host_blocks "
                f"{format_bytes(num_bytes)}, and the host has {format_bytes(host_bytes)}: lower "
                "max_num_seqs",
                "max_num_seqs",
            )
        return config.num_host_blocks
    gib = config.swap_space
    if gib is None:
        shares_host_memory = device.default_kv_cache_memory is not None
        gib = 0.0 if shares_host_memory else DEFAULT_SWAP_SPACE / config.tensor_parallel_size
    num_bytes = max(0, int(gib * (1 << 30)) - config.max_num_seqs * state_bytes)
    num_blocks = min(num_bytes // block_bytes, blocks_per_sequence * config.max_num_seqs)
    check_memory("swap_space", num_blocks, block_bytes, host_bytes)
    return num_blocks


def num_staging_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Host blocks beside those of swaps, through which content passes to tiers and back.

    ``block_bytes``: those of one rank.
    """
    if not config.kv_tiers:
        return 0
    most = _STAGING_BYTES // (block_bytes * config.tensor_parallel_size)
    return max(_MIN_STAGING_BLOCKS, min(_MAX_STAGING_BLOCKS, most))


def swap_governor(config: EngineConfig, block_bytes: int) -> BandwidthGovernor:
    """The bandwidth limit of swap transfers. Raises `ConfigError` where one block exceeds it."""
    try:
        return BandwidthGovernor(block_bytes, config.swap_bandwidth * 1e9)
    except KVCacheError as error:
        raise ConfigError(f"swap_bandwidth {config.swap_bandwidth} GB/s: {error}") from None
