"""What a policy sees: the temperature to act on, and how far to trust it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import attrs

from trencadis.scheduler.telemetry.config import ReaderConfig
from trencadis.scheduler.telemetry.judgement import NO_DEVICE, KnownDevice

ABSOLUTE_ZERO_C = -273.15
"""Stands for "unknown" where only numbers can travel: no temperature lies below it."""


class Health(IntEnum):
    """How far a temperature can be trusted; the larger, the worse, so that the worst is a max."""

    FRESH = 0
    STALE = 1
    FAILED = 2


@attrs.frozen
class DeviceState:
    """One device. ``temperature_c`` is None only before its first believed reading."""

    device: int
    health: Health
    temperature_c: float | None
    power_w: float | None
    age_s: float
    fault: str


@attrs.frozen
class TemperatureState:
    """All devices at one moment; hand it to a policy at the top of a step.

    ``hottest_c`` is the temperature to act on, in degrees C: the hottest over the devices, where a
    FRESH device counts as it reads, a STALE one as it last read and a FAILED one as
    ``assumed_hot_c``. It is None only while nothing has been read yet; then hold the cap as it is.
    ``health`` is the worst device's, ``age_s`` the oldest believed reading's, ``fault`` the worst
    device's reason in words ("" when all is well).

    The rule for a policy's caller: feed it ``hottest_c`` when there is one, and let the cap rise
    only where ``may_raise_cap``. So a stale sensor can still cut (another device may be hot)
    but never loosens, and a failed one throttles.
    """

    health: Health
    hottest_c: float | None
    age_s: float
    fault: str
    devices: tuple[DeviceState, ...] = ()

    @property
    def may_raise_cap(self) -> bool:
        """Whether every device was read a moment ago, so that more load is a safe decision."""
        return self.health is Health.FRESH

    @property
    def power_w(self) -> float | None:
        """Watts of all devices together; None unless each of them is fresh and measures it."""
        known = [
            device.power_w
            for device in self.devices
            if device.power_w is not None and device.health is Health.FRESH
        ]
        return sum(known) if known and len(known) == len(self.devices) else None


def assess(
    known: Sequence[KnownDevice], now_s: float, config: ReaderConfig, doubt: str = ""
) -> TemperatureState:
    """The state at ``now_s``. A ``doubt`` about the clock makes every device at least stale."""
    devices = tuple(_assess_device(device, now_s, config, doubt) for device in known)
    felt = [value for value in (_felt_c(device, config) for device in devices) if value is not None]
    worst = max(devices, key=lambda device: (device.health, device.age_s))
    return TemperatureState(
        health=worst.health,
        hottest_c=max(felt, default=None),
        age_s=max(device.age_s for device in devices),
        fault=_worst_fault(worst),
        devices=tuple(device for device in devices if device.device != NO_DEVICE),
    )


def hottest_of_group(
    state: TemperatureState, all_reduce_max: Callable[[list[float]], Sequence[float]]
) -> TemperatureState:
    """``state`` with the hottest temperature and the worst health of a tensor-parallel group.

    Every layer waits for the slowest device, so one hot device makes the whole group hot (seed
    003, 4.1.3). ``all_reduce_max`` takes this rank's numbers (degrees C, a `Health`, seconds) and
    returns the element-wise maximum over the ranks. It is a collective: call this on every rank
    in every step, from the thread that runs the group's other collectives, and use float32, which
    holds them; never in the reader's thread, where ranks would meet in different orders. What it
    raises is the group's failure, not a sensor's, and is passed on.
    """
    own_c = ABSOLUTE_ZERO_C if state.hottest_c is None else state.hottest_c
    hottest_c, worst, oldest_s = all_reduce_max([own_c, float(state.health), state.age_s])
    health = Health(round(worst))
    fault = state.fault
    if health > state.health:
        fault = f"another rank's sensors are {health.name.lower()}"
    # Half a degree of room, since the unknown may come back rounded.
    unknown = hottest_c < ABSOLUTE_ZERO_C + 0.5
    return attrs.evolve(
        state,
        health=health,
        hottest_c=None if unknown else float(hottest_c),
        age_s=float(oldest_s),
        fault=fault,
    )


def _assess_device(
    known: KnownDevice, now_s: float, config: ReaderConfig, doubt: str
) -> DeviceState:
    age_s = max(0.0, now_s - known.believed_at_s)
    if age_s > config.failed_after_s:
        health = Health.FAILED
    elif age_s > config.stale_after_s or known.believed is None or doubt:
        health = Health.STALE
    else:
        health = Health.FRESH
    return DeviceState(
        device=known.device,
        health=health,
        temperature_c=known.believed.temperature_c if known.believed else None,
        power_w=known.believed.power_w if known.believed else None,
        age_s=age_s,
        fault=_reason(known, health, age_s, doubt),
    )


def _reason(known: KnownDevice, health: Health, age_s: float, doubt: str) -> str:
    if health is Health.FRESH:
        return ""
    return known.fault or doubt or f"no reading for {age_s:.1f} s"


def _worst_fault(worst: DeviceState) -> str:
    if not worst.fault or worst.device == NO_DEVICE:
        return worst.fault
    return f"device {worst.device}: {worst.fault}"


def _felt_c(device: DeviceState, config: ReaderConfig) -> float | None:
    if device.health is not Health.FAILED:
        return device.temperature_c
    if device.temperature_c is None:
        return config.assumed_hot_c
    return max(config.assumed_hot_c, device.temperature_c)
