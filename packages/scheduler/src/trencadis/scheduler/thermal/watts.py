"""How many watts a running sequence draws, learned from what the devices draw altogether."""

from __future__ import annotations

import math

import numpy as np

PRIOR_W = 3.2
"""Watts per decode sequence on an H100 at a context of 4,096 tokens (seed 003, section 2)."""

_FORGETTING = 0.995
_PRIOR_VARIANCE = (4.0, 1e6)
"""Of the watts per sequence, and of those that are drawn with nothing running."""


class WattsModel:
    """Fits ``watts = idle + per_sequence * running`` by recursive least squares.

    Old measurements fade out. A value that repeats the last one is no new measurement: sensors
    are read less often than steps are made.
    """

    def __init__(self, prior_w: float = PRIOR_W) -> None:
        self._weights = np.array([prior_w, 0.0])
        self._covariance = np.diag(_PRIOR_VARIANCE)
        self._last_w = math.nan

    @property
    def per_sequence_w(self) -> float:
        """Watts per running sequence; never below a twentieth of a watt."""
        return max(0.05, float(self._weights[0]))

    @property
    def idle_w(self) -> float:
        """Watts with nothing running."""
        return max(0.0, float(self._weights[1]))

    def learn(self, watts: float, num_running: int) -> None:
        """Take in a measurement; anything but a finite number above 0 is left out."""
        if not (0 < watts < math.inf) or watts == self._last_w:
            return
        self._last_w = watts
        x = np.array([float(num_running), 1.0])
        spread = self._covariance @ x
        gain = spread / (_FORGETTING + x @ spread)
        self._weights = self._weights + gain * (watts - x @ self._weights)
        covariance = (self._covariance - np.outer(gain, spread)) / _FORGETTING
        # With a batch that never changes nothing is learned, and what is unknown must not grow.
        self._covariance = np.minimum(covariance, np.diag(_PRIOR_VARIANCE) + 1e3)
