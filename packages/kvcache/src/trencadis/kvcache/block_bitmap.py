"""A set of block ids that gives its lowest and its highest member in O(1).

Two levels of bitmaps in Python integers: a leaf holds 512 ids, the summary has one bit for each
leaf that is not empty. Every operation touches one leaf and the summary, whatever the number of
ids.
"""

from __future__ import annotations

from collections.abc import Iterator

_SHIFT = 9
_LEAF_IDS = 1 << _SHIFT
_MASK = _LEAF_IDS - 1


class BlockBitmap:
    """A set of ids from 0 to ``size - 1``. ``len`` and membership are O(1)."""

    __slots__ = ("_leaves", "_len", "_summary")

    def __init__(self, size: int) -> None:
        self._leaves = [0] * ((size + _MASK) >> _SHIFT)
        self._summary = 0
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, block: int) -> bool:
        return bool(self._leaves[block >> _SHIFT] >> (block & _MASK) & 1)

    def add(self, block: int) -> None:
        """Add an id that is not in the set."""
        leaf = block >> _SHIFT
        self._leaves[leaf] |= 1 << (block & _MASK)
        self._summary |= 1 << leaf
        self._len += 1

    def remove(self, block: int) -> None:
        """Remove an id that is in the set."""
        leaf = block >> _SHIFT
        self._leaves[leaf] ^= 1 << (block & _MASK)
        if not self._leaves[leaf]:
            self._summary ^= 1 << leaf
        self._len -= 1

    def add_range(self, start: int, stop: int) -> None:
        """Add the ids ``start`` to ``stop - 1``, none of which is in the set."""
        for leaf in range(start >> _SHIFT, (stop + _MASK) >> _SHIFT):
            low = max(start - (leaf << _SHIFT), 0)
            high = min(stop - (leaf << _SHIFT), _LEAF_IDS)
            bits = (1 << high) - (1 << low)
            self._leaves[leaf] |= bits
            self._summary |= bool(bits) << leaf
        self._len += stop - start

    def lowest(self) -> int:
        """The lowest member, or -1 for an empty set."""
        if not self._summary:
            return -1
        leaf = (self._summary & -self._summary).bit_length() - 1
        bits = self._leaves[leaf]
        return (leaf << _SHIFT) + (bits & -bits).bit_length() - 1

    def highest(self) -> int:
        """The highest member, or -1 for an empty set."""
        if not self._summary:
            return -1
        leaf = self._summary.bit_length() - 1
        return (leaf << _SHIFT) + self._leaves[leaf].bit_length() - 1

    def iter_descending(self) -> Iterator[int]:
        """The members from the highest to the lowest, computed lazily."""
        summary = self._summary
        while summary:
            leaf = summary.bit_length() - 1
            summary ^= 1 << leaf
            bits = self._leaves[leaf]
            while bits:
                top = bits.bit_length() - 1
                bits ^= 1 << top
                yield (leaf << _SHIFT) + top

    def iter_missing(self, start: int) -> Iterator[int]:
        """The ids from ``start`` that are not members, in ascending order, computed lazily.

        Ends with the last leaf, so it can yield ids of ``size`` and above.
        """
        for leaf in range(start >> _SHIFT, len(self._leaves)):
            missing = ~self._leaves[leaf] & ((1 << _LEAF_IDS) - 1)
            if leaf == start >> _SHIFT:
                missing &= -1 << (start & _MASK)
            while missing:
                yield (leaf << _SHIFT) + (missing & -missing).bit_length() - 1
                missing &= missing - 1
