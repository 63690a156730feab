"""A step while it is being decided: what is left of its budget, and who is in it so far."""

from __future__ import annotations

import attrs

from trencadis.kvcache import BlockManager, CopyPlan
from trencadis.scheduler.group import Sequence, SequenceGroup
from trencadis.scheduler.output import ScheduledSequence, SchedulerOutput


@attrs.define
class StepBuilder:
    """Collects the tokens of a step within its budget. ``now`` is in seconds."""

    number: int
    now: float
    token_budget: int
    max_chunk: int | None
    blocks: BlockManager
    cap: int = 0
    admits: bool = True
    prompts: list[ScheduledSequence] = attrs.field(factory=list)
    decodes: list[ScheduledSequence] = attrs.field(factory=list)
    preempted: list[int] = attrs.field(factory=list)

    def place_decodes(self, group: SequenceGroup) -> None:
        """The single tokens that the sequences of a running group have to compute."""
        for one in group.active:
            if one.num_slots - one.num_computed == 1 and self.token_budget:
                self._place(group, one, 1)

    def place_chunks(self, group: SequenceGroup) -> None:
        """The next chunk of every sequence of a group that has more than one token to compute."""
        for one in group.active:
            pending = one.num_slots - one.num_computed
            if pending > 1 and self.token_budget:
                self._place(group, one, min(pending, self.max_chunk or pending))

    def place(self, group: SequenceGroup) -> None:
        """Whatever a group that has just begun to run can compute."""
        self.place_decodes(group)
        self.place_chunks(group)

    def build(self, moves: CopyPlan) -> SchedulerOutput:
        return SchedulerOutput(
            self.number,
            tuple(self.prompts),
            tuple(self.decodes),
            moves,
            tuple(self.preempted),
            self.cap,
        )

    def _place(self, group: SequenceGroup, one: Sequence, num_tokens: int) -> None:
        num_tokens = min(num_tokens, self.token_budget)
        start = one.num_computed
        end = start + num_tokens
        tokens = one.token_ids
        forks: tuple[int, ...] = ()
        samples = end == len(tokens)
        if samples and group.unforked:
            # Those that have nothing beyond the trunk go on from the same row of logits.
            forks = tuple(other.seq_id for other in group.unforked if len(other.token_ids) == end)
        scheduled = ScheduledSequence(
            one.seq_id,
            start,
            tokens[start:end],
            self.blocks.block_table(one.seq_id),
            samples,
            forks,
            group.beams.candidates_per_beam if group.beams is not None else 0,
        )
        (self.decodes if num_tokens == 1 else self.prompts).append(scheduled)
        self.token_budget -= num_tokens
        group.last_scheduled_step = self.number
