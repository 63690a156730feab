"""Protects the scheduler from the faults of a thermal policy."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Protocol

from trencadis.scheduler.errors import ConfigError, ControlError
from trencadis.scheduler.thermal.continued_view import ContinuedView
from trencadis.scheduler.thermal.policy import (
    GROUP_DEVICE,
    SchedulerThermalPolicy,
    SchedulerView,
    ThermalState,
)
from trencadis.scheduler.thermal.power_model import PowerModel
from trencadis.scheduler.thermal.proportional import ProportionalThermalPolicy
from trencadis.scheduler.thermal.readings import is_power, is_temperature
from trencadis.scheduler.thermal.victims import VictimT, first_victims, lru, victim_order
from trencadis.scheduler.validators import instance_of, is_integer

logger = logging.getLogger(__name__)

Alert = Callable[[str], None]


_READ = "read"


class Forget(Protocol):
    """Drops a device that does not answer, as `TemperatureReader.forget`."""

    def __call__(self, device: int, *, dry_run: bool = False) -> None: ...


class ThermalGuard:
    """Passes readings to a policy and checks its answers; no fault of them ends a step.

    ``read`` returns the newest `ThermalState` without waiting for a sensor. While a sensor is stale
    or failed the cap may fall, but not rise: an unknown device may be hot. The same holds in a step
    with a reading that is not a temperature or a power (NaN, for example), which the policy does
    not get.

    If the policy raises, or answers with anything but an integer, its last cap stays (no cap before
    the first one), and it is asked again in the next step. An answer below 1 counts as 1, because a
    cap of 0 would halt serving. The same holds for ``prefill_limit``, the most prefill tokens of a
    step, which may also be None, for no limit. Victims that are not running groups are replaced by
    the least recently scheduled ones.

    Without a policy (None) nothing is limited until a control request names a target temperature.
    That starts a control loop, a `ProportionalThermalPolicy`, which ends once it limits nothing and
    the hottest device is below the target by the hysteresis. Where the policy has no target that
    can be set, the control loop runs beside it and the lower cap holds.

    ``forget`` is called for a control request that drops a device; None: there can be none.
    ``alert`` (by default an error in the log) gets the first fault of each kind. ``num_faults`` and
    ``num_rejected_readings`` count them all.
    ``power_model`` is fitted to the measured power, with or without a policy that uses power.
    Raises `ConfigError` for a policy of another type, and for what is not a function.
    """

    def __init__(
        self,
        policy: SchedulerThermalPolicy | None,
        read: Callable[[], ThermalState],
        alert: Alert = logger.error,
        forget: Forget | None = None,
    ) -> None:
        if policy is not None:
            instance_of(SchedulerThermalPolicy).checked("policy", policy)
        for name, function in (("read", read), ("alert", alert), ("forget", forget)):
            if not callable(function) and (name, function) != ("forget", None):
                raise ConfigError(f"{name} must be a function, got {function!r}: pass one", name)
        self.policy = policy
        self.power_model = PowerModel()
        self.num_faults = 0
        self.num_rejected_readings = 0
        self._read = read
        self._alert = alert
        self._forget = forget
        self._cap: int | None = None
        self._loop_cap: int | None = None
        self._prefill_limit: int | None = None
        self._state: ThermalState | None = None
        self._view = ContinuedView()
        self._may_raise = False
        self._control_loop: ProportionalThermalPolicy | None = None
        self._victim_order: str | None = None
        self._faults: dict[str, str] = {}
        self._alerted: set[tuple[str, str]] = set()

    @property
    def fault(self) -> str:
        """Why the last call of the policy or of ``read`` failed; empty if none of them did."""
        return next(iter(self._faults.values()), "")

    @property
    def runs_control_loop(self) -> bool:
        """Whether the control loop of a control request limits, too."""
        return self._control_loop is not None

    @property
    def prefill_limit(self) -> int | None:
        """The most prefill tokens of this step; None where the policy does not limit them."""
        return self._prefill_limit

    @property
    def target_temp_c(self) -> float | None:
        """The target temperature in force, degrees C; None without one.

        The lower one of the policy's and the control loop's.
        """
        targets = (getattr(rule, "target_temp_c", None) for rule in self._policies)
        return min((float(target) for target in targets if is_temperature(target)), default=None)

    @property
    def power_budget_w(self) -> float | None:
        """The power budget of the policy, watts; None without one."""
        budgets = (getattr(rule, "budget_w", None) for rule in self._policies)
        return min((float(budget) for budget in budgets if is_power(budget)), default=None)

    def cap(self, scheduler: SchedulerView) -> int | None:
        """The cap of this step; None where nothing has limited it yet."""
        scheduler = self._view.of(scheduler)
        method = _READ
        try:
            self._state = state = self._read()
            self._faults.pop(_READ, None)
            method = "get_max_running_seqs"
            self._may_raise = self._pass_readings(state, scheduler.num_running_seqs)
        except Exception as error:  # whatever a sensor or a policy raises, serving continues
            self._report(method, error)
            self._may_raise = False
            self._ask_loop(scheduler)
            return self._lower_cap()
        self._ask_policy(scheduler)
        self._ask_loop(scheduler)
        loop = self._control_loop
        if loop is not None and loop.is_below_target and self._may_raise:
            logger.info("The control loop ends: all devices are below %g C", loop.target_temp_c)
            self._control_loop = self._loop_cap = self._victim_order = None
        return self._lower_cap()

    def retarget(
        self, target_temp_c: float, victims: str, scheduler: SchedulerView, *, dry_run: bool = False
    ) -> int | None:
        """Set a new target temperature, degrees C; returns the cap under it.

        Of the policy, or of a control loop where it has none that can be set. ``victims`` is the
        victim order from now on. A dry run asks copies (`copy.deepcopy`) and changes nothing.
        Raises `ControlError` if the policy fails, or cannot be copied for a dry run, and
        `ConfigError` for an unknown victim order.
        """
        victim_order(victims)
        scheduler = self._view.of(scheduler)
        policy, loop, is_set = self.policy, self._control_loop, False
        if policy is not None and _has_target(policy):
            policy = self._copied(policy, target_temp_c) if dry_run else policy
            is_set = self._set_target(policy, target_temp_c, counts=not dry_run)
        if is_set:
            loop = None  # the newest order decides
        elif loop is None:
            loop = self._new_control_loop(target_temp_c)
        else:
            loop = copy.deepcopy(loop) if dry_run else loop
            loop.retarget(target_temp_c)
        if dry_run:
            cap, loop_cap = self._cap, None
            if policy is not None and is_set:
                cap = self._cap_of(policy, scheduler, cap, _ignore)
            if loop is not None:
                loop_cap = self._cap_of(loop, scheduler, self._loop_cap, _ignore)
            return _lower(cap, loop_cap)
        if loop is not None and loop is not self._control_loop:
            logger.info("A control loop starts: target %g C", target_temp_c)
        self._control_loop, self._victim_order = loop, victims
        self._loop_cap = None if loop is None else self._loop_cap
        if is_set:
            self._ask_policy(scheduler)
        self._ask_loop(scheduler)
        return self._lower_cap()

    def forget(self, device: int, *, dry_run: bool = False) -> None:
        """Drop a device that does not answer. Raises `ControlError` for one that cannot be."""
        if self._forget is None:
            raise ControlError(
                f"device {device} cannot be forgotten: the readings have no source that can do so",
                "forget_device",
            )
        try:
            self._forget(device, dry_run=dry_run)
        except ConfigError as error:
            raise ControlError(str(error), "forget_device") from error

    def victims(self, running: Sequence[VictimT], count: int) -> list[VictimT]:
        """Groups to evict, with ``count`` or more sequences in total: the policy's choice first.

        The choice is that of the victim order that came with the last target of a control request,
        if there was one. If the policy selects too few, the least recently scheduled groups follow.
        """
        if self.policy is None or self._victim_order is not None:
            return first_victims(victim_order(self._victim_order or "lru"), running, count)
        selected: dict[int, VictimT] = {}
        try:
            # A copy, because a policy may sort the list that it gets. No more than all requests and
            # one: an iterator without end must not end the step.
            victims = self.policy.select_victims(list(running), count)
            known = {id(group): group for group in running}
            for group in islice(victims, len(running) + 1):
                if id(group) not in known:
                    raise ValueError(f"a victim must be a running group, got {group!r}")
                selected[id(group)] = known[id(group)]
            self._faults.pop("select_victims", None)
        except Exception as error:  # as above
            self._report("select_victims", error)
            selected = {}
        left = count - sum(group.num_seqs for group in selected.values())
        rest = [group for group in running if id(group) not in selected]
        return [*selected.values(), *first_victims(lru, rest, left)]

    @property
    def _policies(self) -> list[SchedulerThermalPolicy]:
        """What limits now, the control loop first: a fault of the policy must not stop it."""
        return [rule for rule in (self._control_loop, self.policy) if rule is not None]

    def _lower_cap(self) -> int | None:
        return _lower(self._cap, self._loop_cap)

    def _ask_policy(self, scheduler: SchedulerView) -> None:
        if self.policy is None:
            self._cap = self._prefill_limit = None
            return
        self._cap = self._cap_of(self.policy, scheduler, self._cap, self._report)
        self._prefill_limit = self._prefill_limit_of(self.policy, scheduler)

    def _ask_loop(self, scheduler: SchedulerView) -> None:
        if self._control_loop is not None:
            self._loop_cap = self._cap_of(self._control_loop, scheduler, self._loop_cap, _ignore)

    def _new_control_loop(self, target_temp_c: float) -> ProportionalThermalPolicy:
        """A control loop that has seen the readings of this step."""
        loop = ProportionalThermalPolicy(target_temp_c=target_temp_c)
        if self._state is not None:
            for device, temp_c in _temperatures(self._state):
                loop.on_temp_reading(device, temp_c)  # which ignores what is not a temperature
        return loop

    def _copied(
        self, policy: SchedulerThermalPolicy, target_temp_c: float
    ) -> SchedulerThermalPolicy:
        try:
            return copy.deepcopy(policy)
        except Exception as error:  # whatever its attributes raise
            raise ControlError(
                f"what target_temp_c {target_temp_c} would do is unknown: {type(policy).__name__} "
                f"cannot be copied ({_describe(error)}): give it a __deepcopy__ method, or leave "
                "out dry_run",
                "target_temp_c",
            ) from error

    def _set_target(
        self, policy: SchedulerThermalPolicy, target_temp_c: float, *, counts: bool
    ) -> bool:
        """False if the policy has no target that can be set. Raises `ControlError` if it fails.

        ``counts``: its exception is a fault.
        """
        name = type(policy).__name__
        try:
            is_set = bool(policy.retarget(target_temp_c))
        except Exception as error:  # as above
            if counts:
                self._report("retarget", error)
            raise ControlError(
                f"{name} could not set its target temperature to {target_temp_c} "
                f"({_describe(error)}): correct the policy, or set max_num_seqs",
                "target_temp_c",
            ) from error
        if counts:
            self._faults.pop("retarget", None)
        return is_set

    def _cap_of(
        self,
        policy: SchedulerThermalPolicy,
        scheduler: SchedulerView,
        last: int | None,
        report: Callable[[str, Exception], None],
    ) -> int | None:
        """The cap that a policy allows now; the ``last`` one if its answer is none."""
        try:
            cap = self._checked(policy.get_max_running_seqs(scheduler))
        except Exception as error:  # as above
            report("get_max_running_seqs", error)
            return last
        if cap < 1:
            report("get_max_running_seqs", ValueError(f"the limit must be at least 1, got {cap}"))
            cap = 1
        elif report == self._report:
            self._faults.pop("get_max_running_seqs", None)
        may_change = last is None or self._may_raise or cap < last
        return cap if may_change else last

    def _prefill_limit_of(
        self, policy: SchedulerThermalPolicy, scheduler: SchedulerView
    ) -> int | None:
        """The prefill limit that a policy wants now; the last one if its answer is none."""
        last = self._prefill_limit
        try:
            answer = policy.get_max_prefill_tokens(scheduler)
            limit = None if answer is None else self._checked(answer)
        except Exception as error:  # as above
            self._report("get_max_prefill_tokens", error)
            return last
        if limit is not None and limit < 1:
            fault = ValueError(f"the limit must be at least 1, got {limit}")
            self._report("get_max_prefill_tokens", fault)
            limit = 1
        else:
            self._faults.pop("get_max_prefill_tokens", None)
        is_rise = last is not None and (limit is None or limit > last)
        return last if is_rise and not self._may_raise else limit

    def _pass_readings(self, state: ThermalState, num_running: int) -> bool:
        """Pass readings to what limits. Returns whether the cap may rise."""
        power_w = state.power_w
        is_plausible = True
        if power_w is not None:
            if is_power(power_w):
                self.power_model.observe(power_w, num_running)
            else:
                is_plausible = self._reject("power", power_w, "watts")
                power_w = None
        temperatures: list[tuple[int, float]] = []
        for device, temp_c in _temperatures(state):
            if is_temperature(temp_c):
                temperatures.append((device, temp_c))
            else:
                is_plausible = self._reject("temperature", temp_c, "degrees C")
        for policy in self._policies:
            if power_w is not None:
                policy.on_power_reading(power_w)
            for device, temp_c in temperatures:
                policy.on_temp_reading(device, temp_c)
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
        """Count a fault of the policy or of ``read``, and alert to the first of its kind."""
        self.num_faults += 1
        self._faults[method] = _describe(error)
        limit = "no limit" if self._cap is None else f"its last limit of {self._cap}"
        self._alert_once(
            (method, type(error).__name__),
            f"{_subject(self.policy, method)} ({_describe(error)}). "
            f"Serving goes on with {limit}. Further faults of this kind are only counted",
        )

    def _alert_once(self, kind: tuple[str, str], message: str) -> None:
        if kind not in self._alerted:
            self._alerted.add(kind)
            try:
                self._alert(message)
            except Exception:  # the step goes on, and the message is not lost
                logger.exception("The alert function failed. The alert was: %s", message)


def _subject(policy: SchedulerThermalPolicy | None, method: str) -> str:
    if method == _READ:
        return "The sensors cannot be read"
    return f"Thermal policy {type(policy).__name__} failed in {method}"


def _lower(cap: int | None, other: int | None) -> int | None:
    """The lower of two limits, each None for no limit."""
    return min((limit for limit in (cap, other) if limit is not None), default=None)


def _has_target(policy: SchedulerThermalPolicy) -> bool:
    """Whether the policy's class has a `retarget` of its own."""
    return type(policy).retarget is not SchedulerThermalPolicy.retarget


def _ignore(method: str, error: Exception) -> None:
    """In place of a report: of a dry run, and of the control loop, which has no faults."""


def _temperatures(state: ThermalState) -> list[tuple[int, Any]]:
    """Device and temperature, degrees C, of all devices, the hottest last, and values that are not
    a temperature first."""
    hottest_c = state.hottest_c
    if hottest_c is None:
        return []
    readings: list[tuple[int, Any]] = list(state.temperatures_c.items())
    valid = sorted((item for item in readings if is_temperature(item[1])), key=itemgetter(1))
    invalid = [item for item in readings if not is_temperature(item[1])]
    if not is_temperature(hottest_c):
        invalid.append((GROUP_DEVICE, hottest_c))
    elif not valid:
        valid.append((0, hottest_c))
    elif hottest_c > valid[-1][1]:
        valid.append((GROUP_DEVICE, hottest_c))
    return invalid + valid


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
