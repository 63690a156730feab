"""Protects the scheduler from the faults of a thermal policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from trencadis.scheduler.errors import ControlError
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy, SchedulerView, ThermalState
from trencadis.scheduler.thermal.power_model import PowerModel
from trencadis.scheduler.thermal.readings import is_power, is_temperature
from trencadis.scheduler.thermal.victims import first_victims, lru
from trencadis.scheduler.validators import check_instance, is_integer

logger = logging.getLogger(__name__)

Alert = Callable[[str], None]


class ThermalGuard:
    """Passes readings to a policy and checks its answers; a fault of either never ends a step.

    ``read`` returns the newest `ThermalState` without waiting for a sensor. While a sensor is stale
    or failed the cap may fall, but not rise: an unknown device may be hot. The same holds in a step
    with a reading that is no temperature or no power (NaN, for example), which the policy does not
    get.

    If the policy raises, or answers with anything but an integer, its last cap stays (no cap before
    the first one), and it is asked again in the next step. An answer below 1 counts as 1, because a
    cap of 0 would halt serving. Victims that are not running groups are replaced by the least
    recently scheduled ones.

    ``alert`` (by default an error in the log) gets the first fault of each kind. ``num_faults`` and
    ``num_rejected_readings`` count them all.
    ``power_model`` is fitted to the measured power, with or without a policy that uses power.
    Raises `ConfigError` for a policy of another type.
    """

    def __init__(
        self,
        policy: SchedulerThermalPolicy,
        read: Callable[[], ThermalState],
        alert: Alert = logger.error,
    ) -> None:
        check_instance("policy", policy, SchedulerThermalPolicy)
        self.policy = policy
        self.power_model = PowerModel()
        self.num_faults = 0
        self.num_rejected_readings = 0
        self._read = read
        self._alert = alert
        self._cap: int | None = None
        self._faults: dict[str, str] = {}
        self._alerted: set[tuple[str, str]] = set()

    @property
    def fault(self) -> str:
        """Why the last call of a method of the policy failed; empty if none of them did."""
        return next(iter(self._faults.values()), "")

    def cap(self, scheduler: SchedulerView) -> int | None:
        """The cap of this step; None before the first valid one."""
        try:
            may_raise = self._pass_readings(scheduler.num_running_seqs)
            cap = self._checked(self.policy.get_max_running_seqs(scheduler))
        except Exception as error:  # whatever a policy raises, serving continues
            self._report("get_max_running_seqs", error)
            return self._cap
        if cap >= 1:
            self._faults.pop("get_max_running_seqs", None)
        else:
            fault = ValueError(f"the limit must be at least 1, got {cap}")
            self._report("get_max_running_seqs", fault)
            cap = 1
        if self._cap is None or may_raise or cap < self._cap:
            self._cap = cap
        return self._cap

    def victims(self, running: Sequence[SequenceGroup], count: int) -> list[SequenceGroup]:
        """Groups to evict, with ``count`` or more sequences in total: the policy's choice first.

        If the policy selects too few, the least recently scheduled groups follow.
        """
        try:
            # No more than all groups and one: an iterator without end must not end the step.
            victims = self.policy.select_victims(running, count)
            selected = list(dict.fromkeys(islice(victims, len(running) + 1)))
            for group in selected:
                if group not in running:
                    raise ValueError(f"a victim must be a running group, got {group!r}")
            self._faults.pop("select_victims", None)
        except Exception as error:  # as above
            self._report("select_victims", error)
            selected = []
        left = count - sum(group.num_seqs for group in selected)
        rest = [group for group in running if group not in selected]
        return selected + first_victims(lru, rest, left)

    def retarget(self, target_temp_c: float) -> None:
        """Set a new target temperature, degrees C. Raises `ControlError` if the policy cannot."""
        name = type(self.policy).__name__
        try:
            is_set = bool(self.policy.retarget(target_temp_c))
        except Exception as error:  # as above
            self._report("retarget", error)
            raise ControlError(
                f"{name} could not set its target temperature to {target_temp_c} "
                f"({_describe(error)}): correct the policy, or set max_num_seqs",
                "target_temp_c",
            ) from error
        self._faults.pop("retarget", None)
        if not is_set:
            raise ControlError(
                f"{name} has no target temperature to set to {target_temp_c}: "
                "use the proportional policy, or set max_num_seqs",
                "target_temp_c",
            )

    def _pass_readings(self, num_running: int) -> bool:
        """Pass the newest readings to the policy. Returns whether the cap may rise."""
        state = self._read()
        power_w, temp_c = state.power_w, state.hottest_c
        is_plausible = True
        if power_w is not None:
            if is_power(power_w):
                self.power_model.observe(power_w, num_running)
                self.policy.on_power_reading(power_w)
            else:
                is_plausible = self._reject("power", power_w, "watts")
        if temp_c is not None:
            if is_temperature(temp_c):
                self.policy.on_temp_reading(0, temp_c)
            else:
                is_plausible = self._reject("temperature", temp_c, "degrees C")
        return is_plausible and bool(state.may_raise_cap)

    def _reject(self, kind: str, value: Any, unit: str) -> bool:
        """Count a reading that is not plausible, and alert to the first of its kind. False."""
        self.num_rejected_readings += 1
        self._alert_once(
            (kind, ""),
            f"A {kind} of {value!r} {unit} is not plausible. Such readings are ignored, and the "
            "running limit does not rise with them: check the sensor",
        )
        return False

    def _checked(self, answer: Any) -> int:
        """The answer of a policy as an integer. Raises `TypeError` if it is none."""
        if not is_integer(answer):
            raise TypeError(f"the limit must be an integer, got {answer!r}")
        return int(answer)

    def _report(self, method: str, error: Exception) -> None:
        """Count a fault of the policy, and alert to the first of its kind."""
        self.num_faults += 1
        self._faults[method] = _describe(error)
        limit = "no limit" if self._cap is None else f"its last limit of {self._cap}"
        self._alert_once(
            (method, type(error).__name__),
            f"Thermal policy {type(self.policy).__name__} failed in {method} ({_describe(error)}). "
            f"Serving goes on with {limit}. Further faults of this kind are only counted",
        )

    def _alert_once(self, kind: tuple[str, str], message: str) -> None:
        if kind not in self._alerted:
            self._alerted.add(kind)
            self._alert(message)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
