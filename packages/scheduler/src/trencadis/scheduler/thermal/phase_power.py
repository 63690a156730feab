"""Estimates what prefill costs: its part of the power of all devices, and of the time of a step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trencadis.scheduler.thermal.readings import is_power
from trencadis.scheduler.validators import is_finite

PRIOR_BASE_W = 110.0
PRIOR_PREFILL_J = 0.02
PRIOR_SEQUENCE_W = 1.3
"""Of an H200, before the first measurement: idle watts, joules of a prefill token, watts of a
decode sequence. Decode draws 137 to 300 of 700 W (Ma et al., arXiv 2605.11999), here up to 128
sequences; 400 W more at 20,000 prefill tokens a second is an assumption."""

MAX_TOKENS_PER_S = 1e8
MAX_SEQUENCES = 1e6
"""More than any server runs; a load above them is none."""

_FORGETTING_FACTOR = 0.98
"""Of 1-second windows: half of what is known is from the last 35 seconds."""

_PRIOR_VARIANCE = (1e4, 1e4, 4.0)
"""Variances of the base watts, of the watts at 1,000 prefill tokens a second, and of the watts of
a sequence, before the first measurement."""

_SETTLED_AFTER = 10
"""Measurements before the mean error decides which one is an outlier."""

_OUTLIER = 6.0
"""From then on, an error of more than this many mean errors is one."""

_MAX_EARLY = 4.0
"""Before that, a measurement of more than this many times the expected watts is one, or of less
than a quarter. The estimates for one device reach the watts of eight in a few measurements."""

_STEP_FORGETTING_FACTOR = 0.995
"""Of steps: half of what is known is from the last 140 steps."""

_MIN_STEPS = 20
"""Steps that are measured before a long one is taken for one that has waited."""

_LONGEST_STEP = 5.0
"""A step counts as at most this many times the seconds that were expected."""

_MIN_SPREAD = 0.01
"""Least relative variance of the prefill tokens from which the seconds of a token are estimated."""

_MIN_ERROR_W = 5.0
"""The mean error counts as at least this: sensors are noisy."""


class PhasePowerModel:
    """Fits ``watts = base + prefill_j * prefill tokens per s + sequence_w * sequences``.

    Recursive least squares with exponential forgetting. The three estimates are always finite, and
    not negative: one that noise has made so counts as 0. Loads that do not change tell nothing
    about their effect: the variances never exceed those before the first measurement, so the
    estimates then stay where they are.

    An outlier deviates by more than six mean errors, or is, of the first ten measurements, more
    than four times what is expected, or less than a quarter. A single one changes nothing. A
    second in a row, on the same side, is taken as an error of that size: so a lasting change of the
    power is followed, because the mean error grows with each.
    """

    def __init__(self) -> None:
        self._weights = np.array([PRIOR_BASE_W, 1000 * PRIOR_PREFILL_J, PRIOR_SEQUENCE_W])
        self._covariance = np.diag(_PRIOR_VARIANCE)
        self._mean_error_w = 0.0
        self._num_measurements = 0
        self._outlier_side = 0.0
        """Sign of the error of the last measurement if that was an outlier, otherwise 0."""

    @property
    def base_w(self) -> float:
        """Watts that depend neither on prefill nor on the number of sequences."""
        return max(0.0, float(self._weights[0]))

    @property
    def prefill_j(self) -> float:
        """Joules of a prefill token: watts per prefill token a second."""
        return max(0.0, float(self._weights[1]) / 1000)

    @property
    def sequence_w(self) -> float:
        """Watts of one more running sequence."""
        return max(0.0, float(self._weights[2]))

    def predict(self, prefill_tokens_per_s: float, num_running: float) -> float:
        """The watts under this load; not negative."""
        load = np.array([1.0, prefill_tokens_per_s / 1000, num_running])
        return max(0.0, float(load @ self._weights))

    def observe(self, watts: Any, prefill_tokens_per_s: float, num_running: float) -> float | None:
        """Add a measurement: mean watts and mean load of the same seconds.

        Returns the watts that are believed, which differ from ``watts`` for an outlier; None for
        what is not a power or a load, which changes nothing.
        """
        if not is_power(watts):
            return None
        if not _is_load(prefill_tokens_per_s, MAX_TOKENS_PER_S):
            return None
        if not _is_load(num_running, MAX_SEQUENCES):
            return None
        x = np.array([1.0, prefill_tokens_per_s / 1000, float(num_running)])
        expected_w = float(x @ self._weights)
        error_w = float(watts) - expected_w
        bounded_w = self._bounded(error_w, expected_w)
        side_before = self._outlier_side
        self._outlier_side = 0.0 if bounded_w == error_w else math.copysign(1.0, error_w)
        if self._outlier_side not in (0.0, side_before):
            return max(0.0, expected_w)
        error_w = bounded_w
        self._num_measurements += 1
        share = max(0.1, 1 / self._num_measurements)
        self._mean_error_w += share * (abs(error_w) - self._mean_error_w)
        self._update(x, error_w)
        return max(0.0, expected_w + error_w)

    def _bounded(self, error_w: float, expected_w: float) -> float:
        """The error, or the largest that is not an outlier."""
        if self._num_measurements < _SETTLED_AFTER:
            expected_w = max(expected_w, PRIOR_BASE_W)
            largest_w = (_MAX_EARLY - 1) * expected_w
            return max(-largest_w / _MAX_EARLY, min(largest_w, error_w))
        largest_w = _OUTLIER * max(self._mean_error_w, _MIN_ERROR_W)
        return max(-largest_w, min(largest_w, error_w))

    def _update(self, x: np.ndarray[Any, np.dtype[np.float64]], error_w: float) -> None:
        spread = self._covariance @ x
        gain = spread / (_FORGETTING_FACTOR + float(x @ spread))
        self._weights = self._weights + gain * error_w
        covariance = self._covariance - np.outer(gain, spread)
        covariance = (covariance + covariance.T) / 2
        variances = np.diag(covariance)
        if not np.all(variances > 0):  # lost to rounding, under loads of very different sizes
            covariance = np.diag(_PRIOR_VARIANCE)
        elif np.all(variances / _FORGETTING_FACTOR <= _PRIOR_VARIANCE):
            covariance = covariance / _FORGETTING_FACTOR
        self._covariance = covariance


def _is_load(value: Any, most: float) -> bool:
    return is_finite(value) and 0 <= value <= most


class StepTimeModel:
    """Fits ``seconds of a step = fixed_s + token_s * prefill tokens`` by least squares.

    Steps are forgotten exponentially. While all have as many prefill tokens, ``token_s`` stays. A
    step of more than five times the seconds that are expected counts as five times: it has waited.
    In plain floats, because every step is added.
    """

    def __init__(self) -> None:
        self.fixed_s = 0.0
        self.token_s = 0.0
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def observe(self, prefill_tokens: int, seconds: float) -> None:
        """Add a step that took ``seconds``, above 0."""
        expected_s = self.fixed_s + self.token_s * prefill_tokens
        if self._weight > _MIN_STEPS and expected_s > 0:
            seconds = min(seconds, _LONGEST_STEP * expected_s)
        kept = _STEP_FORGETTING_FACTOR
        self._weight = kept * self._weight + 1
        self._tokens = kept * self._tokens + prefill_tokens
        self._seconds = kept * self._seconds + seconds
        self._squares = kept * self._squares + prefill_tokens * prefill_tokens
        self._products = kept * self._products + prefill_tokens * seconds
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean_tokens**2
        if variance > _MIN_SPREAD * (mean_tokens**2 + 1):
            slope_s = (self._products / self._weight - mean_tokens * mean_s) / variance
            self.token_s = max(0.0, slope_s)
        if mean_tokens:
            self.token_s = min(self.token_s, mean_s / mean_tokens)
        self.fixed_s = max(0.0, mean_s - self.token_s * mean_tokens)

    def tokens_of_rate(self, prefill_tokens_per_s: float) -> float:
        """The prefill tokens of a step with which steps in a row reach this rate; may be infinite.

        The rate of steps of ``n`` tokens is ``n / (fixed_s + token_s * n)``.
        """
        if prefill_tokens_per_s <= 0:
            return 0.0
        share = 1 - prefill_tokens_per_s * self.token_s
        return prefill_tokens_per_s * self.fixed_s / share if share > 0 else math.inf
