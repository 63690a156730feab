"""Whether to believe a reading: pure functions from what was known to what is known.

Nothing here raises, sleeps or reads a clock. A reading that is not believed changes nothing but
the reason; the last believed one stays and grows old, and `state` makes of its age what it says.
"""

from __future__ import annotations

import math

import attrs

from trencadis.scheduler.telemetry.config import ReaderConfig
from trencadis.scheduler.telemetry.source import Reading

NO_DEVICE = -1
"""Stands in for the devices while a source has never shown any."""


@attrs.frozen
class KnownDevice:
    """What is known of one device's sensor. Times are seconds on the reader's clock.

    ``believed_at_s`` without a ``believed`` reading is when the wait for one began.
    """

    device: int
    believed_at_s: float
    believed: Reading | None = None
    latest: Reading | None = None
    changed_at_s: float = -math.inf
    suspect_c: float | None = None
    suspect_count: int = 0
    fault: str = "no reading yet"


def judge(known: KnownDevice, reading: Reading, at_s: float, config: ReaderConfig) -> KnownDevice:
    """``known`` with ``reading``, measured at ``at_s``, taken in or turned down."""
    if known.believed is not None and at_s <= known.believed_at_s:
        return known  # a source that repeats a sample it kept: its age says enough
    if not _possible(reading, config):
        return _turned_down(known, f"impossible temperature {reading.temperature_c} °C")
    known = _seen(known, reading, at_s)
    repeated_s = at_s - known.changed_at_s
    if repeated_s >= _patience_s(reading, config):
        return _turned_down(known, f"frozen at {reading.temperature_c:g} °C for {repeated_s:.0f} s")
    if known.believed is not None and _jumps(known, known.believed, reading, at_s, config):
        known = _suspected(known, known.believed, reading, config)
        if known.suspect_count < config.confirmations:
            return known
    return attrs.evolve(
        known, believed=reading, believed_at_s=at_s, suspect_c=None, suspect_count=0, fault=""
    )


def missing(known: KnownDevice, why: str) -> KnownDevice:
    """``known`` after a round in which the device did not answer."""
    return _turned_down(known, why)


def _possible(reading: Reading, config: ReaderConfig) -> bool:
    return math.isfinite(reading.temperature_c) and 0 < reading.temperature_c <= config.max_c


def _turned_down(known: KnownDevice, fault: str) -> KnownDevice:
    return attrs.evolve(known, fault=fault, suspect_c=None, suspect_count=0)


def _seen(known: KnownDevice, reading: Reading, at_s: float) -> KnownDevice:
    before = known.latest
    same = before is not None and (before.temperature_c, before.power_w) == (
        reading.temperature_c,
        reading.power_w,
    )
    changed_at_s = known.changed_at_s if same else at_s
    return attrs.evolve(known, latest=reading, changed_at_s=changed_at_s)


def _patience_s(reading: Reading, config: ReaderConfig) -> float:
    """A wattmeter in milliwatts never says the same twice for long; whole degrees do."""
    fine = not float(reading.temperature_c).is_integer() or (
        reading.power_w is not None and not float(reading.power_w).is_integer()
    )
    return config.frozen_after_s if fine else config.frozen_coarse_after_s


def _jumps(
    known: KnownDevice, believed: Reading, reading: Reading, at_s: float, config: ReaderConfig
) -> bool:
    elapsed_s = at_s - known.believed_at_s
    allowed_c = config.max_jump_c + config.max_slew_c_per_s * elapsed_s
    return abs(reading.temperature_c - believed.temperature_c) > allowed_c


def _suspected(
    known: KnownDevice, believed: Reading, reading: Reading, config: ReaderConfig
) -> KnownDevice:
    agrees = (
        known.suspect_c is not None
        and abs(reading.temperature_c - known.suspect_c) <= config.max_jump_c
    )
    return attrs.evolve(
        known,
        suspect_c=reading.temperature_c,
        suspect_count=known.suspect_count + 1 if agrees else 1,
        fault=(
            f"jumped from {believed.temperature_c:g} to {reading.temperature_c:g} °C, "
            "not confirmed yet"
        ),
    )
