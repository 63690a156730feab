"""How many sequences of a host may run, which of them are evicted, and how much it may prefill.

The host is our `Scheduler` or, through `BatchLimiter`, another one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol

from trencadis.scheduler.config import SettingsInForce
from trencadis.scheduler.thermal.guard import ThermalGuard
from trencadis.scheduler.thermal.policy import SchedulerView
from trencadis.scheduler.thermal.victims import VictimT, first_victims, victim_order


class BatchHost(Protocol[VictimT]):
    """A scheduler whose batch is limited."""

    @property
    def running(self) -> Iterable[VictimT]:
        """The requests that run, in the order in which they are served: the first one is the last
        that a thermal policy would have preempted."""

    def preempt(self, victim: VictimT, /) -> None:
        """Take a running request off the device, before this returns. It resumes later."""


class RunningLimit(Generic[VictimT]):
    """The minimum of ``max_num_seqs``, the thermal policy's limit and a hold after an eviction.

    The limit of a thermal policy leaves the first running request alone, whatever its number of
    sequences: one that is wider than the limit could not run at all otherwise. The other two
    limits are orders of an administrator: such a request waits.

    The prefill limit is the minimum of ``max_prefill_tokens``, the thermal policy's and the token
    budget. It is at least 1, so every step with prefill to do computes some of it.

    ``policy_limit`` is the last limit of the thermal policy; None without one.
    """

    def __init__(
        self, settings: SettingsInForce, host: BatchHost[VictimT], thermal: ThermalGuard | None
    ) -> None:
        self.policy_limit: int | None = None
        self._settings = settings
        self._host = host
        self._thermal = thermal
        self._hold_limit: int | None = None
        self._hold_until_s = 0.0

    @property
    def num_running_seqs(self) -> int:
        """The sequences of the running requests."""
        return sum(victim.num_seqs for victim in self._host.running)

    def value(self, now: float) -> int:
        """The maximum number of running sequences at ``now`` (seconds)."""
        limit = self.ordered(now)
        if self.policy_limit is None:
            return limit
        first = next(iter(self._host.running), None)
        return _limit(limit, self.policy_limit, 0 if first is None else first.num_seqs)

    def ordered(self, now: float) -> int:
        """The limit at ``now`` (seconds) without that of the thermal policy."""
        if self._hold_limit is None or now >= self._hold_until_s:
            return self._settings.config.max_num_seqs
        return min(self._settings.config.max_num_seqs, self._hold_limit)

    def prefill_tokens(self) -> int:
        """The most prefill tokens of a step."""
        policy_limit = None if self._thermal is None else self._thermal.prefill_limit
        limits = (self._settings.config.max_prefill_tokens, policy_limit)
        budget = self._settings.config.max_num_batched_tokens
        return min([budget, *(limit for limit in limits if limit is not None)])

    def hold(self, now: float, seconds: float | None = None) -> None:
        """Limit the batch to its present size; None: for ``force_evict_hold_s`` seconds."""
        self._hold_limit = self.num_running_seqs
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
    ) -> list[VictimT]:
        """The fewest requests, in the victim order ``order``, that a control request preempts.

        They have ``num_to_evict`` or more sequences, and those that are left are within the limit
        under ``max_num_seqs`` and ``policy_limit``, that of the thermal policy.
        """
        ordered_limit = min(max_num_seqs, self.ordered(now))
        left = {id(victim): victim for victim in self._host.running}
        num_left = sum(victim.num_seqs for victim in left.values())
        num_kept = num_left - num_to_evict
        victims: list[VictimT] = []
        for victim in sorted(left.values(), key=victim_order(order)):
            first = next(iter(left.values()))
            if num_left <= min(num_kept, _limit(ordered_limit, policy_limit, first.num_seqs)):
                break
            victims.append(victim)
            num_left -= victim.num_seqs
            del left[id(victim)]
        return victims

    def victims_of_policy(self, num_seqs: int) -> list[VictimT]:
        """Requests with ``num_seqs`` or more sequences, as the thermal policy selects them."""
        running = list(self._host.running)
        if self._thermal is not None:
            return self._thermal.victims(running, num_seqs)
        return first_victims(victim_order("lru"), running, num_seqs)


def _limit(ordered_limit: int, policy_limit: int | None, num_first_seqs: int) -> int:
    """The running limit; ``num_first_seqs`` are the sequences of the first running request."""
    if policy_limit is None:
        return ordered_limit
    return min(ordered_limit, max(policy_limit, num_first_seqs))
