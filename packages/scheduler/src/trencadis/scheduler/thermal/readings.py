"""Which readings a policy believes. The checks of `TemperatureReader` are stricter."""

from __future__ import annotations

from typing import Any, TypeGuard

from trencadis.scheduler.validators import is_finite

MIN_C, MAX_C = -50.0, 200.0
"""Temperatures outside of this range, in degrees C, are not temperatures of a device that works."""

MAX_W = 1e6
"""More watts than any node of accelerators draws. The largest have sixteen devices of 1 kW."""


def is_temperature(value: Any) -> TypeGuard[float]:
    """Whether a value can be a temperature in degrees C: NaN, infinities and text are none."""
    return is_finite(value) and MIN_C <= value <= MAX_C


def is_power(value: Any) -> TypeGuard[float]:
    """Whether a value can be the power of running devices in watts.

    0 and negative values are none: some exporters report them for "not supported".
    """
    return is_finite(value) and 0 < value <= MAX_W
