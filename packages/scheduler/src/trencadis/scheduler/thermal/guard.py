"""Stands between the scheduler and a thermal policy that somebody else may have written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy, SchedulerView, ThermalState
from trencadis.scheduler.thermal.victims import first_victims, lru
from trencadis.scheduler.thermal.watts import WattsModel

logger = logging.getLogger(__name__)

Alert = Callable[[str], None]


class ThermalGuard:
    """Feeds a policy its readings, bounds what it answers and outlives its faults.

    ``read`` gives the newest `ThermalState` at once, without waiting for a sensor. While a sensor
    is stale or failing the cap may fall and does not rise: what is not seen may be hot. A policy
    that raises, or answers with what is no cap or no running group, is disabled: ``alert`` (by
    default an error in the log) is told why, and serving goes on without a thermal cap.

    ``watts`` is learned here, from the measured power, for whoever wants to know.
    """

    def __init__(
        self,
        policy: SchedulerThermalPolicy,
        read: Callable[[], ThermalState],
        alert: Alert = logger.error,
    ) -> None:
        self.policy: SchedulerThermalPolicy | None = policy
        self.watts = WattsModel()
        self.fault = ""
        self._read = read
        self._alert = alert
        self._cap: int | None = None

    def cap(self, scheduler: SchedulerView) -> int | None:
        """The cap of this step; None for none."""
        if self.policy is None:
            return None
        try:
            state = self._read()
            if state.power_w is not None:
                self.watts.learn(state.power_w, scheduler.num_running_seqs)
                self.policy.on_power_reading(state.power_w)
            if state.hottest_c is not None:
                self.policy.on_temp_reading(0, state.hottest_c)
            cap = max(0, int(self.policy.get_max_running_seqs(scheduler)))
            trusted = state.may_raise_cap
        except Exception as error:  # whatever a policy raises, serving goes on
            self._disable(error)
            return None
        if self._cap is not None and not trusted:
            cap = min(cap, self._cap)
        self._cap = cap
        return cap

    def victims(self, running: Sequence[SequenceGroup], count: int) -> list[SequenceGroup]:
        """Running groups with ``count`` sequences between them, the policy's choice first."""
        chosen: list[SequenceGroup] = []
        if self.policy is not None:
            try:
                chosen = list(dict.fromkeys(self.policy.select_victims(running, count)))
                strangers = [group for group in chosen if group not in running]
                if strangers:
                    raise ValueError(
                        f"select_victims returned {strangers[0]!r}, which is not running"
                    )
            except Exception as error:  # as above
                self._disable(error)
                chosen = []
        left = count - sum(group.num_seqs for group in chosen)
        rest = [group for group in running if group not in chosen]
        return chosen + first_victims(lru, rest, left)

    def _disable(self, error: Exception) -> None:
        name = type(self.policy).__name__
        self.fault = f"{type(error).__name__}: {error}"
        self.policy = None
        self._cap = None
        self._alert(f"Thermal policy {name} is disabled, serving goes on without it: {self.fault}")
