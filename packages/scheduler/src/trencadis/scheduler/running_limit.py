"""The running limit: how many sequences may run in a step, enforced by preemption.

A lower ``max_num_seqs`` alone does not stop sequences that already run (seed 003, section 2).
"""

from __future__ import annotations

import attrs

from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.group_states import GroupStates
from trencadis.scheduler.output import SchedulingStep
from trencadis.scheduler.preemption import Preemptor
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
        limit = self.config.max_num_seqs
        if self._thermal_limit is not None:
            limit = min(limit, self._thermal_limit)
        if self._hold_limit is not None:
            limit = min(limit, self._hold_limit)
        return limit

    def set_max_num_seqs(self, max_num_seqs: int) -> None:
        self.config = attrs.evolve(self.config, max_num_seqs=max_num_seqs)

    def hold(self, now: float) -> None:
        """Limit the batch to its present size for ``force_evict_hold_s`` seconds."""
        self._hold_limit = self._states.num_running_seqs
        self._hold_until_s = now + self.config.force_evict_hold_s

    def enforce(self, step: SchedulingStep, view: SchedulerView) -> None:
        """Set the limit of a step; preempt victims so that it holds in this step or the next.

        The thermal policy reads ``view``. The first step above the limit only stops admission if a
        sequence is expected to finish before any victim could resume. So the limit holds within
        two steps of its decrease.
        """
        if self._thermal is not None:
            self._thermal_limit = self._thermal.cap(view)
        step.max_running_seqs = self.value(step.now)
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
