"""How many sequences may run in a step, enforced by preemption, and how much it may prefill.

A lower ``max_num_seqs`` alone does not stop sequences that already run (seed 003, section 2).
"""

from __future__ import annotations

import logging

from trencadis.scheduler.config import SettingsInForce
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.group_states import GroupStates
from trencadis.scheduler.output import SchedulingStep
from trencadis.scheduler.preemption import Preemptor
from trencadis.scheduler.thermal.guard import ThermalGuard
from trencadis.scheduler.thermal.policy import SchedulerView
from trencadis.scheduler.thermal.victims import first_victims, victim_order

logger = logging.getLogger(__name__)


class RunningLimit:
    """The minimum of ``max_num_seqs``, the thermal policy's limit and a hold after an eviction.

    The limit of a thermal policy leaves the first running group alone, whatever its number of
    sequences: a group that is wider than the limit could not run at all otherwise. The other two
    limits are orders of an administrator: such a group waits; a warning says so if nothing runs.

    The prefill limit is the minimum of ``max_prefill_tokens``, the thermal policy's and the token
    budget. It is at least 1, so every step with prefill to do computes some of it.

    ``policy_limit`` is the last limit of the thermal policy; None without one.
    """

    def __init__(
        self,
        settings: SettingsInForce,
        states: GroupStates,
        preemptor: Preemptor,
        thermal: ThermalGuard | None,
    ) -> None:
        self.policy_limit: int | None = None
        self._settings = settings
        self._states = states
        self._preemptor = preemptor
        self._thermal = thermal
        self._hold_limit: int | None = None
        self._hold_until_s = 0.0
        self._was_exceeded = False
        self._was_stalled = False

    def value(self, now: float) -> int:
        """The maximum number of running sequences at ``now`` (seconds)."""
        ordered_limit = self._ordered_limit(now)
        if self.policy_limit is None:
            return ordered_limit
        running = self._states.running
        num_first = running.first().num_seqs if running else 0
        return _limit(ordered_limit, self.policy_limit, num_first)

    def hold(self, now: float, seconds: float | None = None) -> None:
        """Limit the batch to its present size; None: for ``force_evict_hold_s`` seconds."""
        self._hold_limit = self._states.num_running_seqs
        self._hold_until_s = now + (
            self._settings.config.force_evict_hold_s if seconds is None else seconds
        )

    def end_hold(self) -> None:
        """The newest order decides: a later ``max_num_seqs`` replaces the hold."""
        self._hold_limit = None

    def ask_policy(self, view: SchedulerView) -> None:
        """Pass the newest readings to the thermal policy, which reads ``view``, and take its limit.

        Once a step, before control requests change anything.
        """
        if self._thermal is not None:
            self.policy_limit = self._thermal.cap(view)

    def victims(
        self, order: str, num_to_evict: int, max_num_seqs: int, policy_limit: int | None, now: float
    ) -> list[SequenceGroup]:
        """The fewest groups, in the victim order ``order``, that a control request preempts.

        They have ``num_to_evict`` or more sequences, and those that are left are within the limit
        under ``max_num_seqs`` and ``policy_limit``, that of the thermal policy.
        """
        ordered_limit = min(max_num_seqs, self._ordered_limit(now))
        left = dict.fromkeys(self._states.running)
        num_left = self._states.num_running_seqs
        num_kept = num_left - num_to_evict
        victims: list[SequenceGroup] = []
        for group in sorted(left, key=victim_order(order)):
            first = next(iter(left))
            if num_left <= min(num_kept, _limit(ordered_limit, policy_limit, first.num_seqs)):
                break
            victims.append(group)
            num_left -= group.num_seqs
            del left[group]
        return victims

    def is_exceeded(self, now: float) -> bool:
        """Whether more sequences run at ``now`` (seconds) than the limits allow."""
        return self._states.num_started_seqs > self.value(now)

    def enforce(self, step: SchedulingStep) -> None:
        """Set the limits of a step; preempt victims so that they hold in this step or the next.

        The first step above the limit only stops admission if a sequence is expected to finish
        before any victim could resume, or if it is scheduled ahead. So the limit holds within two
        steps of its decrease. Groups whose swap-in is not complete count, because they will run;
        once they do, they can be victims.
        """
        step.max_running_seqs = self.value(step.now)
        step.max_group_seqs = self._ordered_limit(step.now)
        policy_limit = None if self._thermal is None else self._thermal.prefill_limit
        limits = (self._settings.config.max_prefill_tokens, policy_limit)
        budget = self._settings.config.max_num_batched_tokens
        most_tokens = min([budget, *(limit for limit in limits if limit is not None)])
        step.max_prefill_tokens = step.prefill_budget = most_tokens
        excess = self._states.num_started_seqs - step.max_running_seqs
        if excess <= 0:
            self._was_exceeded = False
            return
        if step.is_ahead:
            self._was_exceeded = True
            return
        victims = self._policy_victims(excess)
        preempts = any(self._preemptor.beats_waiting(victim, step.now) for victim in victims)
        if not preempts and not self._was_exceeded:
            self._was_exceeded = True
            return
        for victim in victims:
            self._preemptor.preempt(victim, step)

    def warn_if_stalled(self) -> None:
        """Warn, once, if nothing runs because each request is wider than ``max_num_seqs``."""
        states, limit = self._states, self._settings.config.max_num_seqs
        queues = (states.resume_queue, states.waiting)
        is_stalled = (
            bool(states.groups)
            and not states.num_started_seqs
            and not any(queue.first(1, limit) for queue in queues)
        )
        if is_stalled and not self._was_stalled:
            logger.warning(
                "Nothing runs: each of the %d requests has more sequences than the %d that a "
                "control request allows. Raise max_num_seqs, or abort them",
                len(states.groups),
                limit,
            )
        self._was_stalled = is_stalled

    def _ordered_limit(self, now: float) -> int:
        """The limit without that of the thermal policy."""
        if self._hold_limit is None or now >= self._hold_until_s:
            return self._settings.config.max_num_seqs
        return min(self._settings.config.max_num_seqs, self._hold_limit)

    def _policy_victims(self, num_seqs: int) -> list[SequenceGroup]:
        running = list(self._states.running)
        if self._thermal is not None:
            return self._thermal.victims(running, num_seqs)
        return first_victims(victim_order("lru"), running, num_seqs)


def _limit(ordered_limit: int, policy_limit: int | None, num_first_seqs: int) -> int:
    """The running limit; ``num_first_seqs`` are the sequences of the first running group."""
    if policy_limit is None:
        return ordered_limit
    return min(ordered_limit, max(policy_limit, num_first_seqs))
