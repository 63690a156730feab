"""Paged KV-cache bookkeeping: blocks, prefix sharing, swap and defragmentation."""

from typing import TYPE_CHECKING

from trencadis.kvcache.bandwidth import BandwidthGovernor
from trencadis.kvcache.block_pool import BlockPool
from trencadis.kvcache.config import PADDING_BLOCK, CacheConfig
from trencadis.kvcache.decode_layout import NO_OWNER, DecodeLayout, lay_out
from trencadis.kvcache.defrag import (
    DefragConfig,
    Defragmenter,
    DefragPlan,
    warm_up_defragmenter,
)
from trencadis.kvcache.errors import (
    DuplicateSequence,
    InvalidBlock,
    InvalidSetting,
    KVCacheError,
    NotComputed,
    NotResident,
    NotSwapped,
    OutOfBlocks,
    OutOfHostBlocks,
    UnknownSequence,
    UnsupportedLayer,
)
from trencadis.kvcache.layers import require_paged_attention
from trencadis.kvcache.manager import Allocation, BlockManager
from trencadis.kvcache.moves import (
    PLAN_SIZES,
    BlockCopy,
    Direction,
    MovePlan,
    SwapCopies,
    in_plan_sizes,
)
from trencadis.kvcache.prefix import PrefixKeys, RequestHasher

__all__ = [
    "NO_OWNER",
    "PADDING_BLOCK",
    "PLAN_SIZES",
    "Allocation",
    "BandwidthGovernor",
    "BlockCopy",
    "BlockManager",
    "BlockPool",
    "CacheConfig",
    "DecodeLayout",
    "DefragConfig",
    "DefragPlan",
    "Defragmenter",
    "Direction",
    "DuplicateSequence",
    "InvalidBlock",
    "InvalidSetting",
    "KVCacheError",
    "MovePlan",
    "NotComputed",
    "NotResident",
    "NotSwapped",
    "OutOfBlocks",
    "OutOfHostBlocks",
    "PrefixKeys",
    "RequestHasher",
    "SwapCopies",
    "UnknownSequence",
    "UnsupportedLayer",
    "in_plan_sizes",
    "lay_out",
    "require_paged_attention",
    "warm_up_defragmenter",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Looks the version up on first use: ``importlib.metadata`` takes 30 ms to import."""
        if name == "__version__":
            from importlib.metadata import version  # noqa: PLC0415

            return version("trencadis-kvcache")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
