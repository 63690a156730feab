"""Preemption of running groups, by swap or by recomputation, whichever is predicted faster."""

from __future__ import annotations

from trencadis.scheduler.completion_rate import CompletionRate
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.group_blocks import GroupBlocks
from trencadis.scheduler.group_states import GroupStates
from trencadis.scheduler.preemption_costs import PreemptionCosts
from trencadis.scheduler.scheduling_step import SchedulingStep


class Preemptor:
    """Preempts groups. ``num_swaps`` and ``num_recomputes`` count preemptions since the start."""

    def __init__(
        self,
        states: GroupStates,
        group_blocks: GroupBlocks,
        costs: PreemptionCosts,
        completion_rate: CompletionRate,
    ) -> None:
        self.num_swaps = 0
        self.num_recomputes = 0
        self._states = states
        self._group_blocks = group_blocks
        self._costs = costs
        self._completion_rate = completion_rate

    def preempt(self, group: SequenceGroup, step: SchedulingStep) -> None:
        """Take a running group off the device."""
        step.preempted_seq_ids.extend(sequence.seq_id for sequence in group.allocated_seqs)
        swapped = self._should_swap(group)
        self._states.preempt(group, swapped=swapped)
        if swapped:
            self._group_blocks.swap_out(group, step.now)
            self.num_swaps += 1
        else:
            self._group_blocks.free(group)
            self.num_recomputes += 1

    def free_blocks_for(self, group: SequenceGroup, step: SchedulingStep) -> bool:
        """Preempt running groups, the last one first, until ``group`` can append its slots.

        False if it cannot in this step: it was preempted itself, or it waits for the blocks of a
        swap-out in progress, or for a group that is being swapped in, which it can preempt later.
        """
        blocks, states = self._group_blocks, self._states
        while (num_needed := blocks.num_blocks_to_append(group)) > blocks.num_free:
            victim = states.running.last()
            if num_needed <= blocks.num_free + blocks.num_swapping_out:
                return False
            if victim is group and states.swapping_in:
                return False
            self.preempt(victim, step)
            if victim is group:
                return False
        return True

    def beats_waiting(self, victim: SequenceGroup, now: float) -> bool:
        """Whether a new request would wait longer to start than the victim needs to resume.

        Otherwise preemption raises the highest latencies to lower the median (seed 003, 4.1.2).
        """
        resume_s = self._costs.resume_s(victim, swapped=self._should_swap(victim))
        return self._completion_rate.expected_wait_s(now) > resume_s

    def _should_swap(self, group: SequenceGroup) -> bool:
        is_faster = self._costs.swap_s(group) <= self._costs.recompute_s(group)
        return is_faster and self._group_blocks.can_swap_out(group)
