"""Plausibility checks of readings: pure functions that return an updated `DeviceRecord`.

Nothing here raises, sleeps or reads a clock. A rejected reading changes only the fault. The last
accepted reading stays and ages; `temperature_state` derives the health from its age.
"""

from __future__ import annotations

import math
from typing import Any

import attrs

from trencadis.scheduler.telemetry.config import ReaderConfig
from trencadis.scheduler.telemetry.source import Reading
from trencadis.scheduler.validators import is_integer, is_number

NO_DEVICE = -1
"""The device of the only record until a source has shown its first device."""


@attrs.frozen
class DeviceRecord:
    """The history of one device's sensor. Times are seconds on the reader's clock.

    - ``accepted``: the last plausible reading, measured at ``accepted_at_s``. Before the first
      one, ``accepted_at_s`` is when the reader started.
    - ``latest``: the last reading with a possible temperature, accepted or not. Its values have
      not changed since ``changed_at_s``.
    - ``jump_c``: the temperature of the last unconfirmed jump, and ``num_jump_readings`` the
      number of readings in a row that agree with it.
    - ``fault``: why the last reading was rejected; empty if it was accepted.
    """

    device: int
    accepted_at_s: float
    accepted: Reading | None = None
    latest: Reading | None = None
    changed_at_s: float = -math.inf
    jump_c: float | None = None
    num_jump_readings: int = 0
    fault: str = "no reading yet"


def with_reading(
    record: DeviceRecord, reading: Reading, measured_at_s: float, config: ReaderConfig
) -> DeviceRecord:
    """The record after a reading that was measured at ``measured_at_s``."""
    if record.accepted is not None and measured_at_s <= record.accepted_at_s:
        return record  # the source repeats an old sample
    if not _is_possible(reading, config):
        return with_fault(record, f"impossible temperature {reading.temperature_c} °C")
    if reading.power_w is not None and not 0 < reading.power_w < math.inf:
        reading = attrs.evolve(reading, power_w=None)  # some exporters report 0 or NaN as "unknown"
    record = _with_latest(record, reading, measured_at_s)
    repeated_s = measured_at_s - record.changed_at_s
    if repeated_s >= _frozen_after_s(reading, config):
        fault = f"frozen at {reading.temperature_c:g} °C for {repeated_s:.0f} s"
        return with_fault(record, fault)
    if record.accepted is not None and _is_jump(
        record, record.accepted, reading, measured_at_s, config
    ):
        record = _with_jump(record, record.accepted, reading, config)
        if record.num_jump_readings < config.confirmations:
            return record
    return attrs.evolve(
        record,
        accepted=reading,
        accepted_at_s=measured_at_s,
        jump_c=None,
        num_jump_readings=0,
        fault="",
    )


def with_fault(record: DeviceRecord, fault: str) -> DeviceRecord:
    """The record after a rejected reading, or after a round without a reading."""
    return attrs.evolve(record, fault=fault, jump_c=None, num_jump_readings=0)


def is_well_formed(reading: Any) -> bool:
    """Whether a source's reading is one: a `Reading` with numbers, of a device from 0 on."""
    return (
        isinstance(reading, Reading)
        and is_integer(reading.device)
        and reading.device >= 0
        and is_number(reading.temperature_c)
        and (reading.power_w is None or is_number(reading.power_w))
        and is_number(reading.age_s)
    )


def _is_possible(reading: Reading, config: ReaderConfig) -> bool:
    return math.isfinite(reading.temperature_c) and 0 < reading.temperature_c <= config.max_c


def _with_latest(record: DeviceRecord, reading: Reading, measured_at_s: float) -> DeviceRecord:
    latest = record.latest
    is_repeated = latest is not None and (latest.temperature_c, latest.power_w) == (
        reading.temperature_c,
        reading.power_w,
    )
    changed_at_s = record.changed_at_s if is_repeated else measured_at_s
    return attrs.evolve(record, latest=reading, changed_at_s=changed_at_s)


def _frozen_after_s(reading: Reading, config: ReaderConfig) -> float:
    """Fine values (fractions, such as milliwatts) change soon; whole numbers may repeat long."""
    is_fine = not float(reading.temperature_c).is_integer() or (
        reading.power_w is not None and not float(reading.power_w).is_integer()
    )
    return config.frozen_after_s if is_fine else config.frozen_coarse_after_s


def _is_jump(
    record: DeviceRecord,
    accepted: Reading,
    reading: Reading,
    measured_at_s: float,
    config: ReaderConfig,
) -> bool:
    elapsed_s = measured_at_s - record.accepted_at_s
    allowed_c = config.max_jump_c + config.max_slew_c_per_s * elapsed_s
    return abs(reading.temperature_c - accepted.temperature_c) > allowed_c


def _with_jump(
    record: DeviceRecord, accepted: Reading, reading: Reading, config: ReaderConfig
) -> DeviceRecord:
    agrees = (
        record.jump_c is not None
        and abs(reading.temperature_c - record.jump_c) <= config.max_jump_c
    )
    return attrs.evolve(
        record,
        jump_c=reading.temperature_c,
        num_jump_readings=record.num_jump_readings + 1 if agrees else 1,
        fault=(
            f"jumped from {accepted.temperature_c:g} to {reading.temperature_c:g} °C, "
            "not confirmed yet"
        ),
    )
