"""A step while it is scheduled: its remaining token budget and the sequences scheduled so far."""

from __future__ import annotations

import attrs

from trencadis.kvcache import BlockManager, CopyPlan
from trencadis.scheduler.group import Sequence, SequenceGroup
from trencadis.scheduler.output import ScheduledSequence, SchedulerOutput


@attrs.define
class SchedulingStep:
    """Schedules the tokens of groups within the token budget of one step.

    - ``now``: time of the step, in seconds.
    - ``max_chunk_tokens``: maximum length of a prefill chunk; None: the token budget alone.
    - ``max_running_seqs``: the running limit, in sequences.
    """

    number: int
    now: float
    token_budget: int
    max_chunk_tokens: int | None
    blocks: BlockManager
    max_running_seqs: int = 0
    prompts: list[ScheduledSequence] = attrs.field(factory=list)
    decodes: list[ScheduledSequence] = attrs.field(factory=list)
    preempted_seq_ids: list[int] = attrs.field(factory=list)

    def schedule_decodes(self, group: SequenceGroup) -> None:
        """Schedule the sequences of a running group that have one token to compute."""
        for sequence in group.allocated_seqs:
            if sequence.num_slots - sequence.num_computed_tokens == 1 and self.token_budget:
                self._schedule(group, sequence, 1)

    def schedule_chunks(self, group: SequenceGroup) -> None:
        """Schedule a prefill chunk of each sequence that has two or more tokens to compute."""
        for sequence in group.allocated_seqs:
            num_tokens = sequence.num_slots - sequence.num_computed_tokens
            if num_tokens > 1 and self.token_budget:
                self._schedule(
                    group, sequence, min(num_tokens, self.max_chunk_tokens or num_tokens)
                )

    def schedule_group(self, group: SequenceGroup) -> None:
        """Schedule a group that has just started to run."""
        self.schedule_decodes(group)
        self.schedule_chunks(group)

    def to_output(self, moves: CopyPlan) -> SchedulerOutput:
        return SchedulerOutput(
            self.number,
            tuple(self.prompts),
            tuple(self.decodes),
            moves,
            tuple(self.preempted_seq_ids),
            self.max_running_seqs,
        )

    def _schedule(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> None:
        num_tokens = min(num_tokens, self.token_budget)
        start = sequence.num_computed_tokens
        end = start + num_tokens
        tokens = sequence.token_ids
        forks: tuple[int, ...] = ()
        samples = end == len(tokens)
        if samples and group.unforked_seqs:
            # Sequences without tokens beyond the common prefix use the same row of logits.
            forks = tuple(fork.seq_id for fork in group.unforked_seqs if len(fork.token_ids) == end)
        scheduled = ScheduledSequence(
            sequence.seq_id,
            start,
            tokens[start:end],
            self.blocks.block_table(sequence.seq_id),
            samples,
            forks,
            group.beam_state.candidates_per_beam if group.beam_state is not None else 0,
        )
        (self.decodes if num_tokens == 1 else self.prompts).append(scheduled)
        self.token_budget -= num_tokens
        group.last_scheduled_step = self.number
