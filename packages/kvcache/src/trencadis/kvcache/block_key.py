"""The identity of cached content."""

from __future__ import annotations


class BlockKey:
    """The identity of the content of one full block.

    ``digest`` is what an index looks up. ``tokens`` are the token ids as bytes. ``parent`` is the
    key of the block before, None for the first block. ``extra`` are the encoded extra keys.
    ``hits`` counts the prefix hits of this content.
    """

    __slots__ = ("digest", "extra", "hits", "parent", "tokens")

    def __init__(self, digest: bytes, tokens: bytes, parent: BlockKey | None, extra: bytes) -> None:
        self.digest = digest
        self.tokens = tokens
        self.parent = parent
        self.extra = extra
        self.hits = 0

    def same_as(self, other: BlockKey) -> bool:
        """Whether both keys stand for the same tokens after the same prefix.

        Compares the two chains up to their first common key. For canonical keys (see
        `PrefixIndex`) that is one comparison.
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
