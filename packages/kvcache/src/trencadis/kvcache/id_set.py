"""A set of block ids that knows its lowest and its highest member at once.

Two levels of bitmaps in Python integers: a leaf holds 512 ids, the summary one bit for each leaf
that has a member. Every operation touches one leaf and the summary, however many ids there are.
"""

from __future__ import annotations

from collections.abc import Iterator

_SHIFT = 9
_LEAF_IDS = 1 << _SHIFT
_MASK = _LEAF_IDS - 1


class IdSet:
    """Ids from 0 to ``size - 1``, in order. ``len`` and membership are O(1)."""

    __slots__ = ("_leaves", "_len", "_summary")

    def __init__(self, size: int) -> None:
        self._leaves = [0] * ((size + _MASK) >> _SHIFT)
        self._summary = 0
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, member: int) -> bool:
        return bool(self._leaves[member >> _SHIFT] >> (member & _MASK) & 1)

    def add(self, member: int) -> None:
        """Add an id that is not in the set."""
        leaf = member >> _SHIFT
        self._leaves[leaf] |= 1 << (member & _MASK)
        self._summary |= 1 << leaf
        self._len += 1

    def remove(self, member: int) -> None:
        """Remove an id that is in the set."""
        leaf = member >> _SHIFT
        self._leaves[leaf] ^= 1 << (member & _MASK)
        if not self._leaves[leaf]:
            self._summary ^= 1 << leaf
        self._len -= 1

    def add_range(self, start: int, stop: int) -> None:
        """Add the ids ``start`` to ``stop - 1`` to a set that has none of them."""
        for leaf in range(start >> _SHIFT, (stop + _MASK) >> _SHIFT):
            low = max(start - (leaf << _SHIFT), 0)
            high = min(stop - (leaf << _SHIFT), _LEAF_IDS)
            bits = (1 << high) - (1 << low)
            self._leaves[leaf] |= bits
            self._summary |= bool(bits) << leaf
        self._len += stop - start

    def lowest(self) -> int:
        """The lowest member; -1 where there is none."""
        if not self._summary:
            return -1
        leaf = (self._summary & -self._summary).bit_length() - 1
        bits = self._leaves[leaf]
        return (leaf << _SHIFT) + (bits & -bits).bit_length() - 1

    def highest(self) -> int:
        """The highest member; -1 where there is none."""
        if not self._summary:
            return -1
        leaf = self._summary.bit_length() - 1
        return (leaf << _SHIFT) + self._leaves[leaf].bit_length() - 1

    def descending(self) -> Iterator[int]:
        """The members from the highest down; each is found when it is asked for."""
        summary = self._summary
        while summary:
            leaf = summary.bit_length() - 1
            summary ^= 1 << leaf
            bits = self._leaves[leaf]
            while bits:
                top = bits.bit_length() - 1
                bits ^= 1 << top
                yield (leaf << _SHIFT) + top

    def missing(self, start: int) -> Iterator[int]:
        """The ids from ``start`` up that are no members, lowest first, to the last leaf's end."""
        for leaf in range(start >> _SHIFT, len(self._leaves)):
            holes = ~self._leaves[leaf] & ((1 << _LEAF_IDS) - 1)
            if leaf == start >> _SHIFT:
                holes &= -1 << (start & _MASK)
            while holes:
                yield (leaf << _SHIFT) + (holes & -holes).bit_length() - 1
                holes &= holes - 1
