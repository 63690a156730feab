"""The identity of cached content."""

from __future__ import annotations


class BlockKey:
    """The identity of the content of one full block.

    ``digest`` is what an index looks up. ``tokens`` are the token ids as bytes. ``parent`` is the
    key of the block before, None for the first block. ``extra`` are the encoded extra keys.
    ``group`` is the block group whose layers the block holds (`CacheConfig.windows`). ``hits``
    counts the prefix hits of this content.
    """

    __slots__ = ("digest", "extra", "group", "hits", "parent", "tokens")

    def __init__(
        self,
        digest: bytes,
        tokens: bytes,
        parent: BlockKey | None,
        extra: bytes,
        group: int = 0,
    ) -> None:
        self.digest = digest
        self.tokens = tokens
        self.parent = parent
        self.extra = extra
        self.group = group
        self.hits = 0

    def in_group(self, group: int, parent: BlockKey | None) -> BlockKey:
        """The key, of group 0, of the same tokens in another group. ``parent`` is of that group.

        Its digest is longer: no key of the same tokens has it in another group.
        """
        digest = self.digest + group.to_bytes(2, "big")
        return BlockKey(digest, self.tokens, parent, self.extra, group)

    def same_as(self, other: BlockKey) -> bool:
        """Whether both keys of one digest stand for the same tokens after the same prefix.

        Then they are of one group, too. Compares the two chains up to their first common key. For
        canonical keys (see `PrefixIndex`) that is one comparison.
        """
        mine: BlockKey | None = self
        theirs: BlockKey | None = other
        while mine is not theirs:
            if mine is None or theirs is None:
                return False
            if mine.tokens != theirs.tokens or mine.extra != theirs.extra:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True
