"""Where prefill chunks end so that the state after them is kept, for models with layers that keep
one.

A prefix hit needs the state after the prefix, which a sequence has only while it computes just
these tokens. So a chunk ends at a block boundary where a snapshot pays:

- after the last full block of a prompt that leaves a token to compute: for the same prompt, and
  for one that continues it.
- where a cached prefix without a snapshot ends, or that of a request that waits for this one:
  there prompts diverge, and further ones may.
- where the budget of a step divides a prompt. So one that is recomputed begins there, too. Of
  these a long prompt has many: they are replaced before others.

Each is at least `LEAST_BLOCKS` after the one before: a further chunk takes the time of a short
prompt. vLLM's ``mamba_cache_mode`` ``align`` and SGLang's ``MambaRadixCache`` keep states of such
ends.
"""

from __future__ import annotations

from bisect import bisect

from trencadis.kvcache import BlockCopy, BlockManager, StateSlots
from trencadis.scheduler.group import Sequence, SequenceGroup

LEAST_BLOCKS = 4
"""Blocks that a snapshot must save. On two cores of an AMD EPYC, 2026-11-27, a prompt of two blocks
of 32 tokens took 1.6 times as long with a further chunk, one of six 1.1 times."""


class SnapshotPoints:
    """Ends chunks at the points of their groups, and has the copies of states that are due then.

    ``blocks`` must have snapshots.
    """

    def __init__(self, blocks: BlockManager, state_slots: StateSlots) -> None:
        self._blocks = blocks
        self._block_size = blocks.config.block_size
        self._least_tokens = LEAST_BLOCKS * self._block_size
        self._state_slots = state_slots
        self._due: dict[int, BlockCopy] = {}
        self._ends: dict[int, int] = {}
        """Up to where the step computes sequences in prefill."""

    def begin(self, group: SequenceGroup, num_hit_tokens: int, num_cached_tokens: int) -> None:
        """Set the points of a group that is about to compute its prompt.

        ``num_hit_tokens``: those that it need not compute. ``num_cached_tokens``: those whose
        blocks are cached, with or without a snapshot.
        """
        size = self._block_size
        last = (group.request.num_prompt_tokens - 1) // size * size
        group.snapshot_points, group.last_snapshot = [], num_hit_tokens
        before = num_hit_tokens
        for point in (min(num_cached_tokens, last), last):
            if point - before >= self._least_tokens:
                group.snapshot_points.append(point)
                before = point

    def add(self, group: SequenceGroup, num_hit_tokens: int, num_tokens: int) -> bool:
        """Have a snapshot taken after so many tokens of a running group, whole blocks.

        For a waiting one that has them in common with it, and has a hit of ``num_hit_tokens``.
        False where that does not pay, or the running group has computed them without a snapshot,
        in steps so far and the present one.
        """
        least = self._least_tokens
        if num_tokens - num_hit_tokens < least or not group.allocated_seqs:
            return False
        points, leader = group.snapshot_points, group.allocated_seqs[0]
        # A snapshot of an earlier point is a hit already, or it is gone.
        first = max(num_tokens - least, leader.num_computed_tokens)
        if any(first < point <= num_tokens for point in points):
            return True
        if max(leader.num_computed_tokens, self._ends.get(leader.seq_id, 0)) >= num_tokens:
            return False
        later = [point for point in points if point >= num_tokens + least]
        group.snapshot_points = [*points[: bisect(points, num_tokens)], num_tokens, *later]
        return True

    def chunk_tokens(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of its next ``num_tokens`` a sequence in prefill computes in one chunk."""
        start = sequence.num_computed_tokens
        end = start + num_tokens
        point = next((each for each in sequence.group.snapshot_points if each > start), end)
        if point < end:
            return point - start
        aligned = end // self._block_size * self._block_size
        is_divided = point > end or end < sequence.num_slots
        return aligned - start if is_divided and aligned > start else num_tokens

    def note(self, sequence: Sequence, end: int) -> None:
        """A chunk that computes a sequence up to ``end`` is scheduled.

        A snapshot is taken at a point, and at a block boundary that is far enough from the last.
        """
        group = sequence.group
        self._ends[sequence.seq_id] = end
        is_point = end in group.snapshot_points
        if not is_point:
            is_far = end - group.last_snapshot >= self._least_tokens
            if end % self._block_size or end == sequence.num_slots or not is_far:
                return
        group.last_snapshot = end
        if self._has_snapshot(group, end):
            return
        slot = self._blocks.reserve_snapshot(sequence.seq_id, end, is_replaced_first=not is_point)
        if slot is not None:
            self._due[sequence.seq_id] = BlockCopy(self._state_slots.slot(sequence.seq_id), slot)

    def _has_snapshot(self, group: SequenceGroup, num_tokens: int) -> bool:
        """Whether there is one after so many tokens of the prompt, which is then in use."""
        number = num_tokens // self._block_size - 1
        keys, snapshots = group.prefix_keys, self._blocks.snapshots
        if keys is None or snapshots is None or number >= len(keys.blocks):
            return False
        return snapshots.use(keys.blocks[number]) is not None

    def forget(self, seq_id: int) -> None:
        """The chunk of a sequence is not computed after all."""
        self._due.pop(seq_id, None)

    def take(self) -> tuple[BlockCopy, ...]:
        """The copies that are due after the step, whose chunks are noted."""
        copies = tuple(self._due.values())
        self._due.clear()
        self._ends.clear()
        return copies
