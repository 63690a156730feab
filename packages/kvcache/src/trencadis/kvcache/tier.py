"""The connector protocol of tiers: memory below the device that keeps the content of full blocks.

A tier knows blocks by keys of 32 bytes and content as bytes. What a key stands for (the tokens of a
prefix, the model, the layout of a block) is decided by its caller: see `TierTransfers`. A tier of
another package implements `BlockTier`, two methods in each direction; the engine imports it by its
setting ``kv_tiers``, as ``module:Class:GIB``, and calls the class with the bytes it may keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import attrs

Content = Sequence[memoryview]
"""The bytes of a block, in one or several pieces of contiguous memory."""

KEY_BYTES = 32


@attrs.define
class TierCounters:
    """What a tier holds, and totals since it was made.

    ``num_bytes``: bytes that it holds now. ``num_errors``: blocks that could not be stored or
    loaded, and files that were rejected.
    """

    num_bytes: int = 0
    num_stored_blocks: int = 0
    num_stored_bytes: int = 0
    num_loaded_blocks: int = 0
    num_loaded_bytes: int = 0
    num_errors: int = 0


class BlockTier(Protocol):
    """Keeps the content of blocks. Every method may be called from several threads.

    No method raises for what goes wrong in the tier's memory: a block is not stored, or not loaded.
    """

    name: str
    counters: TierCounters

    def wants(self, key: bytes) -> bool:
        """Whether `store` should be called: the block is not here, and may be stored now."""

    def store(self, key: bytes, content: Content) -> None:
        """Keep a copy of a block; others may be dropped for it."""

    def num_leading(self, keys: Iterable[bytes]) -> int:
        """How many of the first of ``keys`` are here. Takes no time that a step would notice."""

    def load(self, key: bytes, content: Content) -> bool:
        """Copy a block into ``content``, of the size that was stored. False where that fails: what
        ``content`` then holds is undefined."""

    def close(self) -> None:
        """End what the tier holds open. What it stored on disk stays."""
