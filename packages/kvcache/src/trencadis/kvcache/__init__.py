"""Bookkeeping for a paged KV cache: blocks, prefix cache, swap and defragmentation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.block_pool import BlockMap, BlockPool
from trencadis.kvcache.cache_events import CacheEvents, CacheRecorder
from trencadis.kvcache.config import PADDING_BLOCK, CacheConfig, DefragConfig
from trencadis.kvcache.copy_plan import (
    PLAN_SIZES,
    BlockCopy,
    CopyPlan,
    Direction,
    SwapCopies,
    split_to_plan_sizes,
)
from trencadis.kvcache.defrag import Defragmenter, DefragPlan, warm_up_defragmenter
from trencadis.kvcache.errors import (
    CannotCopy,
    DuplicateSequence,
    InvalidBlock,
    InvalidSetting,
    KVCacheError,
    MissingExtra,
    NotComputed,
    NotResident,
    NotSwapped,
    OutOfBlocks,
    OutOfHostBlocks,
    OutOfMemory,
    OutOfSlots,
    UnknownSequence,
)
from trencadis.kvcache.manager import AllocStatus, BlockManager
from trencadis.kvcache.prefix_cache import PrefixKeys, RequestHasher, decode_extra_keys
from trencadis.kvcache.rounding import ceil_div, most_window_blocks, num_passed_blocks
from trencadis.kvcache.state_slots import PADDING_SLOT, StateSlots
from trencadis.kvcache.state_snapshots import StateSnapshots
from trencadis.kvcache.swapper import HostBlockPool
from trencadis.kvcache.transfers import BandwidthGovernor

__all__ = [
    "NO_OWNER",
    "PADDING_BLOCK",
    "PADDING_SLOT",
    "PLAN_SIZES",
    "AllocStatus",
    "BandwidthGovernor",
    "BlockCopy",
    "BlockKey",
    "BlockManager",
    "BlockMap",
    "BlockPool",
    "BlockRemapper",
    "BlockTier",
    "CacheConfig",
    "CacheEvents",
    "CacheRecorder",
    "CannotCopy",
    "Content",
    "CopyPlan",
    "DecodeLayout",
    "DefragConfig",
    "DefragPlan",
    "Defragmenter",
    "Direction",
    "DiskTier",
    "DuplicateSequence",
    "HostBlockPool",
    "HostTier",
    "InvalidBlock",
    "InvalidSetting",
    "KVCacheError",
    "LayerGroups",
    "MissingExtra",
    "NotComputed",
    "NotResident",
    "NotSwapped",
    "OutOfBlocks",
    "OutOfHostBlocks",
    "OutOfMemory",
    "OutOfSlots",
    "PrefixKeys",
    "RequestHasher",
    "StateSlots",
    "StateSnapshots",
    "SwapCopies",
    "TierCounters",
    "TierTransfers",
    "UnknownSequence",
    "ceil_div",
    "decode_extra_keys",
    "group_layers",
    "lay_out",
    "lay_out_pairs",
    "most_window_blocks",
    "num_passed_blocks",
    "split_to_plan_sizes",
    "warm_up_defragmenter",
]

if TYPE_CHECKING:
    from trencadis.kvcache.decode_layout import NO_OWNER, DecodeLayout, lay_out, lay_out_pairs
    from trencadis.kvcache.disk_tier import DiskTier
    from trencadis.kvcache.host_tier import HostTier
    from trencadis.kvcache.layer_groups import LayerGroups, group_layers
    from trencadis.kvcache.remapper import BlockRemapper
    from trencadis.kvcache.tier import BlockTier, Content, TierCounters
    from trencadis.kvcache.tier_transfers import TierTransfers

    __version__: str
else:
    _LOADED_ON_USE = {
        "NO_OWNER": "decode_layout",
        "BlockRemapper": "remapper",
        "BlockTier": "tier",
        "Content": "tier",
        "DecodeLayout": "decode_layout",
        "DiskTier": "disk_tier",
        "HostTier": "host_tier",
        "LayerGroups": "layer_groups",
        "TierCounters": "tier",
        "TierTransfers": "tier_transfers",
        "group_layers": "layer_groups",
        "lay_out": "decode_layout",
        "lay_out_pairs": "decode_layout",
    }

    def __getattr__(name: str) -> Any:
        """Finds what few hosts use, and the version: their imports take as long as the others."""
        if name == "__version__":
            return import_module("importlib.metadata").version("trencadis-kvcache")
        if name not in _LOADED_ON_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_LOADED_ON_USE[name]}"), name)
