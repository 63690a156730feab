"""Priority preemption: a waiting group takes the place of running groups of lower priority."""

from __future__ import annotations

from trencadis.scheduler.admission import AdmissionControl
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.group_blocks import GroupBlocks
from trencadis.scheduler.group_states import GroupStates
from trencadis.scheduler.preemption import Preemptor
from trencadis.scheduler.scheduling_step import SchedulingStep


class PriorityPreemption:
    """Preempts running groups for the first waiting group, where that is faster than waiting.

    A running group that was bypassed ``max_bypasses`` times is never a victim. So a stream of
    requests of higher priority cannot keep another request from finishing.
    """

    def __init__(
        self,
        states: GroupStates,
        group_blocks: GroupBlocks,
        preemptor: Preemptor,
        admission: AdmissionControl,
    ) -> None:
        self._states = states
        self._group_blocks = group_blocks
        self._preemptor = preemptor
        self._admission = admission

    def preempt(self, step: SchedulingStep) -> None:
        """Preempt what the first waiting group needs; nothing if that is not enough."""
        group = self._admission.next_group(self._states.waiting, step)
        if group is None or not self._states.running:
            return
        if self._states.running.last().queue_key.priority <= group.queue_key.priority:
            return
        num_missing = group.num_seqs - (step.max_running_seqs - self._states.num_running_seqs)
        if num_missing <= 0 and self._group_blocks.can_allocate(group):
            return
        victims = self._victims(group, num_missing)
        if all(self._preemptor.beats_waiting(victim, step.now) for victim in victims):
            for victim in victims:
                self._preemptor.preempt(victim, step)

    def _victims(self, group: SequenceGroup, num_seqs: int) -> list[SequenceGroup]:
        """Running groups of lower priority with ``num_seqs`` sequences, the last first, or none."""
        victims: list[SequenceGroup] = []
        for victim in reversed(list(self._states.running)):
            if victim.queue_key.priority <= group.queue_key.priority:
                return []
            if not self._admission.is_overdue(victim):
                victims.append(victim)
                num_seqs -= victim.num_seqs
                if num_seqs <= 0:
                    return victims
        return []
