"""How often cached content is asked for again: whether keeping it is worth a copy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from trencadis.kvcache.prefix import BlockKey

_OUTCOMES = 1024
"""Outcomes after which older ones count half."""


class ReuseEstimate:
    """Of the content that one prompt has computed: the share that a later prompt asks for.

    Content that is evicted before that counts as unused, but is remembered (its digest, for as
    many blocks as the cache has) and counts as reused if it is asked for after all. Otherwise a
    cache that evicts too early would find that nothing it evicts is ever reused.
    """

    def __init__(self, num_remembered: int) -> None:
        self._num_remembered = num_remembered
        self._remembered: OrderedDict[bytes, None] = OrderedDict()
        self._reused = 0
        self._unused = 1

    @property
    def rate(self) -> float:
        """The share, 0 to 1; old outcomes fade out, and it is 0 before there are any."""
        return self._reused / (self._reused + self._unused)

    def revived(self, key: BlockKey) -> None:
        """Cached content is about to be used by a prompt."""
        if not key.hits:
            self._reused += 1
            self._fade()

    def evicted(self, key: BlockKey) -> None:
        """Cached content is given up."""
        if key.hits:
            return
        self._unused += 1
        self._fade()
        self._remembered[key.digest] = None
        if len(self._remembered) > self._num_remembered:
            self._remembered.popitem(last=False)

    def missed(self, keys: Iterable[BlockKey]) -> None:
        """A prompt asked for content that is not in the cache."""
        if not self._remembered:
            return
        for key in keys:
            if key.digest in self._remembered:
                del self._remembered[key.digest]
                self._reused += 1
                self._unused = max(1, self._unused - 1)

    def _fade(self) -> None:
        if self._reused + self._unused >= _OUTCOMES:
            self._reused //= 2
            self._unused = max(1, self._unused // 2)
