"""What the next graph will take, learnt from those measured so far.

A weighted least-squares fit of a bucket's cost over its sizes and their pairwise products, which
minimises relative errors: graphs differ in size by orders of magnitude, and allocators round in
proportion. With few graphs measured, or none like the one asked for, the fit says nothing; then
larger shapes are held to cost no less than smaller ones that were measured.
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

_IN_SPAN = 1e-6
"""Share of a bucket's features that may lie outside those measured before the fit is silent."""

_SURE = 0.01
"""Relative error below which a fit is taken at its word."""

_ROUNDING = 1e-6
"""Relative error of a fit that is exact; a graph that fits to the byte must not be skipped."""


class GraphCostModel:
    """Costs of one phase's buckets, in bytes. ``buckets`` are all that may be asked for."""

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
        """Learn that this bucket's graph took ``cost``; once for each bucket."""
        at = self.num_measured
        self._shapes[at], self._rows[at] = bucket.shape, self._features[bucket]
        self._costs[at] = cost
        self.num_measured += 1
        self._fit = None

    def expected(self, bucket: Bucket) -> float:
        """The likeliest cost; where nothing is measured yet, in proportion to the shape."""
        if not self.num_measured:
            return float(math.prod(size or 1 for size in bucket.shape))
        return max(0.0, self._fitted().expected(self._features[bucket]))

    def at_least(self, bucket: Bucket) -> float:
        """The least cost to reckon with: a capture is hopeless where even this does not fit.

        The lower end of the fit's 95 % prediction interval, within what monotone costs allow.
        """
        if not self.num_measured:
            return 0.0
        low, high = self._dominance(bucket)
        fitted = self._fitted().at_least(self._features[bucket])
        return low if fitted is None else min(max(fitted, low), high)

    def at_least_in_doubt(self, bucket: Bucket) -> float:
        """As `at_least`, but from smaller shapes alone where the fit is not `sure`."""
        if self.num_measured and not self._fitted().is_sure:
            return self._dominance(bucket)[0]
        return self.at_least(bucket)

    def knows(self, bucket: Bucket) -> bool:
        """Whether `at_least` rests on the fit, not on smaller shapes alone."""
        return bool(self.num_measured) and self._fitted().speaks_of(self._features[bucket])

    def is_sure_of(self, bucket: Bucket) -> bool:
        """Whether it `knows`, to within a percent."""
        return self.knows(bucket) and self._fitted().is_sure

    def _dominance(self, bucket: Bucket) -> tuple[float, float]:
        """The greatest cost of a smaller shape, and the least of a larger one."""
        shapes, costs = self._shapes[: self.num_measured], self._costs[: self.num_measured]
        smaller = (shapes <= bucket.shape).all(axis=1)
        larger = (shapes >= bucket.shape).all(axis=1)
        return (
            float(np.max(costs, where=smaller, initial=0.0)),
            float(np.min(costs, where=larger, initial=np.inf)),
        )

    def _fitted(self) -> _Fit:
        if self._fit is None:
            measured = slice(self.num_measured)
            self._fit = _Fit.of(self._rows[measured], self._costs[measured])
        return self._fit


@attrs.frozen(eq=False)
class _Fit:
    """Coefficients, the directions they were learnt in (rows), and the relative error."""

    coefficients: Vector
    directions: Vector
    singular: Vector
    error: float | None
    """None where there are no more measurements than directions: nothing tells the error."""

    @classmethod
    def of(cls, features: Vector, costs: Vector) -> _Fit:
        # Costs below a thousandth of the greatest are noise: they must not outweigh the rest.
        weights = 1.0 / np.maximum(costs, max(1.0, float(costs.max()) * 1e-3))
        rows, targets = features * weights[:, None], costs * weights
        left, singular, right = np.linalg.svd(rows, full_matrices=False)
        rank = int((singular > singular[0] * 1e-9).sum())
        directions, kept = right[:rank], singular[:rank]
        coefficients = directions.T @ ((left[:, :rank].T @ targets) / kept)
        spare = len(costs) - rank
        residuals = rows @ coefficients - targets
        error = None
        if spare:
            # Costs in steps may lie on a plane for a while by chance: each graph that the fit has
            # got right halves that doubt.
            error = float(np.sqrt(residuals @ residuals / spare)) * _quantile(spare) + 0.5**spare
        return cls(coefficients, directions, kept, error)

    @property
    def is_sure(self) -> bool:
        return self.error is not None and self.error < _SURE

    def expected(self, features: Vector) -> float:
        return float(features @ self.coefficients)

    def speaks_of(self, features: Vector) -> bool:
        """Whether its error is known, and the features lie in the directions measured."""
        outside = features - (self.directions @ features) @ self.directions
        near = np.linalg.norm(outside) <= _IN_SPAN * np.linalg.norm(features)
        return self.error is not None and bool(near)

    def at_least(self, features: Vector) -> float | None:
        """The lower end of the prediction interval; None where the fit has nothing to say."""
        if self.error is None or not self.speaks_of(features):
            return None
        along, expected = self.directions @ features, self.expected(features)
        leverage = float(((along / self.singular) ** 2).sum())
        return expected - (self.error + _ROUNDING) * float(np.sqrt(expected**2 + leverage))


def _features(bucket: Bucket) -> Vector:
    pairs = (a * b for a, b in itertools.combinations(bucket.shape, 2))
    return np.array([1.0, *bucket.shape, *pairs])


def _quantile(degrees: int) -> float:
    """Student's two-sided 95 % quantile, to within 8 %."""
    return 2.0 + 10.0 / degrees**2
