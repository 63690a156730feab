"""The prefix cache: looks up the cached prefix of a prompt, and registers computed blocks."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

from trencadis.kvcache.block_keys import BlockKey, PrefixKeys, RequestHasher, encode_extra_keys
from trencadis.kvcache.block_pool import BlockPool
from trencadis.kvcache.sequences import SequenceState


class PrefixCache:
    """Combines a request hasher with the prefix index of a pool; does nothing if not enabled."""

    def __init__(self, pool: BlockPool, hasher: RequestHasher, *, enabled: bool) -> None:
        self.enabled = enabled
        self._pool = pool
        self._hasher = hasher

    def complete_keys(
        self,
        tokens: array[int],
        prefix_keys: PrefixKeys | None,
        extra_keys: Sequence[Hashable],
    ) -> PrefixKeys:
        """The keys of all full blocks of ``tokens``; computes those not in ``prefix_keys``.

        Raises `InvalidSetting` if ``prefix_keys`` belong to other tokens.
        """
        if prefix_keys is None:
            prefix_keys = PrefixKeys((), encode_extra_keys(extra_keys))
        return self._hasher.extended(prefix_keys, tokens) if self.enabled else prefix_keys

    def match(self, num_tokens: int, prefix_keys: PrefixKeys) -> list[tuple[int, BlockKey]]:
        """The blocks of the longest cached prefix that leaves one of ``num_tokens`` to compute."""
        if not self.enabled:
            return []
        num_blocks = (num_tokens - 1) // self._hasher.block_size
        return self._pool.prefix_index.match(prefix_keys.blocks[:num_blocks])

    def cache_full_blocks(self, sequence: SequenceState) -> None:
        """Register the computed full blocks of a sequence, so that prompts can share them."""
        keys = sequence.keys
        num_full = sequence.num_computed_tokens // self._hasher.block_size
        if keys is None or num_full <= len(keys):
            return
        start = len(keys)
        self._hasher.extend_chain(
            keys, sequence.token_ids, sequence.num_computed_tokens, sequence.extra
        )
        new_blocks = sequence.block_table.view[start : len(keys)].tolist()
        for position, block in enumerate(new_blocks, start):
            # The canonical key of the parent can be another object: see `PrefixIndex`.
            keys[position].parent = keys[position - 1] if position else None
            keys[position] = self._pool.prefix_index.register(keys[position], block)
