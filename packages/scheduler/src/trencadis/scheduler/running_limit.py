"""The running limit: how many sequences may run in a step, enforced by preemption.

A lower ``max_num_seqs`` alone does not stop sequences that already run (seed 003, section 2).
"""

from __future__ import annotations

import attrs

from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.group_states import GroupStates
from trencadis.scheduler.preemption import Preemptor
from trencadis.scheduler.scheduling_step import SchedulingStep
from trencadis.scheduler.thermal.guard import ThermalGuard
from trencadis.scheduler.thermal.policy import SchedulerView
from trencadis.scheduler.thermal.victims import first_victims, victim_order


class RunningLimit:
    """The minimum of ``max_num_seqs``, the thermal policy's limit and a hold after an eviction.

    ``config`` has the settings in force; control requests change its ``max_num_seqs``.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        states: GroupStates,
        preemptor: Preemptor,
        thermal: ThermalGuard | None,
    ) -> None:
        self.config = config
        self._states = states
        self._preemptor = preemptor
        self._thermal = thermal
        self._thermal_limit: int | None = None
        self._hold_limit: int | None = None
        self._hold_until_s = 0.0
        self._was_exceeded = False

    def value(self, now: float) -> int:
        """The maximum number of running sequences at ``now`` (seconds)."""
        if self._hold_limit is not None and now >= self._hold_until_s:
            self._hold_limit = None
        limits = (self.config.max_num_seqs, self._thermal_limit, self._hold_limit)
        return min(limit for limit in limits if limit is not None)

    def set_max_num_seqs(self, max_num_seqs: int) -> None:
        self.config = attrs.evolve(self.config, max_num_seqs=max_num_seqs)

    def hold(self, now: float) -> None:
        """Limit the batch to its present size for ``force_evict_hold_s`` seconds."""
        self._hold_limit = self._states.num_running_seqs
        self._hold_until_s = now + self.config.force_evict_hold_s

    def update_thermal_limit(self, view: SchedulerView) -> None:
        self._thermal_limit = None if self._thermal is None else self._thermal.cap(view)

    def enforce(self, step: SchedulingStep) -> None:
        """Preempt victims so that the limit holds, in this step or in the next.

        The first step above the limit only stops admission if a sequence is expected to finish
        before any victim could resume. So the limit holds within two steps of its decrease.
        """
        excess = self._states.num_running_seqs - step.max_running_seqs
        if excess <= 0:
            self._was_exceeded = False
            return
        victims = self._victims(excess)
        preempts = any(self._preemptor.beats_waiting(victim, step.now) for victim in victims)
        if not preempts and not self._was_exceeded:
            self._was_exceeded = True
            return
        for victim in victims:
            self._preemptor.preempt(victim, step)

    def _victims(self, num_seqs: int) -> list[SequenceGroup]:
        running = list(self._states.running)
        if self._thermal is not None:
            return self._thermal.victims(running, num_seqs)
        return first_victims(victim_order("lru"), running, num_seqs)
