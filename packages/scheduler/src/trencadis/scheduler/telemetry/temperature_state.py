"""What a policy sees: the temperature to act on, and how reliable it is."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import attrs

from trencadis.scheduler.telemetry.config import ReaderConfig
from trencadis.scheduler.telemetry.plausibility import NO_DEVICE, DeviceRecord


class Health(IntEnum):
    """The reliability of a temperature. A larger value is worse, so that the worst is a maximum."""

    FRESH = 0
    STALE = 1
    FAILED = 2


@attrs.frozen
class DeviceState:
    """The state of one device. ``temperature_c`` is None before its first accepted reading.

    ``effective_c``: the temperature that the device counts with, degrees C; see `TemperatureState`.
    """

    device: int
    health: Health
    temperature_c: float | None
    power_w: float | None
    age_s: float
    fault: str
    effective_c: float | None = None


@attrs.frozen
class TemperatureState:
    """The state of all devices at one moment. Pass it to a policy at the top of a step.

    - ``health``: that of the worst device.
    - ``hottest_c``: the temperature to act on, degrees C. The maximum over the devices: a FRESH
      device counts with its reading, a STALE one with its last reading, a FAILED one with
      ``ReaderConfig.assumed_hot_c``. None before the first reading; then leave the cap unchanged.
    - ``age_s``: the age of the oldest accepted reading, seconds.
    - ``fault``: the fault of the worst device; empty if there is none.

    Pass ``hottest_c`` to the policy if it is not None, and raise the cap only if
    ``may_raise_cap``. Then a stale sensor can still lower the cap (another device may be hot) but
    never raise it, and a failed sensor throttles.
    """

    health: Health
    hottest_c: float | None
    age_s: float
    fault: str
    devices: tuple[DeviceState, ...] = ()

    @property
    def may_raise_cap(self) -> bool:
        """Whether every device is FRESH, so that more load is safe."""
        return self.health is Health.FRESH

    @property
    def temperatures_c(self) -> dict[int, float]:
        """The temperature that each device counts with, degrees C, where it is known."""
        return {
            device.device: device.effective_c
            for device in self.devices
            if device.effective_c is not None
        }

    @property
    def power_w(self) -> float | None:
        """Sum over all devices, watts; None unless every device is FRESH and measures power."""
        known = [
            device.power_w
            for device in self.devices
            if device.power_w is not None and device.health is Health.FRESH
        ]
        return sum(known) if known and len(known) == len(self.devices) else None


def assess(
    records: Sequence[DeviceRecord], now_s: float, config: ReaderConfig, clock_fault: str = ""
) -> TemperatureState:
    """The state at ``now_s``. With a ``clock_fault`` every device is at least STALE."""
    devices = tuple(_assess_device(record, now_s, config, clock_fault) for record in records)
    known = [device.effective_c for device in devices if device.effective_c is not None]
    worst = max(devices, key=lambda device: (device.health, device.age_s))
    return TemperatureState(
        health=worst.health,
        hottest_c=max(known, default=None),
        age_s=max(device.age_s for device in devices),
        fault=_fault_of_worst(worst),
        devices=tuple(device for device in devices if device.device != NO_DEVICE),
    )


def _assess_device(
    record: DeviceRecord, now_s: float, config: ReaderConfig, clock_fault: str
) -> DeviceState:
    age_s = max(0.0, now_s - record.accepted_at_s)
    if age_s > config.failed_after_s:
        health = Health.FAILED
    elif age_s > config.stale_after_s or record.accepted is None or clock_fault:
        health = Health.STALE
    else:
        health = Health.FRESH
    fault = ""
    if health is not Health.FRESH:
        fault = record.fault or clock_fault or f"no reading for {age_s:.1f} s"
    temperature_c = record.accepted.temperature_c if record.accepted else None
    return DeviceState(
        device=record.device,
        health=health,
        temperature_c=temperature_c,
        power_w=record.accepted.power_w if record.accepted else None,
        age_s=age_s,
        fault=fault,
        effective_c=_effective_c(health, temperature_c, config),
    )


def _fault_of_worst(worst: DeviceState) -> str:
    if not worst.fault or worst.device == NO_DEVICE:
        return worst.fault
    return f"device {worst.device}: {worst.fault}"


def _effective_c(health: Health, temperature_c: float | None, config: ReaderConfig) -> float | None:
    """The temperature that a device counts with; None if it is unknown."""
    if health is not Health.FAILED:
        return temperature_c
    if temperature_c is None:
        return config.assumed_hot_c
    return max(config.assumed_hot_c, temperature_c)
