"""Device blocks: which are used, which are free, and which free one is handed out next.

A block is *used* (reference count above 0), *cached* (free, but its content may still be wanted by
a later prompt) or *empty*. Cached blocks count as free: they are evicted when they are needed.

Which free block is next decides the cost of every decode step: contiguous decode attention reads
all blocks up to the highest one in use, rounded up to a decode bucket. The lowest empty block is
next; where none is empty, the block that was cached longest ago.

With ``decode_buckets`` a pool stays inside the bucket that is in use: a block cached there goes
before an empty one beyond it, though a prefill may be lost. That pays only without a defragmenter,
which does better: it lets used blocks spill and then brings them down in exchange for what is
cached, so that nothing is lost (``benchmarks/kvcache_eviction.py``, the figures are in the README).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile

from trencadis.kvcache.config import PADDING_BLOCK
from trencadis.kvcache.errors import InvalidBlock, OutOfBlocks
from trencadis.kvcache.id_set import IdSet
from trencadis.kvcache.prefix import BlockKey, PrefixIndex
from trencadis.kvcache.reuse import ReuseEstimate


class BlockPool:
    """Blocks 1 to ``num_blocks - 1``, with reference counts and the prefix index of their content.

    An operation touches a constant number of bitmap words per block, and looks once at each
    decode bucket when it evicts a cached block.
    """

    def __init__(self, num_blocks: int, decode_buckets: Sequence[int] = ()) -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self.reuse = ReuseEstimate(num_blocks)
        self._refs = [0] * num_blocks
        self._empty = IdSet(num_blocks)
        self._empty.add_range(PADDING_BLOCK + 1, num_blocks)
        self._used = IdSet(num_blocks)
        # Bucket i ends before block _bounds[i]; one more bucket reaches to the end of the cache.
        self._bounds = [bound for bound in decode_buckets if bound < num_blocks]
        # Cached blocks per bucket, least recently used first; their stamps order them across.
        self._cached: list[OrderedDict[int, int]] = [
            OrderedDict() for _ in range(len(self._bounds) + 1)
        ]
        self._clock = 0

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return len(self._used)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: empty and cached ones."""
        return self.num_blocks - 1 - len(self._used)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content is still known to the prefix index."""
        return self.num_free - len(self._empty)

    @property
    def highest_in_use(self) -> int:
        """The highest used block; 0 where none is used, as the padding block always is read."""
        return max(self._used.highest(), PADDING_BLOCK)

    def ref_count(self, block: int) -> int:
        """How many references ``block`` has; 0 for a free block. Raises `InvalidBlock`."""
        self._check(block)
        return self._refs[block]

    def is_shared(self, block: int) -> bool:
        """Whether a write to ``block`` would be seen by another owner."""
        return self._refs[block] > 1

    def take(self) -> int:
        """A block with one reference and no known content. Raises `OutOfBlocks`."""
        block = self._next_free()
        self._refs[block] = 1
        self._used.add(block)
        return block

    def share(self, block: int) -> None:
        """One more reference to ``block``, which is used or cached. Raises `InvalidBlock`."""
        self._check(block)
        if self._refs[block] == 0:
            self._revive(block)
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One reference less; the last leaves the block cached or empty. Raises `InvalidBlock`."""
        self._check(block)
        if self._refs[block] == 0:
            raise InvalidBlock(f"block {block} is not in use: it was released more than once")
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._used.remove(block)
            self._put_back(block)

    def relocate(self, src: int, dst: int, *, keep: bool) -> None:
        """Give the references and the known content of used block ``src`` to free block ``dst``.

        The content that ``dst`` was cached for moves to ``src`` if ``keep``, else it is evicted.
        Raises `InvalidBlock` if ``src`` is free or ``dst`` in use.
        """
        if self.ref_count(src) == 0 or self.ref_count(dst) > 0:
            raise InvalidBlock(f"cannot move block {src} to {dst}: only a used one to a free one")
        evicted = None
        if dst not in self.index:
            self._empty.remove(dst)
        elif keep:
            evicted = self._uncache(dst)
        else:
            self._evict(dst)
        self._refs[src], self._refs[dst] = 0, self._refs[src]
        self._used.remove(src)
        self._used.add(dst)
        content = self.index.drop(src)
        if content is not None:
            self.index.register(content, dst)
        if evicted is not None:
            self.index.register(evicted, src)
        self._put_back(src)

    def used_from_top(self) -> Iterator[int]:
        """The used blocks, highest first."""
        return self._used.descending()

    def free_from_bottom(self) -> Iterator[int]:
        """The free blocks, lowest first."""
        return takewhile(
            lambda block: block < self.num_blocks, self._used.missing(PADDING_BLOCK + 1)
        )

    def forget_cached(self) -> None:
        """Empty the prefix index: every cached block becomes empty, no used one is found again."""
        for bucket in self._cached:
            for block in bucket:
                self._empty.add(block)
            bucket.clear()
        self.index = PrefixIndex()

    def _bucket_of(self, block: int) -> int:
        return bisect_right(self._bounds, block)

    def _next_free(self) -> int:
        reach = self._bucket_of(self.highest_in_use)
        empty = self._empty.lowest()
        if empty > 0 and self._bucket_of(empty) <= reach:
            return self._withdraw_empty(empty)
        cached = self._least_recent(reach)
        if cached < 0 and empty < 0:
            cached = self._least_recent(len(self._bounds))
        if cached > 0:
            self._evict(cached)
            return cached
        if empty < 0:
            raise OutOfBlocks(
                f"all {self.num_blocks - 1} blocks are in use: "
                "free or swap out a sequence, or raise num_blocks"
            )
        return self._withdraw_empty(empty)

    def _least_recent(self, reach: int) -> int:
        """The cached block that was used longest ago in the decode buckets up to ``reach``."""
        oldest, block = -1, -1
        for bucket in self._cached[: reach + 1]:
            if bucket:
                candidate, stamp = next(iter(bucket.items()))
                if oldest < 0 or stamp < oldest:
                    oldest, block = stamp, candidate
        return block

    def _withdraw_empty(self, block: int) -> int:
        self._empty.remove(block)
        return block

    def _evict(self, block: int) -> None:
        key = self._uncache(block)
        if key is not None:
            self.reuse.evicted(key)

    def _uncache(self, block: int) -> BlockKey | None:
        del self._cached[self._bucket_of(block)][block]
        return self.index.drop(block)

    def _revive(self, block: int) -> None:
        bucket = self._cached[self._bucket_of(block)]
        if block not in bucket:
            raise InvalidBlock(f"block {block} is empty, so there is no content to share")
        del bucket[block]
        self._used.add(block)
        key = self.index.key_of(block)
        if key is not None:
            self.reuse.revived(key)

    def _put_back(self, block: int) -> None:
        if block in self.index:
            self._clock += 1
            self._cached[self._bucket_of(block)][block] = self._clock
        else:
            self._empty.add(block)

    def _check(self, block: int) -> None:
        if not PADDING_BLOCK < block < self.num_blocks:
            raise InvalidBlock(
                f"block {block} is not one of 1 to {self.num_blocks - 1}: block 0 is padding, "
                "and the ids of other pools mean nothing here"
            )
