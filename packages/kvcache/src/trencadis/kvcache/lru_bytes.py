"""Which entries a bounded memory keeps: the most recently used ones, by the bytes that they take.

Only bookkeeping: the owner stores and removes the content. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import takewhile


class LruBytes:
    """The sizes of entries, the least recently used first; at most ``limit_bytes`` together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def add(self, key: bytes, size: int) -> list[bytes] | None:
        """Enter a new entry as the most recently used; returns those that leave for it.

        None, and no change, for an entry that is here or larger than the limit.
        """
        if key in self._sizes or size > self.limit_bytes:
            return None
        dropped = []
        while self.num_bytes + size > self.limit_bytes:
            oldest, freed = self._sizes.popitem(last=False)
            self.num_bytes -= freed
            dropped.append(oldest)
        self._sizes[key] = size
        self.num_bytes += size
        return dropped

    def touch(self, key: bytes) -> bool:
        """Make an entry the most recently used; returns whether it is here."""
        if key not in self._sizes:
            return False
        self._sizes.move_to_end(key)
        return True

    def num_leading(self, keys: Iterable[bytes]) -> int:
        """How many of the first of ``keys`` are here."""
        return sum(1 for _ in takewhile(self._sizes.__contains__, keys))

    def remove(self, key: bytes) -> bool:
        """Remove an entry; returns whether it was here."""
        size = self._sizes.pop(key, None)
        if size is None:
            return False
        self.num_bytes -= size
        return True
