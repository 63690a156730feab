"""Preemption of running groups, when blocks run out or for waiting groups of higher priority.

It swaps a group out or frees its blocks for recomputation, whichever is predicted faster.
"""

from __future__ import annotations

from trencadis.scheduler.admission import AdmissionControl
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.group_blocks import GroupBlocks
from trencadis.scheduler.group_states import GroupStates
from trencadis.scheduler.output import SchedulingStep
from trencadis.scheduler.preemption_costs import CompletionRate, PreemptionCosts


class Preemptor:
    """Preempts groups. ``num_swaps`` and ``num_recomputes`` count preemptions since the start."""

    def __init__(
        self,
        states: GroupStates,
        group_blocks: GroupBlocks,
        costs: PreemptionCosts,
        completion_rate: CompletionRate,
        admission: AdmissionControl,
    ) -> None:
        self.num_swaps = 0
        self.num_recomputes = 0
        self._states = states
        self._group_blocks = group_blocks
        self._costs = costs
        self._completion_rate = completion_rate
        self._admission = admission

    def preempt(self, group: SequenceGroup, step: SchedulingStep) -> None:
        """Take a running group off the device."""
        step.preempted_seq_ids.extend(sequence.seq_id for sequence in group.allocated_seqs)
        swapped = self._should_swap(group)
        self._states.preempt(group, step.now, swapped=swapped)
        if swapped:
            self._group_blocks.swap_out(group, step.now)
            self.num_swaps += 1
        else:
            self._group_blocks.free(group)
            self.num_recomputes += 1

    def free_blocks_for(self, group: SequenceGroup, step: SchedulingStep) -> bool:
        """Preempt running groups, the last one first, until ``group`` can append its slots.

        A victim that a later group outlasts counts as bypassed. False if ``group`` cannot in this
        step: it was preempted itself, or it waits for the blocks of a swap-out in progress, or for
        a group that is being swapped in, which it can preempt later, or the step carries out a
        control request and preempts for that alone, or it is scheduled ahead and preempts nothing.
        """
        blocks, states = self._group_blocks, self._states
        while (num_needed := blocks.num_blocks_to_append(group)) > blocks.pool.num_free_blocks:
            if step.carries_out_order or step.is_ahead:
                step.lacks_blocks = step.is_ahead
                return False
            victim = states.running.last()
            if num_needed <= blocks.pool.num_free_blocks + blocks.num_swapping_out:
                return False
            if victim is group and states.swapping_in:
                return False
            self.preempt(victim, step)
            if any(other.arrival > victim.arrival for other in states.running):
                states.count_bypass(victim)
            if victim is group:
                return False
        return True

    def preempt_for_priority(self, step: SchedulingStep) -> None:
        """Preempt groups of lower priority to start the first waiting group.

        Does nothing if all of them have too few sequences or blocks, if swap-outs in progress give
        enough blocks, or if waiting is predicted to be faster. An overdue group is never a victim;
        one that waits preempts groups below its own priority only.
        """
        group = self._admission.next_group(self._states.waiting, step)
        if group is None or not self._states.running:
            return
        if self._states.running.last().queue_key.priority <= group.priority:
            return
        blocks = self._group_blocks
        num_seqs = group.num_seqs - (step.max_running_seqs - self._states.num_running_seqs)
        if num_seqs <= 0 and blocks.can_allocate(group):
            return
        num_blocks = blocks.num_blocks_to_allocate(group) - blocks.pool.num_free_blocks
        if num_seqs <= 0 < num_blocks <= blocks.num_swapping_out:
            return
        victims = self._priority_victims(group, num_seqs, num_blocks - blocks.num_swapping_out)
        if all(self.beats_waiting(victim, step.now) for victim in victims):
            for victim in victims:
                self.preempt(victim, step)

    def beats_waiting(self, victim: SequenceGroup, now: float) -> bool:
        """Whether a new request would wait longer to start than the victim needs to resume.

        Otherwise preemption raises the highest latencies to lower the median (seed 003, 4.1.2).
        """
        resume_s = self._costs.resume_s(victim, swapped=self._should_swap(victim))
        return self._completion_rate.expected_wait_s(now) > resume_s

    def _should_swap(self, group: SequenceGroup) -> bool:
        is_faster = self._costs.swap_s(group) <= self._costs.recompute_s(group)
        return is_faster and self._group_blocks.can_swap_out(group)

    def _priority_victims(
        self, group: SequenceGroup, num_seqs: int, num_blocks: int
    ) -> list[SequenceGroup]:
        """Running groups of lower priority, the last first, that together have at least
        ``num_seqs`` sequences and ``num_blocks`` blocks; none if all of them have fewer.
        """
        victims: list[SequenceGroup] = []
        for victim in reversed(list(self._states.running)):
            if victim.queue_key.priority <= group.priority:
                return []
            victims.append(victim)
            num_seqs -= victim.num_seqs
            num_blocks -= victim.get_num_kv_blocks()
            if num_seqs <= 0 and num_blocks <= 0:
                return victims
        return []
