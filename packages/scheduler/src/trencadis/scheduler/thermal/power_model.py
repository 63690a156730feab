"""Estimates the power of one more running sequence from the power of all devices."""

from __future__ import annotations

import math

import numpy as np

from trencadis.scheduler.thermal.readings import is_power

PRIOR_W = 3.2
"""Watts per decode sequence on an H100 at a context of 4,096 tokens (seed 003, section 2)."""

_FORGETTING_FACTOR = 0.95
_PRIOR_VARIANCE = (4.0, 1e6)
"""Variance of the watts per sequence, and of the base watts, before the first measurement."""

_MIN_SEQUENCE_W = 0.05


class PowerModel:
    """Fits ``watts = base + per_sequence * running`` by recursive least squares.

    ``per_sequence`` is the marginal power: that of one sequence more. So measurements without a
    running sequence are left out: the first sequence wakes the devices, which can cost a hundred
    times as much as the second.

    Old measurements are forgotten exponentially. A value that equals the previous one is not a new
    measurement, because sensors are read less often than steps are scheduled.
    """

    def __init__(self, prior_w: float = PRIOR_W) -> None:
        self._weights = np.array([prior_w, 0.0])
        self._covariance = np.diag(_PRIOR_VARIANCE)
        self._last_w = math.nan

    @property
    def per_sequence_w(self) -> float:
        """Watts of one more running sequence, at least 0.05."""
        return max(_MIN_SEQUENCE_W, float(self._weights[0]))

    @property
    def base_w(self) -> float:
        """Watts that do not depend on the number of running sequences, while any runs."""
        return max(0.0, float(self._weights[1]))

    def observe(self, watts: float, num_running: int) -> None:
        """Add a measurement. Skips values that are not a power, and those with nothing running."""
        if num_running < 1 or not is_power(watts) or watts == self._last_w:
            return
        self._last_w = watts
        x = np.array([float(num_running), 1.0])
        spread = self._covariance @ x
        gain = spread / (_FORGETTING_FACTOR + x @ spread)
        self._weights = self._weights + gain * (watts - x @ self._weights)
        covariance = self._covariance - np.outer(gain, spread)
        forgetful = covariance / _FORGETTING_FACTOR
        # A constant batch has no information on one direction, whose variance must not grow
        # without limit.
        is_bounded = np.all(np.diag(forgetful) <= _PRIOR_VARIANCE)
        self._covariance = forgetful if is_bounded else covariance
