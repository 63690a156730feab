"""Prefix reuse: finds what of a prompt is in the cache, and makes known what has been computed."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

from trencadis.kvcache.block_pool import BlockPool
from trencadis.kvcache.prefix import BlockKey, PrefixKeys, RequestHasher, encode_extra
from trencadis.kvcache.sequence import SequenceState


class PrefixCache:
    """Joins a request hasher with the index of a pool; does nothing where it is not enabled."""

    def __init__(self, pool: BlockPool, hasher: RequestHasher, *, enabled: bool) -> None:
        self.enabled = enabled
        self._pool = pool
        self._hasher = hasher

    def keys_of(
        self, tokens: array[int], hashes: PrefixKeys | None, extra_keys: Sequence[Hashable]
    ) -> PrefixKeys:
        """The keys of all full blocks of ``tokens``: those given, and those that are missing.

        Raises `InvalidSetting` if ``hashes`` belong to other tokens.
        """
        known = PrefixKeys((), encode_extra(extra_keys)) if hashes is None else hashes
        return self._hasher.extended(known, tokens) if self.enabled else known

    def match(self, num_tokens: int, keys: PrefixKeys) -> list[tuple[int, BlockKey]]:
        """The blocks that hold the longest known prefix, short of the last of ``num_tokens``."""
        if not self.enabled:
            return []
        return self._pool.index.match(keys.blocks[: (num_tokens - 1) // self._hasher.block_size])

    def publish(self, sequence: SequenceState) -> None:
        """Let the full blocks that a sequence has computed be found by others."""
        keys = sequence.keys
        if keys is None or sequence.num_computed // self._hasher.block_size <= len(keys):
            return
        start = len(keys)
        self._hasher.chain(keys, sequence.tokens, sequence.num_computed, sequence.extra)
        for position, block in enumerate(sequence.table.view[start : len(keys)].tolist(), start):
            # The parent may have turned out to be known under another key: see `PrefixIndex`.
            keys[position].parent = keys[position - 1] if position else None
            keys[position] = self._pool.index.register(keys[position], block)
