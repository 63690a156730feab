"""Enforces the running limit of a `Scheduler` by preemption.

A lower ``max_num_seqs`` alone does not stop sequences that already run (seed 003, section 2).
"""

from __future__ import annotations

import logging

from trencadis.scheduler.config import SettingsInForce
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.group_states import GroupStates, SortedGroups
from trencadis.scheduler.output import SchedulingStep
from trencadis.scheduler.preemption import Preemptor
from trencadis.scheduler.running_limit import RunningLimit

logger = logging.getLogger(__name__)


class RunningGroups:
    """The running groups as a `BatchHost`. ``step`` is the step that preempts them."""

    def __init__(self, states: GroupStates, preemptor: Preemptor) -> None:
        self.step: SchedulingStep  # set before anything is preempted
        self._states = states
        self._preemptor = preemptor

    @property
    def running(self) -> SortedGroups:
        """The groups, the first in the queue order first."""
        return self._states.running

    def preempt(self, group: SequenceGroup) -> None:
        """Take a running group off the device, in the step that is being decided."""
        self._preemptor.preempt(group, self.step)


class LimitEnforcement:
    """Sets the limits of a step, and preempts victims so that they hold in it or the next one."""

    def __init__(
        self,
        settings: SettingsInForce,
        states: GroupStates,
        preemptor: Preemptor,
        limit: RunningLimit[SequenceGroup],
    ) -> None:
        self._settings = settings
        self._states = states
        self._preemptor = preemptor
        self._limit = limit
        self._was_exceeded = False
        self._was_stalled = False

    def is_exceeded(self, now: float) -> bool:
        """Whether more sequences run at ``now`` (seconds) than the limits allow."""
        return self._states.num_started_seqs > self._limit.value(now)

    def enforce(self, step: SchedulingStep) -> None:
        """Set the limits of a step; preempt victims so that they hold in this step or the next.

        The first step above the limit only stops admission if a sequence is expected to finish
        before any victim could resume, or if it is scheduled ahead. So the limit holds within two
        steps of its decrease. Groups whose swap-in is not complete count, because they will run;
        once they do, they can be victims.
        """
        step.max_running_seqs = self._limit.value(step.now)
        step.max_group_seqs = self._limit.ordered(step.now)
        step.max_prefill_tokens = step.prefill_budget = self._limit.prefill_tokens()
        num_started = self._states.num_started_seqs
        self._was_stalled &= not num_started
        excess = num_started - step.max_running_seqs
        if excess <= 0:
            self._was_exceeded = False
            return
        if step.is_ahead:
            self._was_exceeded = True
            return
        victims = self._limit.victims_of_policy(excess)
        preempts = any(self._preemptor.beats_waiting(victim, step.now) for victim in victims)
        if not preempts and not self._was_exceeded:
            self._was_exceeded = True
            return
        for victim in victims:
            self._preemptor.preempt(victim, step)

    def warn_if_stalled(self) -> None:
        """Warn, once, if each request is wider than ``max_num_seqs``, where nothing runs."""
        states, limit = self._states, self._settings.config.max_num_seqs
        queues = (states.resume_queue, states.waiting)
        is_stalled = bool(states.groups) and not any(queue.first(1, limit) for queue in queues)
        if is_stalled and not self._was_stalled:
            logger.warning(
                "Nothing runs: each of the %d requests has more sequences than the %d that a "
                "control request allows. Raise max_num_seqs, or abort them",
                len(states.groups),
                limit,
            )
        self._was_stalled = is_stalled
