"""The defragmenter: moves the highest used blocks to the lowest free blocks, shared ones first.

Contiguous decode attention reads every block up to the highest used block, including the free
blocks below it. The trigger, the threshold and the plan sizes are those of seed 000. The
defragmenter of the vLLM plugin keeps a second mapping from block to block; this one updates the
block tables. So a move to an empty block costs one copy instead of an exchange, and the next
allocation uses the low blocks that are left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, cast

import attrs

from trencadis.kvcache.block_pool import BlockPool
from trencadis.kvcache.config import MAX_NUM_BLOCKS, PADDING_BLOCK, DefragConfig
from trencadis.kvcache.copy_plan import PLAN_SIZES, BlockCopy, Copies, pad_copies, plan_size
from trencadis.kvcache.errors import InvalidSetting, shown
from trencadis.kvcache.validators import instance_of, integer

logger = logging.getLogger(__name__)

_SHARED_WITHIN = integer(0, MAX_NUM_BLOCKS, remedy="pass the number of blocks that are shared")


@attrs.frozen
class DefragPlan:
    """The block copies of one defragmentation, to be carried out at once, and their effect.

    ``num_moved`` counts the used blocks that moved to a lower block; the block tables are updated
    already. The number of ``copies`` can be smaller, because blocks without computed slots move
    without a copy, or larger, because cached content that is kept needs a second copy.
    """

    copies: Copies
    num_moved: int
    highest_before: int
    highest_after: int
    num_used: int

    @property
    def padded_size(self) -> int:
        """The smallest of `PLAN_SIZES` that holds the copies; 0 without copies."""
        return plan_size(len(self.copies)) if self.copies else 0

    @property
    def padded_copies(self) -> Copies:
        """The copies padded to ``padded_size``, for a graph of that size."""
        return pad_copies(self.copies, self.padded_size)


class BlockOwner(Protocol):
    """Who knows which blocks are used, and by whom: a `BlockManager` or a `BlockRemapper`."""

    @property
    def pool(self) -> BlockPool:
        """The blocks."""

    def relocate(self, moves: Sequence[BlockCopy], *, keep: Collection[int] = ()) -> Copies:
        """Move used blocks to free blocks, all at once; returns the copies to carry out."""


class SharingOwner(BlockOwner, Protocol):
    """A `BlockOwner` whose blocks may have several sequences: a `BlockManager`."""

    @property
    def num_sharing_changes(self) -> int:
        """Rises with each change of what `num_sequences_of_shared` returns."""

    def num_sequences_of_shared(self) -> Mapping[int, int]:
        """Of each block that several sequences have, how many."""

    def rearrange(self, pairs: Sequence[BlockCopy], *, keep: Collection[int] = ()) -> Copies:
        """As `relocate`; used destinations are exchanged for their sources."""


class Defragmenter:
    """Defragments the blocks of one manager when the trigger fires.

    Call `defragment` once per step, after the scheduler's allocations and before the batch is
    built. Add its copies to the step's `CopyPlan` at that point. Mark the slots of earlier steps
    as computed before, because blocks without computed slots move without a copy. ``num_moved``
    counts the blocks of all plans. ``manager`` is for reading: a host compares it with its own.
    ``shared_within``: blocks that several sequences have are brought among the first so many,
    where attention scores a block once for all of them; 0: they may be anywhere.
    Raises `InvalidSetting` for arguments of other types.
    """

    def __init__(
        self,
        manager: BlockOwner,
        config: DefragConfig | None = None,
        *,
        shared_within: int = 0,
    ) -> None:
        if not isinstance(getattr(manager, "pool", None), BlockPool):
            raise InvalidSetting(
                f"manager must be of type BlockManager, got {shown(manager)}", "manager"
            )
        self.config = DefragConfig() if config is None else config
        instance_of(DefragConfig).checked("config", self.config)
        self.num_moved = 0
        self.manager = manager
        self._shared_within = _SHARED_WITHIN.checked("shared_within", shared_within)
        self._sharing: SharingOwner | None = None
        if self._shared_within:
            if not hasattr(manager, "rearrange"):
                raise InvalidSetting(
                    f"shared_within {shared_within} needs a BlockManager, got {shown(manager)}: "
                    "leave it out",
                    "shared_within",
                )
            self._sharing = cast("SharingOwner", manager)
        self._exchanges: tuple[int, list[BlockCopy]] = -1, []
        """Those that were chosen last, and after how many changes in sharing."""

    def is_due(self) -> bool:
        """Whether `defragment` would move blocks: shared ones have places to go to, or the highest
        used block exceeds the number of used blocks by the threshold.

        Never where the settings turn defragmentation off.
        """
        if not self.config.enabled:
            return False
        if self._is_scattered():
            return True
        return self._sharing is not None and bool(self._choose_exchanges())

    def _is_scattered(self) -> bool:
        pool = self.manager.pool
        return pool.highest_used_block - self.config.threshold > pool.num_used_blocks

    def defragment(self) -> DefragPlan | None:
        """Move blocks if that is due; returns the plan, of at most 512 copies, or None.

        Used blocks move from the highest block down to free blocks from the lowest block up, until
        the used blocks are contiguous. The number of moves is minimal: each used block above the
        number of used blocks has to move, and no other block moves. Shared blocks that do not move
        so take their places, those with the most sequences before others.
        """
        if not self.is_due():
            return None
        pool = self.manager.pool
        highest_before = pool.highest_used_block
        moves: list[BlockCopy] = []
        copies: Copies = ()
        if self._is_scattered():
            moves, kept = self._choose_moves()
            copies = self.manager.relocate(moves, keep=kept)
        if self._sharing is not None:
            # All copies of a plan are carried out at once, so that a block is in one move alone.
            moved = {block for move in moves for block in move}
            exchanges = [pair for pair in self._choose_exchanges() if moved.isdisjoint(pair)]
            exchanges = exchanges[: (PLAN_SIZES[-1] - len(copies)) // 2]
            kept = {dst for _, dst in exchanges if self._is_worth_keeping(dst)}
            copies += self._sharing.rearrange(exchanges, keep=kept)
            moves += exchanges
        plan = DefragPlan(
            copies=copies,
            num_moved=len(moves),
            highest_before=highest_before,
            highest_after=pool.highest_used_block,
            num_used=pool.num_used_blocks,
        )
        self.num_moved += plan.num_moved
        if self.config.debug:
            _log(plan)
        return plan

    def _choose_exchanges(self) -> list[BlockCopy]:
        """Shared blocks beyond the first ones, each with the place among these that it takes.

        A shared block gives its place up to one with twice as many sequences.
        """
        sharing = self._sharing
        if sharing is None:
            return []
        num_changes, moves = self._exchanges
        if num_changes == sharing.num_sharing_changes:
            return moves
        sequences, pool = sharing.num_sequences_of_shared(), self.manager.pool
        beyond = [block for block in sequences if block >= self._shared_within]
        moves = []
        if beyond:
            places = range(PADDING_BLOCK + 1, min(self._shared_within, pool.num_blocks))
            beyond.sort(key=lambda block: (-sequences[block], block))
            by_use = sorted(
                places, key=lambda block: (sequences.get(block, 1), pool.ref_count(block))
            )
            for src, dst in zip(beyond, by_use, strict=False):
                if sequences[src] < 2 * sequences.get(dst, 1):
                    break
                moves.append(BlockCopy(src, dst))
        moves = moves[: PLAN_SIZES[-1] // 2]
        self._exchanges = sharing.num_sharing_changes, moves
        return moves

    def _choose_moves(self) -> tuple[list[BlockCopy], set[int]]:
        """The moves, and those of their destinations whose cached content is kept."""
        pool, copies_left = self.manager.pool, PLAN_SIZES[-1]
        sources: list[int] = []
        destinations: list[int] = []
        kept: set[int] = set()
        for src, dst in zip(pool.iter_used_descending(), pool.iter_free_ascending(), strict=False):
            keeps = self._is_worth_keeping(dst)
            copies_left -= 2 if keeps else 1
            if src < dst or copies_left < 0:
                break
            if keeps:
                kept.add(dst)
            sources.append(src)
            destinations.append(dst)
        # Any pairing of sources and destinations is valid. This one keeps neighbours together,
        # here and in later swaps, and a run of neighbouring blocks is copied in one operation.
        return list(map(BlockCopy, reversed(sources), destinations)), kept

    def _is_worth_keeping(self, block: int) -> bool:
        pool = self.manager.pool
        key = pool.prefix_index.key_of(block)
        if key is None:
            return False
        probability = 1.0 if key.hits else pool.reuse.rate
        return probability >= self.config.keep_from


def warm_up_defragmenter(
    copy: Callable[[Sequence[BlockCopy]], None], num_blocks: int, sizes: Sequence[int] = PLAN_SIZES
) -> bool:
    """Call ``copy`` once with each plan size, so that every graph is compiled (seed 000).

    Each call exchanges the blocks 1 and 0. With an odd number of sizes one more call follows, so
    the cache is unchanged in the end. Returns False, with a warning, for fewer than two blocks.
    Raises `InvalidSetting` for sizes below two, which cannot hold an exchange. An error of ``copy``
    is passed on.
    """
    remedy = "pass the number of blocks of the cache"
    num_blocks = integer(0, remedy=remedy).checked("num_blocks", num_blocks)
    plan_size = integer(2, MAX_NUM_BLOCKS, remedy="pass the plan sizes that the device compiles")
    instance_of(Sequence).checked("sizes", sizes)
    sizes = [plan_size.checked("size", size) for size in sizes]
    if not callable(copy):
        raise InvalidSetting(f"copy must be callable, got {copy!r}: pass KVCache.copy")
    logger.info("Warming up defragmenter with thresholds: %s", sizes)
    if num_blocks < 2:
        logger.warning("Skipping defragmenter warmup, insufficient blocks (%d)", num_blocks)
        return False
    exchange = (BlockCopy(1, 0), BlockCopy(0, 1))
    for size in (*sizes, *sizes[: len(sizes) % 2]):
        copy(pad_copies(exchange, size))
    logger.info("Defragmenter warmup completed successfully")
    return True


def _log(plan: DefragPlan) -> None:
    logger.info(
        "defragmentation done max_id_used=%d->%d num_used=%d moved=%d/%d",
        plan.highest_before,
        plan.highest_after,
        plan.num_used,
        len(plan.copies),
        plan.padded_size,
    )
