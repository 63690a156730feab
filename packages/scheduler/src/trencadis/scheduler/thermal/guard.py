"""Protects the scheduler from the faults of a thermal policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy, SchedulerView, ThermalState
from trencadis.scheduler.thermal.power_model import PowerModel
from trencadis.scheduler.thermal.victims import first_victims, lru

logger = logging.getLogger(__name__)

Alert = Callable[[str], None]


class ThermalGuard:
    """Passes readings to a policy, checks its answers, and disables it on a fault.

    ``read`` returns the newest `ThermalState` without waiting for a sensor. While a sensor is stale
    or failed the cap may fall, but not rise: an unknown device may be hot. A policy is disabled if
    it raises, returns no valid cap, or selects a group that is not running. Then ``alert`` (by
    default an error in the log) gets the reason, and serving continues without a thermal cap.

    ``power_model`` is fitted to the measured power, with or without a policy that uses power.
    """

    def __init__(
        self,
        policy: SchedulerThermalPolicy,
        read: Callable[[], ThermalState],
        alert: Alert = logger.error,
    ) -> None:
        self.policy: SchedulerThermalPolicy | None = policy
        self.power_model = PowerModel()
        self.fault = ""
        self._read = read
        self._alert = alert
        self._cap: int | None = None

    def cap(self, scheduler: SchedulerView) -> int | None:
        """The cap of this step; None without a policy."""
        if self.policy is None:
            return None
        try:
            state = self._read()
            if state.power_w is not None:
                self.power_model.observe(state.power_w, scheduler.num_running_seqs)
                self.policy.on_power_reading(state.power_w)
            if state.hottest_c is not None:
                self.policy.on_temp_reading(0, state.hottest_c)
            cap = max(0, int(self.policy.get_max_running_seqs(scheduler)))
            may_raise = state.may_raise_cap
        except Exception as error:  # whatever a policy raises, serving continues
            self._disable(error)
            return None
        if self._cap is not None and not may_raise:
            cap = min(cap, self._cap)
        self._cap = cap
        return cap

    def victims(self, running: Sequence[SequenceGroup], count: int) -> list[SequenceGroup]:
        """Groups to evict, with ``count`` or more sequences in total: the policy's choice first.

        If the policy selects too few, the least recently scheduled groups follow.
        """
        selected: list[SequenceGroup] = []
        if self.policy is not None:
            try:
                selected = list(dict.fromkeys(self.policy.select_victims(running, count)))
                not_running = [group for group in selected if group not in running]
                if not_running:
                    raise ValueError(
                        f"select_victims returned {not_running[0]!r}, which is not running"
                    )
            except Exception as error:  # as above
                self._disable(error)
                selected = []
        left = count - sum(group.num_seqs for group in selected)
        rest = [group for group in running if group not in selected]
        return selected + first_victims(lru, rest, left)

    def _disable(self, error: Exception) -> None:
        name = type(self.policy).__name__
        self.fault = f"{type(error).__name__}: {error}"
        self.policy = None
        self._cap = None
        self._alert(f"Thermal policy {name} is disabled, serving goes on without it: {self.fault}")
