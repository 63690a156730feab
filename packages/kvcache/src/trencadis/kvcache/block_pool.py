"""The pool of device blocks: reference counts, allocation order and eviction.

A block is *used* (reference count above 0), *cached* (free, but its content may get a prefix hit)
or *empty* (free, without known content). Cached blocks count as free blocks.

The allocation order decides the cost of every decode step, because contiguous decode attention
reads all blocks up to the highest used block, rounded up to a decode bucket. The pool allocates
the lowest empty block. Without an empty block it evicts the least recently used cached block.

With ``decode_buckets`` a pool evicts a cached block inside the bucket in use rather than allocate
an empty block beyond it. Set them only without a defragmenter: a defragmenter moves used blocks
back into the bucket and loses no content (``benchmarks/kvcache_eviction.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from operator import index

import attrs

from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.cache_events import CacheRecorder
from trencadis.kvcache.config import (
    DECODE_BUCKETS,
    MAX_NUM_BLOCKS,
    NUM_BLOCKS,
    PADDING_BLOCK,
    as_tuple,
)
from trencadis.kvcache.errors import InvalidBlock, OutOfBlocks
from trencadis.kvcache.prefix_cache import PrefixIndex, ReuseEstimator
from trencadis.kvcache.rounding import ceil_div
from trencadis.kvcache.validators import integer


@attrs.frozen
class BlockMap:
    """Which device blocks are used, cached and empty, in cells of neighbouring blocks.

    - ``num_blocks``: blocks without the padding block; their ids begin at 1.
    - ``blocks_per_cell``: blocks of a cell; the last cell has those that are left.
    - ``used``, ``cached``: how many blocks of each cell are; the others are empty.
    - ``num_used_runs``: runs of neighbouring used blocks.
    - ``highest_used_block``: highest id of a used block, 0 if none is used.
    """

    num_blocks: int
    blocks_per_cell: int
    used: tuple[int, ...]
    cached: tuple[int, ...]
    num_used_runs: int
    highest_used_block: int


_NUM_CELLS = integer(
    1, MAX_NUM_BLOCKS, remedy="a map has one cell or more, and a block is in one of them"
)


class BlockPool:
    """The device blocks 1 to ``num_blocks - 1``; block 0 is the padding block.

    ``prefix_index`` maps known content to blocks, ``reuse`` measures prefix hits. An operation
    takes O(1) per block; an eviction also looks once at each decode bucket. Raises `InvalidSetting`
    for a number of blocks or decode buckets that `CacheConfig` rejects. ``recorders`` note
    what content the index gets and loses.
    """

    def __init__(
        self,
        num_blocks: int,
        decode_buckets: Sequence[int] = (),
        recorders: Sequence[CacheRecorder] = (),
    ) -> None:
        num_blocks = NUM_BLOCKS.checked("num_blocks", num_blocks)
        decode_buckets = DECODE_BUCKETS.checked("decode_buckets", as_tuple(decode_buckets))
        self.num_blocks = num_blocks
        self.prefix_index = PrefixIndex(*recorders)
        self.reuse = ReuseEstimator(num_blocks)
        self._ref_counts = [0] * num_blocks
        self._empty = BlockBitmap(num_blocks)
        self._empty.add_range(PADDING_BLOCK + 1, num_blocks)
        self._used = BlockBitmap(num_blocks)
        # Bucket i ends before block _bounds[i]. A last bucket ends with the cache.
        self._bounds = [bound for bound in decode_buckets if bound < num_blocks]
        # The cached blocks of each bucket with the time of their release, least recent first.
        self._cached = [OrderedDict[int, int]() for _ in range(len(self._bounds) + 1)]
        self._num_releases = 0

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the padding block."""
        return self.num_blocks - 1

    @property
    def num_used_blocks(self) -> int:
        """Blocks with at least one reference, from a sequence or a pending swap."""
        return self._used.count

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: empty and cached blocks."""
        return self.num_blocks - 1 - self._used.count

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose content the prefix index knows."""
        return self.num_free_blocks - self._empty.count

    @property
    def highest_used_block(self) -> int:
        """The highest used block, or the padding block 0; decode attention reads up to it."""
        return max(self._used.highest(), PADDING_BLOCK)

    def ref_count(self, block: int) -> int:
        """The number of references to ``block``, 0 for a free block. Raises `InvalidBlock`."""
        return self._ref_counts[self.as_block(block)]

    def is_shared(self, block: int) -> bool:
        """Whether ``block`` has more than one reference, so that it must be copied on write.

        Raises `InvalidBlock`.
        """
        # Called for every appended token, so it makes no call for a valid id.
        if type(block) is not int or not PADDING_BLOCK < block < self.num_blocks:
            block = self.as_block(block)
        return self._ref_counts[block] > 1

    def allocate(self) -> int:
        """Allocate a block with one reference and no known content. Raises `OutOfBlocks`."""
        block = self._pop_free_block()
        self._ref_counts[block] = 1
        self._used.add(block)
        return block

    def share(self, block: int) -> None:
        """Add a reference to a used or cached block. Raises `InvalidBlock`."""
        block = self.as_block(block)
        if self._ref_counts[block] == 0:
            self._reuse_cached(block)
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Remove a reference; without references a block is free. Raises `InvalidBlock`."""
        block = self.as_block(block)
        if self._ref_counts[block] == 0:
            raise InvalidBlock(
                f"block {block} is not in use: it was released more often than it was shared"
            )
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._used.remove(block)
            self._add_free_block(block)

    def forget(self, block: int) -> None:
        """Take a used block out of the prefix index, because its content is about to change."""
        self.prefix_index.drop(self.as_block(block))

    def relocate(self, src: int, dst: int, *, keep: bool) -> None:
        """Move the references and the known content of the used block ``src`` to the free ``dst``.

        If ``dst`` is a cached block, ``keep`` moves its content to ``src``; otherwise it is
        evicted. Raises `InvalidBlock` if ``src`` is free or ``dst`` is used.
        """
        src, dst = self.as_block(src), self.as_block(dst)
        self.require_movable(src, dst)
        kept_key = None
        if dst not in self.prefix_index:
            self._empty.remove(dst)
        elif keep:
            kept_key = self._uncache(dst)
        else:
            self._evict(dst)
        self._ref_counts[src], self._ref_counts[dst] = 0, self._ref_counts[src]
        self._used.remove(src)
        self._used.add(dst)
        moved_key = self.prefix_index.drop(src)
        if moved_key is not None:
            self.prefix_index.register(moved_key, dst)
        if kept_key is not None:
            self.prefix_index.register(kept_key, src)
        self._add_free_block(src)

    def exchange(self, first: int, second: int) -> None:
        """Exchange the references and the known content of two used blocks.

        Raises `InvalidBlock` if one is free, or both are the same.
        """
        blocks = self.as_block(first), self.as_block(second)
        if blocks[0] == blocks[1] or not all(self._ref_counts[block] for block in blocks):
            raise InvalidBlock(
                f"cannot exchange blocks {first} and {second}: exchange two used blocks"
            )
        keys = [self.prefix_index.drop(block) for block in blocks]
        counts = [self._ref_counts[block] for block in blocks]
        for block, key, count in zip(blocks, reversed(keys), reversed(counts), strict=True):
            self._ref_counts[block] = count
            if key is not None:
                self.prefix_index.register(key, block)

    def require_movable(self, src: int, dst: int) -> None:
        """Raise `InvalidBlock` unless ``src`` is a used block and ``dst`` a free block."""
        if self.ref_count(src) == 0 or self.ref_count(dst) > 0:
            raise InvalidBlock(
                f"cannot move block {src} to {dst}: move a used block to a free block"
            )

    def iter_used_descending(self) -> Iterator[int]:
        """The used blocks, highest first."""
        return self._used.iter_descending()

    def iter_free_ascending(self) -> Iterator[int]:
        """The free blocks, lowest first."""
        free = self._used.iter_missing(PADDING_BLOCK + 1)
        return takewhile(lambda block: block < self.num_blocks, free)

    def block_map(self, max_cells: int) -> BlockMap:
        """Which blocks are used and cached, in at most ``max_cells`` cells of equal size.

        Takes O(num_blocks / 512 + max_cells). Raises `InvalidSetting` for less than one cell.
        """
        max_cells = _NUM_CELLS.checked("max_cells", max_cells)
        first, end = PADDING_BLOCK + 1, self.num_blocks
        blocks_per_cell = ceil_div(end - first, max_cells)
        used, cached = [], []
        for start in range(first, end, blocks_per_cell):
            stop = min(start + blocks_per_cell, end)
            used.append(self._used.count_between(start, stop))
            cached.append(stop - start - used[-1] - self._empty.count_between(start, stop))
        return BlockMap(
            num_blocks=self.num_usable_blocks,
            blocks_per_cell=blocks_per_cell,
            used=tuple(used),
            cached=tuple(cached),
            num_used_runs=self._used.count_runs(),
            highest_used_block=self.highest_used_block,
        )

    def reset_prefix_cache(self) -> None:
        """Clear the prefix index. Every cached block becomes empty; used blocks stay used."""
        for bucket in self._cached:
            for block in bucket:
                self._empty.add(block)
            bucket.clear()
        self.prefix_index.clear()

    def _bucket_of(self, block: int) -> int:
        return bisect_right(self._bounds, block)

    def _pop_free_block(self) -> int:
        bucket_in_use = self._bucket_of(self.highest_used_block)
        empty = self._empty.lowest()
        if empty < 0 or self._bucket_of(empty) > bucket_in_use:
            cached = self._least_recently_used(bucket_in_use)
            if cached < 0 and empty < 0:
                cached = self._least_recently_used(len(self._bounds))
            if cached > 0:
                self._evict(cached)
                return cached
        if empty < 0:
            raise OutOfBlocks(
                f"all {self.num_blocks - 1} blocks are in use: "
                "free or swap out a sequence, or raise num_blocks"
            )
        self._empty.remove(empty)
        return empty

    def _least_recently_used(self, last_bucket: int) -> int:
        """The least recently used cached block of the buckets up to ``last_bucket``, or -1."""
        oldest, block = -1, -1
        for bucket in self._cached[: last_bucket + 1]:
            if bucket:
                candidate, released = next(iter(bucket.items()))
                if oldest < 0 or released < oldest:
                    oldest, block = released, candidate
        return block

    def _evict(self, block: int) -> None:
        key = self._uncache(block)
        if key is not None:
            self.reuse.record_eviction(key)

    def _uncache(self, block: int) -> BlockKey | None:
        del self._cached[self._bucket_of(block)][block]
        return self.prefix_index.drop(block)

    def _reuse_cached(self, block: int) -> None:
        if self._cached[self._bucket_of(block)].pop(block, None) is None:
            raise InvalidBlock(
                f"block {block} is empty and has no content to share: allocate a block instead"
            )
        self._used.add(block)
        key = self.prefix_index.key_of(block)
        if key is not None:
            self.reuse.record_hit(key)

    def _add_free_block(self, block: int) -> None:
        if block in self.prefix_index:
            self._num_releases += 1
            self._cached[self._bucket_of(block)][block] = self._num_releases
        else:
            self._empty.add(block)

    def as_block(self, block: int) -> int:
        """The id as an int. Raises `InvalidBlock` for an id that is not a block of this pool."""
        try:
            number = index(block)
        except TypeError:
            number = PADDING_BLOCK
        if not PADDING_BLOCK < number < self.num_blocks:
            raise InvalidBlock(
                f"block {block} is not one of 1 to {self.num_blocks - 1}: pass a block of this "
                "pool; block 0 is the padding block"
            )
        return number


_SHIFT = 9
_LEAF_IDS = 1 << _SHIFT
_MASK = _LEAF_IDS - 1


class BlockBitmap:
    """A set of ids from 0 to ``size - 1`` that gives its lowest and its highest member in O(1).

    Two levels of bitmaps in Python integers: a leaf holds 512 ids, the summary has one bit for each
    leaf that is not empty. ``count`` is the number of members.
    """

    __slots__ = ("_leaves", "_summary", "count")

    def __init__(self, size: int) -> None:
        self._leaves = [0] * ((size + _MASK) >> _SHIFT)
        self._summary = 0
        self.count = 0

    def add(self, block: int) -> None:
        """Add an id that is not in the set."""
        leaf = block >> _SHIFT
        self._leaves[leaf] |= 1 << (block & _MASK)
        self._summary |= 1 << leaf
        self.count += 1

    def remove(self, block: int) -> None:
        """Remove an id that is in the set."""
        leaf = block >> _SHIFT
        self._leaves[leaf] ^= 1 << (block & _MASK)
        if not self._leaves[leaf]:
            self._summary ^= 1 << leaf
        self.count -= 1

    def add_range(self, start: int, stop: int) -> None:
        """Add the ids ``start`` to ``stop - 1``, none of which is in the set."""
        for leaf in range(start >> _SHIFT, (stop + _MASK) >> _SHIFT):
            low = max(start - (leaf << _SHIFT), 0)
            high = min(stop - (leaf << _SHIFT), _LEAF_IDS)
            bits = (1 << high) - (1 << low)
            self._leaves[leaf] |= bits
            self._summary |= bool(bits) << leaf
        self.count += stop - start

    def count_between(self, start: int, stop: int) -> int:
        """The number of members from ``start`` to ``stop - 1``."""
        count = 0
        for leaf in range(start >> _SHIFT, (stop + _MASK) >> _SHIFT):
            low = max(start - (leaf << _SHIFT), 0)
            high = min(stop - (leaf << _SHIFT), _LEAF_IDS)
            count += (self._leaves[leaf] >> low & (1 << (high - low)) - 1).bit_count()
        return count

    def count_runs(self) -> int:
        """The number of runs of neighbouring members."""
        runs = preceding = 0
        for bits in self._leaves:
            runs += (bits & ~(bits << 1 | preceding)).bit_count()
            preceding = bits >> _MASK
        return runs

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
