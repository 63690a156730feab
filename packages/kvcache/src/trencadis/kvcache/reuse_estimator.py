"""An estimate of how often cached content is reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from trencadis.kvcache.block_keys import BlockKey

_MAX_OUTCOMES = 1024
"""At this number of outcomes the weight of all earlier outcomes is halved."""


class ReuseEstimator:
    """Measures the share of cached blocks that get a prefix hit.

    A block that is evicted before its first hit counts as unused. Its digest is remembered, for
    the latest ``num_remembered`` such blocks. If a later prompt asks for the content, the block
    counts as reused after all. Without this correction a cache that evicts too early would
    measure that nothing is ever reused.
    """

    def __init__(self, num_remembered: int) -> None:
        self._num_remembered = num_remembered
        self._evicted_digests: OrderedDict[bytes, None] = OrderedDict()
        self._num_reused = 0
        self._num_unused = 1

    @property
    def rate(self) -> float:
        """The reused share, 0 to 1. Recent outcomes count more. It is 0 before any outcome."""
        return self._num_reused / (self._num_reused + self._num_unused)

    def record_hit(self, key: BlockKey) -> None:
        """Count a prefix hit of a cached block. Only the first hit of a content counts."""
        if not key.hits:
            self._num_reused += 1
            self._decay()

    def record_eviction(self, key: BlockKey) -> None:
        """Count the eviction of a cached block, unless it had a hit."""
        if key.hits:
            return
        self._num_unused += 1
        self._decay()
        self._evicted_digests[key.digest] = None
        if len(self._evicted_digests) > self._num_remembered:
            self._evicted_digests.popitem(last=False)

    def record_misses(self, keys: Iterable[BlockKey]) -> None:
        """Correct the count for content that a prompt asks for after it was evicted."""
        if not self._evicted_digests:
            return
        for key in keys:
            if key.digest in self._evicted_digests:
                del self._evicted_digests[key.digest]
                self._num_reused += 1
                self._num_unused = max(1, self._num_unused - 1)

    def _decay(self) -> None:
        if self._num_reused + self._num_unused >= _MAX_OUTCOMES:
            self._num_reused //= 2
            self._num_unused = max(1, self._num_unused // 2)
