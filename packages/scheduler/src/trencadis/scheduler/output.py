"""The output of the scheduler: the decision of a step and its new tokens, as plain values.

`SchedulingStep` builds the decision.
"""

from __future__ import annotations

import math
from collections import abc
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.kvcache import PADDING_SLOT, BlockManager, CopyPlan, StateSlots
from trencadis.scheduler.group import Sequence, SequenceGroup
from trencadis.scheduler.request import FinishReason
from trencadis.scheduler.snapshot_points import SnapshotPoints

PENDING_TOKEN = -1
"""Stands for the token that the step before samples for the same sequence, while that step is in
flight."""


class ScheduledSequence(NamedTuple):
    """The tokens of one sequence to compute in this step.

    - ``start``: position of the first token; all positions before it are in the KV cache, or
      computed by the step in flight.
    - ``token_ids``: the tokens; of a decode, it may be `PENDING_TOKEN`.
    - ``block_table``: ``int32[num_blocks]``, the blocks of the sequence in token order. It covers
      all tokens, with the padding block 0 in the place of those that have left the window, and is
      valid until the next ``schedule()``.
    - ``samples``: whether the logits of the last token are needed; False for a prefill chunk that
      is not the last of its prompt.
    - ``forks``: ids of further sequences that continue from the same row of logits. Sample from
      that row once for ``seq_id`` and once for each of them.
    - ``num_candidates``: above 0 for a beam. Return that many most probable tokens with their
      log-probabilities instead of a sampled token.
    - ``adapter``: that of its request.
    - ``state_slot``: the slot of its state, for a model with layers that keep one. It has the state
      after ``start`` tokens, or any content where that is 0: then the state is zero.
    - ``further_tables``: as ``block_table``, those of the further block groups of the cache.
      Each table has blocks for the tokens of the step at least.
    """

    seq_id: int
    start: int
    token_ids: abc.Sequence[int]
    block_table: npt.NDArray[np.int32]
    samples: bool
    forks: tuple[int, ...] = ()
    num_candidates: int = 0
    adapter: str = ""
    state_slot: int = PADDING_SLOT
    further_tables: tuple[npt.NDArray[np.int32], ...] = ()

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Ids of the sequences that need a token from this row of logits."""
        return (self.seq_id, *self.forks) if self.samples else ()


class FailedRequest(NamedTuple):
    """A request that the scheduler has aborted because an internal error concerns it alone."""

    request_id: str
    error: Exception


@attrs.frozen
class SchedulerOutput:
    """The decision of one step.

    - ``prompts``: chunks of two or more tokens: of prompts, of what is recomputed, and of tokens
      that were forced.
    - ``decodes``: single tokens whose context is in the KV cache. They and the chunks may be
      forward passes apart or one: none reads what another writes in this step.
    - ``moves``: copy-on-write, swaps and defragmentation, to carry out in this order before the
      forward passes. There may be moves without anything to compute.
    - ``preempted_seq_ids``: sequences that lost their device blocks in this step.
    - ``max_running_seqs``: the running limit of this step, in sequences.
    - ``max_prefill_tokens``: the prefill limit of this step, in tokens.
    - ``failed``: requests that were aborted because of an internal error; tell their clients.
    - ``branches``: whether its results decide which sequences there are in the next step (beams,
      samples that fork), so that it cannot be scheduled before them.
    - ``state_moves``: copies between slots of states, as ``moves``; None for a model without.
    """

    step: int
    prompts: tuple[ScheduledSequence, ...] = ()
    decodes: tuple[ScheduledSequence, ...] = ()
    moves: CopyPlan = attrs.field(factory=CopyPlan, eq=False)
    preempted_seq_ids: tuple[int, ...] = ()
    max_running_seqs: int = 0
    failed: tuple[FailedRequest, ...] = ()
    max_prefill_tokens: int = 0
    branches: bool = False
    state_moves: CopyPlan | None = attrs.field(default=None, eq=False)

    @property
    def is_empty(self) -> bool:
        """Whether the step computes no tokens; it may have moves."""
        return not self.prompts and not self.decodes


class SequenceUpdate(NamedTuple):
    """A new token of a sequence, and the finish reason if it was the last one.

    Tokens that were forced follow the sampled one, each in an update of its own.
    The tokens of running beams may still change. So a beam search reports only once it has ended:
    one update per result, best first, with its last token.
    """

    seq_id: int
    request_id: str
    token_id: int
    finish_reason: FinishReason | None = None


@attrs.define
class SchedulingStep:
    """A step while it is scheduled: what is left of its budgets, and what was scheduled so far.

    - ``now``: time of the step, in seconds.
    - ``num_groups``: block groups of the cache.
    - ``snapshots``: where prefill chunks end for snapshots of states; None without these.
    - ``token_budget``, ``prefill_budget``: tokens that may still be scheduled, and those of them
      that may be in prefill chunks.
    - ``max_chunk_tokens``: maximum length of a prefill chunk; None: the token budget alone.
      ``max_mixed_prefill_tokens``: maximum of tokens in chunks where the step also decodes.
    - ``max_running_seqs``: the running limit, in sequences. ``max_prefill_tokens``: the prefill
      limit, in tokens.
    - ``max_group_seqs``: the most sequences of a group that may start; above ``max_running_seqs``
      where a thermal limit is lower. Such a group runs alone.
    - ``carries_out_order``: no phase after a control request starts or preempts a group, so that
      its answer is what runs after the step.
    - ``is_ahead``: the step before is in flight. Nothing is preempted, because the newest tokens of
      running sequences are unknown. ``lacks_blocks``: a running group needed blocks, then.
    - ``without_blocks``: running groups that compute nothing, because slots of theirs lack blocks.
    """

    number: int
    now: float
    token_budget: int
    max_chunk_tokens: int | None
    max_mixed_prefill_tokens: int | None
    blocks: BlockManager
    state_slots: StateSlots | None = None
    num_groups: int = 1
    snapshots: SnapshotPoints | None = None
    max_running_seqs: int = 0
    max_prefill_tokens: int = 0
    prefill_budget: int = 0
    max_group_seqs: int = 0
    carries_out_order: bool = False
    is_ahead: bool = False
    lacks_blocks: bool = False
    branches: bool = False
    prompts: list[ScheduledSequence] = attrs.field(factory=list)
    decodes: list[ScheduledSequence] = attrs.field(factory=list)
    preempted_seq_ids: list[int] = attrs.field(factory=list)
    failed: list[FailedRequest] = attrs.field(factory=list)
    without_blocks: list[SequenceGroup] = attrs.field(factory=list)

    def schedule(self, groups: abc.Iterable[SequenceGroup]) -> None:
        """Schedule the tokens of running groups: first all decodes, then prefill chunks.

        A sequence with one token to compute is a decode, one with more gets a chunk.
        """
        self.schedule_prefills(self.schedule_decodes(groups))

    def schedule_decodes(self, groups: abc.Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """Schedule the decodes of running groups, then chunks of tokens that were forced.

        Beside any of them, prefill chunks are within ``max_mixed_prefill_tokens``. Returns the
        groups that have more to compute.
        """
        prefills: list[SequenceGroup] = []
        forced: list[Sequence] = []
        for group in groups:
            if self.without_blocks and group in self.without_blocks:
                continue
            is_prefill = False
            for sequence in group.allocated_seqs:
                num_tokens = sequence.num_slots - sequence.num_computed_tokens
                if num_tokens == 1:
                    self._schedule_tokens(sequence, 1)
                elif num_tokens > 1 and sequence.is_in_prefill:
                    is_prefill = True
                elif num_tokens > 1:
                    forced.append(sequence)
            if is_prefill:
                prefills.append(group)
        if forced:
            if self.decodes or len(forced) > 1:
                self._limit_mixed()
            self._schedule_forced(forced)
        if self.decodes or forced:
            self._limit_mixed()
        return prefills

    def _limit_mixed(self) -> None:
        """Limit the chunks of the step, with those that are scheduled, to those of a mixed one."""
        if self.max_mixed_prefill_tokens is not None:
            num_scheduled = sum(len(chunk.token_ids) for chunk in self.prompts)
            left = max(0, self.max_mixed_prefill_tokens - num_scheduled)
            self.prefill_budget = min(self.prefill_budget, left)

    def schedule_prefills(self, groups: abc.Iterable[SequenceGroup]) -> None:
        """Schedule prefill chunks of running groups, in this order."""
        for group in groups:
            for sequence in group.allocated_seqs:
                num_tokens = sequence.num_slots - sequence.num_computed_tokens
                if num_tokens > 1 and sequence.is_in_prefill:
                    self._schedule_chunk(sequence, num_tokens)

    def _schedule_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        longest = min(self._longest_chunk(num_tokens), self.prefill_budget)
        cost = sequence.group.request.prompt_token_cost
        if cost == 1.0:
            self.prefill_budget -= self._schedule_to_point(sequence, longest)
            return
        budget = min(self.prefill_budget, self.token_budget)
        # One token at least, so that a budget below its cost does not keep it for ever.
        num_scheduled = self._schedule_to_point(sequence, min(longest, max(1, int(budget / cost))))
        further = math.ceil(num_scheduled * (cost - 1.0))
        self.prefill_budget = max(0, self.prefill_budget - num_scheduled - further)
        self.token_budget = max(0, self.token_budget - further)

    def _schedule_to_point(self, sequence: Sequence, num_tokens: int) -> int:
        """As `_schedule_tokens`, for a prefill chunk: it may end where a snapshot is taken."""
        num_tokens = min(num_tokens, self.token_budget)
        if self.snapshots is not None and num_tokens:
            num_tokens = self.snapshots.chunk_tokens(sequence, num_tokens)
            self.snapshots.note(sequence, sequence.num_computed_tokens + num_tokens)
        return self._schedule_tokens(sequence, num_tokens)

    def _schedule_forced(self, sequences: abc.Sequence[Sequence]) -> None:
        """Schedule tokens that were forced.

        Each sequence gets one token at least, as a decode does, whatever the prefill limit: no
        sequence advances more slowly because its tokens were forced.
        """
        for num_later, sequence in zip(range(len(sequences) - 1, -1, -1), sequences, strict=True):
            num_tokens = sequence.num_slots - sequence.num_computed_tokens
            longest = min(
                self._longest_chunk(num_tokens), self.prefill_budget, self.token_budget - num_later
            )
            num_scheduled = self._schedule_tokens(sequence, max(1, longest))
            if num_scheduled > 1:
                self.prefill_budget -= num_scheduled

    def _further_tables(self, sequence: Sequence) -> tuple[npt.NDArray[np.int32], ...]:
        table = self.blocks.block_table
        return tuple(table(sequence.seq_id, group) for group in range(1, self.num_groups))

    def _longest_chunk(self, num_tokens: int) -> int:
        return min(num_tokens, self.max_chunk_tokens or num_tokens)

    def to_output(self, moves: CopyPlan, state_moves: CopyPlan | None) -> SchedulerOutput:
        return SchedulerOutput(
            self.number,
            tuple(self.prompts),
            tuple(self.decodes),
            moves,
            tuple(self.preempted_seq_ids),
            self.max_running_seqs,
            tuple(self.failed),
            self.max_prefill_tokens,
            self.branches,
            state_moves,
        )

    def discard(self, group: SequenceGroup) -> None:
        """Take the sequences of a group out of the step. Their token budget is not returned."""
        seq_ids = {sequence.seq_id for sequence in group.unfinished_seqs}
        for scheduled in (self.prompts, self.decodes):
            scheduled[:] = [item for item in scheduled if item.seq_id not in seq_ids]

    def _schedule_tokens(self, sequence: Sequence, num_tokens: int) -> int:
        """Schedule at most ``num_tokens`` of a sequence, as the token budget allows.

        Returns how many were scheduled.
        """
        num_tokens = min(num_tokens, self.token_budget)
        if num_tokens == 0:
            return 0
        group = sequence.group
        start = sequence.num_computed_tokens
        end = start + num_tokens
        tokens = sequence.token_ids
        forks: tuple[int, ...] = ()
        samples = end == len(tokens)
        if samples and group.unforked_seqs:
            # Sequences without tokens beyond the common prefix use the same row of logits.
            forks = tuple(fork.seq_id for fork in group.unforked_seqs if len(fork.token_ids) == end)
        if group.beam_state is not None or (group.unforked_seqs and end == sequence.num_slots):
            self.branches = True
        scheduled = ScheduledSequence(
            sequence.seq_id,
            start,
            tokens[start:end],
            self.blocks.block_table(sequence.seq_id),
            samples,
            forks,
            group.beam_state.candidates_per_beam if group.beam_state is not None else 0,
            group.request.adapter,
            PADDING_SLOT if self.state_slots is None else self.state_slots.slot(sequence.seq_id),
        )
        if self.num_groups > 1:
            scheduled = scheduled._replace(further_tables=self._further_tables(sequence))
        (self.decodes if num_tokens == 1 else self.prompts).append(scheduled)
        self.token_budget -= num_tokens
        group.last_scheduled_step = self.number
        return num_tokens
