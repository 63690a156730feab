"""The index of cached content: which block holds the content of which key."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.kvcache.block_keys import BlockKey


class PrefixIndex:
    """A map from block keys to blocks: at most one block per digest, and one key per block.

    The first key that was registered for a content is its canonical key. Later blocks are
    registered with canonical parents, so that comparing two chains takes one step.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def key_of(self, block: int) -> BlockKey | None:
        """The key that ``block`` is registered under, if any."""
        return self._key_of.get(block)

    def lookup(self, key: BlockKey) -> int | None:
        """The block that holds the content of ``key``, if any."""
        block = self._block_of.get(key.digest)
        return block if block is not None and self._key_of[block].same_as(key) else None

    def match(self, keys: Sequence[BlockKey]) -> list[tuple[int, BlockKey]]:
        """The blocks of the longest cached prefix of ``keys``, with their canonical keys."""
        hits: list[tuple[int, BlockKey]] = []
        parent: BlockKey | None = None
        for key in keys:
            block = self._block_of.get(key.digest)
            if block is None:
                break
            known = self._key_of[block]
            equal = known.tokens == key.tokens and known.extra == key.extra
            # Usually the parent is the key that the previous iteration verified.
            if not equal or not (known.parent is parent or known.same_as(key)):
                break
            hits.append((block, known))
            parent = known
        return hits

    def register(self, key: BlockKey, block: int) -> BlockKey:
        """Register ``block`` as the holder of ``key``; returns the canonical key of the content.

        If another block already holds the same content, or other content with the same digest,
        that block stays registered and ``block`` is not.
        """
        holder = self._block_of.get(key.digest)
        if holder is not None:
            known = self._key_of[holder]
            return known if known.same_as(key) else key
        self._block_of[key.digest] = block
        self._key_of[block] = key
        return key

    def drop(self, block: int) -> BlockKey | None:
        """Remove ``block``, whose content is about to change; returns its key, if any."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key.digest]
        return key
