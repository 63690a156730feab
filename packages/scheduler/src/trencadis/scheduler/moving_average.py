"""Exponentially weighted moving averages of measurements."""

from __future__ import annotations

WEIGHT = 0.2
"""Weight of the newest measurement."""


def moving_average(average: float, measurement: float) -> float:
    """The average with one more measurement."""
    return average + WEIGHT * (measurement - average)
