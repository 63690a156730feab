"""What enters and leaves the prefix cache, for hosts that tell others, such as a router.

Changes are told by content: a block that moves to another place is none, nor is content that came
and went between two calls. So what is kept until the next call is bounded by the cache. Of several
block groups those of the first are told, whose layers see the most tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from trencadis.kvcache.block_key import BlockKey


@attrs.frozen
class CacheEvents:
    """The changes since the last ones.

    In this order: ``cleared``, whether all content was dropped; ``removed``, the digests of content
    that is no longer cached; ``stored``, the keys of what now is, each after its parent if that is
    among them.
    """

    cleared: bool
    removed: tuple[bytes, ...]
    stored: tuple[BlockKey, ...]

    def __bool__(self) -> bool:
        return self.cleared or bool(self.removed or self.stored)


NO_EVENTS = CacheEvents(cleared=False, removed=(), stored=())


class CacheRecorder:
    """Notes changes until they are taken."""

    def __init__(self) -> None:
        self._cleared = False
        self._removed: dict[bytes, BlockKey] = {}
        self._stored: dict[bytes, BlockKey] = {}

    def store(self, key: BlockKey) -> None:
        """Content is cached from now on."""
        if key.group:
            return
        gone = self._removed.get(key.digest)
        if gone is not None and gone.same_as(key):
            del self._removed[key.digest]
        else:
            self._stored[key.digest] = key

    def drop(self, key: BlockKey) -> None:
        """Content is cached no longer."""
        if key.group:
            return
        if self._stored.pop(key.digest, None) is None:
            self._removed[key.digest] = key

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._cleared = True
        self._removed.clear()
        self._stored.clear()

    @property
    def has_stored(self) -> bool:
        """Whether `take` will tell of stored content."""
        return bool(self._stored)

    def take(self) -> CacheEvents:
        """What was noted since the last call."""
        if not (self._stored or self._removed or self._cleared):  # as after most steps
            return NO_EVENTS
        events = CacheEvents(self._cleared, tuple(self._removed), tuple(self._after_parents()))
        self._cleared = False
        self._removed.clear()
        self._stored.clear()
        return events

    def _after_parents(self) -> Iterator[BlockKey]:
        """What is stored, in the order in which it came but for parents that came later."""
        told: set[bytes] = set()
        for stored in self._stored.values():
            chain: list[BlockKey] = []
            key: BlockKey | None = stored
            while key is not None and key.digest in self._stored and key.digest not in told:
                chain.append(key)
                told.add(key.digest)
                key = key.parent
            yield from reversed(chain)
