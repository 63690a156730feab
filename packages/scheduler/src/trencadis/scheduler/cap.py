"""How many sequences may run, and who goes when more do.

Lowering ``max_num_seqs`` alone stops nobody who runs already (seed 003, section 2): a cap counts
only because groups are evicted until it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trencadis.scheduler.batch import StepBuilder
from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.control import BatchControl, BatchControlResult
from trencadis.scheduler.errors import ConfigError, ControlError
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.ledger import Ledger
from trencadis.scheduler.preemption import Preemptor
from trencadis.scheduler.thermal.guard import ThermalGuard
from trencadis.scheduler.thermal.policy import SchedulerView
from trencadis.scheduler.thermal.power_model import PRIOR_W
from trencadis.scheduler.thermal.victims import first_victims, victim_order


class RunningCap:
    """The least of the operator's bound, the thermal policy's and a forced eviction's hold.

    ``config`` is what is in force: its ``max_num_seqs`` follows the operator.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        ledger: Ledger,
        preemptor: Preemptor,
        guard: ThermalGuard | None,
    ) -> None:
        self.config = config
        self._ledger = ledger
        self._preemptor = preemptor
        self._guard = guard
        self._most = config.max_num_batched_tokens
        self._thermal: int | None = None
        self._hold_seats: int | None = None
        self._hold_until_s = 0.0
        self._was_over = False

    def value(self, now: float) -> int:
        """The cap at ``now``."""
        if self._hold_seats is not None and now >= self._hold_until_s:
            self._hold_seats = None
        bounds = (self.config.max_num_seqs, self._thermal, self._hold_seats)
        return min(bound for bound in bounds if bound is not None)

    def read(self, view: SchedulerView) -> None:
        """Ask the thermal policy."""
        self._thermal = None if self._guard is None else self._guard.cap(view)

    def enforce(self, step: StepBuilder) -> None:
        """Evict until the cap is kept, in this step or in the next.

        A first step over the cap may pass with admissions held, where a sequence is expected to
        end sooner than a victim could return; after that victims go. So the cap is kept within
        two steps of the reading that lowered it.
        """
        excess = self._ledger.running_seats - step.cap
        if excess <= 0:
            self._was_over = False
            return
        victims = self._victims(excess)
        waits = not any(self._preemptor.is_worth_it(one, step.now) for one in victims)
        if waits and not self._was_over:
            self._was_over = True
            return
        for group in victims:
            self._preemptor.evict(group, step)

    def evict(self, groups: Sequence[SequenceGroup], step: StepBuilder) -> None:
        """Evict these, and keep the batch at the size that this leaves for a while."""
        for group in groups:
            self._preemptor.evict(group, step)
        if groups:
            self._hold_seats = self._ledger.running_seats
            self._hold_until_s = step.now + self.config.evict_hold_s

    def obey(self, order: BatchControl, step: StepBuilder) -> BatchControlResult:
        """Carry an order out, or say what it would do. Raises `ConfigError`, `ControlError`."""
        limit = self._checked_limit(order)
        before = self._ledger.running_seats
        victims = self._ordered_out(order, limit, step)
        if not order.dry_run:
            self._retarget(order)
            self.config = attrs.evolve(self.config, max_num_seqs=limit)
            if order.force_evict and order.max_num_seqs is None:
                self.evict(victims, step)
            else:
                for group in victims:
                    self._preemptor.evict(group, step)
        gone = sum(group.seats for group in victims)
        return BatchControlResult(
            previous_running=before,
            new_running=before - gone,
            evicted_request_ids=tuple(group.request_id for group in victims),
            estimated_watts_saved=gone * self._watts_per_sequence(),
            new_max_num_seqs=limit,
        )

    def _ordered_out(
        self, order: BatchControl, limit: int, step: StepBuilder
    ) -> list[SequenceGroup]:
        cap = min(limit, self.value(step.now))
        count = max(order.force_evict or 0, self._ledger.running_seats - cap)
        return first_victims(victim_order(order.policy), list(self._ledger.running), count)

    def _checked_limit(self, order: BatchControl) -> int:
        limit = self.config.max_num_seqs if order.max_num_seqs is None else order.max_num_seqs
        if limit > self._most:
            raise ConfigError(
                f"max_num_seqs {limit} is above max_num_batched_tokens {self._most}, so a full "
                "decode batch would not fit in a step: lower the first"
            )
        if order.target_temp_c is not None and (self._guard is None or self._guard.policy is None):
            raise ControlError(
                f"target_temp_c {order.target_temp_c} needs a thermal policy and there is none "
                "in service: start with one, or give max_num_seqs"
            )
        return limit

    def _retarget(self, order: BatchControl) -> None:
        if order.target_temp_c is None or self._guard is None or self._guard.policy is None:
            return
        if not self._guard.policy.retarget(order.target_temp_c):
            raise ControlError(
                f"{type(self._guard.policy).__name__} has no target temperature to set to "
                f"{order.target_temp_c}: use the proportional policy, or give max_num_seqs"
            )

    def _victims(self, count: int) -> list[SequenceGroup]:
        running = list(self._ledger.running)
        if self._guard is not None:
            return self._guard.victims(running, count)
        return first_victims(victim_order("lru"), running, count)

    def _watts_per_sequence(self) -> float:
        return PRIOR_W if self._guard is None else self._guard.power_model.per_sequence_w
