"""Predicts the size of a graph from the graphs that were measured so far.

A weighted least-squares fit of the size over the axes of a bucket and their pairwise products. The
fit minimizes relative errors, because graphs differ in size by orders of magnitude and allocators
round in proportion. Before the fit covers a bucket, the prediction assumes only that a larger
shape costs no less than a smaller one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.bucketing import Bucket

Vector: TypeAlias = npt.NDArray[np.float64]

_MAX_OUTSIDE = 1e-6
"""The fit covers a bucket if at most this share of its features lies outside the measured span."""

_ACCURATE = 0.01
"""A fit with a smaller relative error is accurate."""

_ROUNDING = 1e-6
"""Relative rounding error of an exact fit. Without it a graph that just fits might be skipped."""


class GraphCostModel:
    """Sizes of one phase's graphs, bytes. ``buckets`` are all buckets that may be asked for."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        rows = {bucket: _features(bucket) for bucket in buckets}
        scale = np.max(list(rows.values()), axis=0, initial=1.0) if rows else np.ones(1)
        self._features = {bucket: row / scale for bucket, row in rows.items()}
        axes = max((len(bucket.shape) for bucket in rows), default=0)
        self._shapes = np.zeros((len(rows), axes), np.int64)
        self._rows = np.zeros((len(rows), len(scale)))
        self._costs = np.zeros(len(rows))
        self._fit: _Fit | None = None
        self.num_measured = 0

    def observe(self, bucket: Bucket, cost: float) -> None:
        """Add a measured graph of ``cost`` bytes. Call it once for each bucket."""
        row = self.num_measured
        self._shapes[row], self._rows[row] = bucket.shape, self._features[bucket]
        self._costs[row] = cost
        self.num_measured += 1
        self._fit = None

    def expected(self, bucket: Bucket) -> float:
        """The most likely size. Before the first measurement: the number of elements."""
        if not self.num_measured:
            return float(math.prod(size or 1 for size in bucket.shape))
        return max(0.0, self._current_fit().expected(self._features[bucket]))

    def lower_bound(self, bucket: Bucket) -> float:
        """The smallest plausible size. A graph whose lower bound does not fit is not captured.

        The lower end of the fit's 95 % prediction interval, limited to what `_monotone_bounds`
        allow.
        """
        if not self.num_measured:
            return 0.0
        low, high = self._monotone_bounds(bucket)
        fitted = self._current_fit().lower_bound(self._features[bucket])
        return low if fitted is None else min(max(fitted, low), high)

    def cautious_lower_bound(self, bucket: Bucket) -> float:
        """As `lower_bound`, but an inaccurate fit is ignored: only smaller shapes count."""
        if self.num_measured and not self._current_fit().is_accurate:
            return self._monotone_bounds(bucket)[0]
        return self.lower_bound(bucket)

    def has_fit_for(self, bucket: Bucket) -> bool:
        """Whether `lower_bound` uses the fit, not only smaller shapes."""
        return bool(self.num_measured) and self._current_fit().covers(self._features[bucket])

    def is_accurate_for(self, bucket: Bucket) -> bool:
        """Whether the fit covers the bucket with an error below one percent."""
        return self.has_fit_for(bucket) and self._current_fit().is_accurate

    def _monotone_bounds(self, bucket: Bucket) -> tuple[float, float]:
        """The largest measured size of a smaller shape, and the smallest of a larger shape."""
        shapes, costs = self._shapes[: self.num_measured], self._costs[: self.num_measured]
        smaller = (shapes <= bucket.shape).all(axis=1)
        larger = (shapes >= bucket.shape).all(axis=1)
        return (
            float(np.max(costs, where=smaller, initial=0.0)),
            float(np.min(costs, where=larger, initial=np.inf)),
        )

    def _current_fit(self) -> _Fit:
        if self._fit is None:
            measured = slice(self.num_measured)
            self._fit = _Fit.from_measurements(self._rows[measured], self._costs[measured])
        return self._fit


@attrs.frozen(eq=False)
class _Fit:
    """A weighted least-squares fit.

    ``directions`` (one per row) span the measured features, ``singular`` are their singular
    values. ``relative_error`` is None if there are no more measurements than directions: then the
    residuals say nothing.
    """

    coefficients: Vector
    directions: Vector
    singular: Vector
    relative_error: float | None

    @classmethod
    def from_measurements(cls, features: Vector, costs: Vector) -> _Fit:
        # Sizes below a thousandth of the largest are noise and must not dominate the fit.
        weights = 1.0 / np.maximum(costs, max(1.0, float(costs.max()) * 1e-3))
        rows, targets = features * weights[:, None], costs * weights
        left, singular, right = np.linalg.svd(rows, full_matrices=False)
        rank = int((singular > singular[0] * 1e-9).sum())
        directions, kept = right[:rank], singular[:rank]
        coefficients = directions.T @ ((left[:, :rank].T @ targets) / kept)
        degrees_of_freedom = len(costs) - rank
        residuals = rows @ coefficients - targets
        error = None
        if degrees_of_freedom:
            # Sizes in steps may lie on a plane by chance. Each further graph that the fit
            # predicts correctly halves the extra uncertainty for that case.
            deviation = float(np.sqrt(residuals @ residuals / degrees_of_freedom))
            error = deviation * _t_quantile(degrees_of_freedom) + 0.5**degrees_of_freedom
        return cls(coefficients, directions, kept, error)

    @property
    def is_accurate(self) -> bool:
        return self.relative_error is not None and self.relative_error < _ACCURATE

    def expected(self, features: Vector) -> float:
        return float(features @ self.coefficients)

    def covers(self, features: Vector) -> bool:
        """Whether the error is known and the features lie in the measured span."""
        outside = features - (self.directions @ features) @ self.directions
        within = np.linalg.norm(outside) <= _MAX_OUTSIDE * np.linalg.norm(features)
        return self.relative_error is not None and bool(within)

    def lower_bound(self, features: Vector) -> float | None:
        """The lower end of the prediction interval; None if the fit does not cover the features."""
        if self.relative_error is None or not self.covers(features):
            return None
        along, expected = self.directions @ features, self.expected(features)
        leverage = float(((along / self.singular) ** 2).sum())
        error = self.relative_error + _ROUNDING
        return expected - error * float(np.sqrt(expected**2 + leverage))


def _features(bucket: Bucket) -> Vector:
    products = (a * b for a, b in itertools.combinations(bucket.shape, 2))
    return np.array([1.0, *bucket.shape, *products])


def _t_quantile(degrees_of_freedom: int) -> float:
    """Student's two-sided 95 % quantile, approximated to within 8 %."""
    return 2.0 + 10.0 / degrees_of_freedom**2
