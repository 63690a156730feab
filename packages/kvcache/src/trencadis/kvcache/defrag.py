"""Moves the highest used blocks into the lowest free ones, so that decode steps read less.

Contiguous decode attention reads every block up to the highest in use; blocks that others have
freed below it are read for nothing. The trigger, the threshold and the warmed sizes are those of
seed 000. Unlike a defragmenter that sits beside the owner of the block tables, this one has the
tables themselves changed: there is no second mapping from block to block, a free destination costs
one copy instead of an exchange, and the next allocation sees the low blocks that are left.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import attrs

from trencadis.kvcache.errors import InvalidSetting
from trencadis.kvcache.manager import BlockManager
from trencadis.kvcache.moves import PLAN_SIZES, BlockCopy, pad_copies

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class DefragConfig:
    """When to defragment, and what to keep.

    ``threshold``: act when the highest block in use is more than this many blocks above the number
    of blocks in use. ``with_graphs``: whether the runtime compiles the copies as graphs of
    `PLAN_SIZES`; None leaves it to the runtime. ``debug`` logs every plan.

    ``keep_from``: cached content in the way of a used block is moved aside, at the cost of a second
    copy, if the chance that a prompt asks for it is at least this, and is evicted otherwise. The
    chance is 1 for content that was reused before, and what `ReuseEstimate` measures for other.
    0 keeps everything, a value above 1 nothing. A copy takes about 1/300 of the time in which a
    block is computed anew, so the default is on the side of fewer copies.
    """

    threshold: int = attrs.field(default=32)
    with_graphs: bool | None = None
    debug: bool = False
    keep_from: float = attrs.field(default=0.05)

    @threshold.validator
    @keep_from.validator
    def _not_negative(self, attribute: attrs.Attribute[float], value: object) -> None:
        if not isinstance(value, (int, float)) or not value >= 0:
            raise InvalidSetting(f"{attribute.name} must be at least 0, got {value!r}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> DefragConfig:
        """Settings from ``VLLM_DEFRAG_THRESHOLD``, ``VLLM_DEFRAG_WITH_GRAPHS``, ``VLLM_DEBUG``.

        Raises `InvalidSetting`, which names the variable, for a value that is not of its kind.
        """
        threshold = environ.get("VLLM_DEFRAG_THRESHOLD", "").strip() or "32"
        if not threshold.isdecimal():
            raise InvalidSetting(
                f"VLLM_DEFRAG_THRESHOLD must be a number of blocks, got {threshold!r}: 32 is usual"
            )
        topics = environ.get("VLLM_DEBUG", "").replace(" ", "").split(",")
        return cls(
            threshold=int(threshold),
            with_graphs=_flag(environ, "VLLM_DEFRAG_WITH_GRAPHS"),
            debug="defrag" in topics,
        )


@attrs.frozen
class DefragPlan:
    """Block copies that are to be carried out at once, and what they achieve.

    The block tables are changed already when a plan is returned. ``num_moved`` counts the used
    blocks that were given a lower id. There can be fewer copies than that, as what is not computed
    yet moves without one, or more, where cached content made room.
    """

    copies: tuple[BlockCopy, ...]
    num_moved: int
    highest_before: int
    highest_after: int
    num_used: int

    @property
    def padded_size(self) -> int:
        """The smallest of `PLAN_SIZES` that holds the plan; 0 for one without copies."""
        return PLAN_SIZES[bisect_left(PLAN_SIZES, len(self.copies))] if self.copies else 0

    @property
    def padded_copies(self) -> tuple[BlockCopy, ...]:
        """The copies, filled up to ``padded_size`` for a graph of that size."""
        return pad_copies(self.copies, self.padded_size)


class Defragmenter:
    """Decides when to defragment the blocks of one manager, and does it.

    Call `defragment` once per step, after the scheduler's allocations and before the batch is
    built, and carry out its copies in that place of the step's moves. What earlier steps computed
    must be marked as computed by then: a block with nothing in it is moved without a copy.
    """

    def __init__(self, manager: BlockManager, config: DefragConfig | None = None) -> None:
        self.config = config or DefragConfig()
        self._manager = manager

    def is_due(self) -> bool:
        """Whether the highest block in use is too far above their number."""
        manager = self._manager
        return manager.highest_in_use - self.config.threshold > manager.num_used_blocks

    def defragment(self) -> DefragPlan | None:
        """Move blocks if that is due; returns the copies, at most 512, or None.

        Used blocks move from the highest down into free blocks from the lowest up, until they
        are contiguous. No plan with the same result has fewer moves: each used block above the
        number of used blocks has to move, and no other does.
        """
        if not self.is_due():
            return None
        before = self._manager.highest_in_use
        moves, kept = self._plan()
        copies = [move for move in moves if self._manager.has_content(move.src)]
        copies += [BlockCopy(dst, src) for src, dst in moves if dst in kept]
        self._manager.relocate(moves, keep=kept)
        plan = DefragPlan(
            copies=tuple(copies),
            num_moved=len(moves),
            highest_before=before,
            highest_after=self._manager.highest_in_use,
            num_used=self._manager.num_used_blocks,
        )
        if self.config.debug:
            _log(plan)
        return plan

    def _plan(self) -> tuple[list[BlockCopy], set[int]]:
        """The moves, and those of their destinations whose cached content is to be kept."""
        pool, left = self._manager.pool, PLAN_SIZES[-1]
        sources: list[int] = []
        destinations: list[int] = []
        kept: set[int] = set()
        for src, dst in zip(pool.used_from_top(), pool.free_from_bottom(), strict=False):
            if src < dst or left == 0:
                break
            left -= 1
            if left and self._is_worth_keeping(dst):
                left -= 1
                kept.add(dst)
            sources.append(src)
            destinations.append(dst)
        # Which source goes to which destination is free. In this order neighbours stay neighbours,
        # here and in later swaps, and runs of blocks are copied in one piece.
        return list(map(BlockCopy, reversed(sources), destinations)), kept

    def _is_worth_keeping(self, block: int) -> bool:
        pool = self._manager.pool
        key = pool.index.key_of(block)
        if key is None:
            return False
        chance = 1.0 if key.hits else pool.reuse.rate
        return chance >= self.config.keep_from


def warm_up_defragmenter(
    copy: Callable[[Sequence[BlockCopy]], None], num_blocks: int, sizes: Sequence[int] = PLAN_SIZES
) -> bool:
    """Run ``copy`` once for each plan size, so that every graph is compiled; see seed 000.

    Each call exchanges blocks 1 and 0; one more call, if their number is odd, leaves the cache as
    it was. Returns False, with a warning, where there are fewer than two blocks.
    """
    logger.info("Warming up defragmenter with thresholds: %s", list(sizes))
    if num_blocks < 2:
        logger.warning("Skipping defragmenter warmup, insufficient blocks (%d)", num_blocks)
        return False
    exchange = (BlockCopy(1, 0), BlockCopy(0, 1))
    for size in (*sizes, *sizes[: len(sizes) % 2]):
        copy(pad_copies(exchange, size))
    logger.info("Defragmenter warmup completed successfully")
    return True


def _flag(environ: Mapping[str, str], name: str) -> bool | None:
    value = environ.get(name, "").strip().lower()
    if value in {"", "none"}:
        return None
    if value in {"1", "true", "yes", "on"}:
        return True
    if value in {"0", "false", "no", "off"}:
        return False
    raise InvalidSetting(f"{name} must be true or false, got {value!r}")


def _log(plan: DefragPlan) -> None:
    logger.info(
        "defragmentation done max_id_used=%d->%d num_used=%d moved=%d/%d",
        plan.highest_before,
        plan.highest_after,
        plan.num_used,
        len(plan.copies),
        plan.padded_size,
    )
