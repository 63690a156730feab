"""The policy that limits nothing."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy, SchedulerView
from trencadis.scheduler.thermal.victims import Victim, first_victims, lru


class NoThermalPolicy(SchedulerThermalPolicy):
    """Always returns ``max_num_seqs``. The reference for the cost of an idle policy."""

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        return scheduler.scheduler_config.max_num_seqs

    def select_victims(self, running: Sequence[Victim], num_to_evict: int) -> Sequence[Victim]:
        return first_victims(lru, running, num_to_evict)
