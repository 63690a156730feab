"""Estimates the power of a running sequence from the power of all devices."""

from __future__ import annotations

import math

import numpy as np

PRIOR_W = 3.2
"""Watts per decode sequence on an H100 at a context of 4,096 tokens (seed 003, section 2)."""

_FORGETTING_FACTOR = 0.995
_PRIOR_VARIANCE = (4.0, 1e6)
"""Variance of the watts per sequence, and of the idle watts, before the first measurement."""

_MIN_SEQUENCE_W = 0.05


class PowerModel:
    """Fits ``watts = idle + per_sequence * running`` by recursive least squares.

    Old measurements are forgotten exponentially. A value that equals the previous one is no new
    measurement, because sensors are read less often than steps are scheduled.
    """

    def __init__(self, prior_w: float = PRIOR_W) -> None:
        self._weights = np.array([prior_w, 0.0])
        self._covariance = np.diag(_PRIOR_VARIANCE)
        self._last_w = math.nan

    @property
    def per_sequence_w(self) -> float:
        """Watts per running sequence, at least 0.05."""
        return max(_MIN_SEQUENCE_W, float(self._weights[0]))

    @property
    def idle_w(self) -> float:
        """Watts with nothing running."""
        return max(0.0, float(self._weights[1]))

    def observe(self, watts: float, num_running: int) -> None:
        """Add a measurement. Skips values that are not finite or not above 0."""
        if not (0 < watts < math.inf) or watts == self._last_w:
            return
        self._last_w = watts
        x = np.array([float(num_running), 1.0])
        spread = self._covariance @ x
        gain = spread / (_FORGETTING_FACTOR + x @ spread)
        self._weights = self._weights + gain * (watts - x @ self._weights)
        covariance = (self._covariance - np.outer(gain, spread)) / _FORGETTING_FACTOR
        # A constant batch gives no information about some directions: bound their variance.
        self._covariance = np.minimum(covariance, np.diag(_PRIOR_VARIANCE) + 1e3)
