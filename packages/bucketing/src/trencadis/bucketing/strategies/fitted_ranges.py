"""Ranges fitted to observed lengths: for one axis alone, or for two axes together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.rounding import IntArray, round_up
from trencadis.bucketing.strategies.optimal_partition import least_padding_edges
from trencadis.bucketing.validators import Weights, checked_lengths, checked_weights


def fitted_range(
    lengths: npt.ArrayLike,
    step: int,
    max: int,
    limit: int,
    weights: npt.ArrayLike | None = None,
) -> tuple[int, ...]:
    """The range of at most `limit` buckets that pads these lengths least.

    Every bucket is a multiple of `step`, except `max`, which always ends the range. Of ranges
    that pad equally, one with the fewest buckets is returned.

    Args:
        lengths: the observed lengths, one per batch or request, each 0 to `max`.
        step: the granularity of the buckets, 1 or more.
        max: the largest length that can come, whether observed or not.
        limit: the greatest number of buckets.
        weights: how often each length was observed, or its cost per padded element; default 1.

    Raises:
        BucketingError: no lengths, or one that is negative, NaN or above `max`; a bad weight; a
            step or limit below 1.
    """
    _check_step_and_limit(step, limit)
    integers = checked_lengths(lengths, max)
    weight = checked_weights(weights, len(integers))
    return _fit(integers, weight, step, max, limit)


def fitted_axes(
    shapes: npt.ArrayLike,
    steps: tuple[int, int],
    maxima: tuple[int, int],
    budget: int,
    weights: npt.ArrayLike | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two axes, such as batch and length, that pad these batches least within `budget` graphs.

    A batch of shape (b, l) costs the product of the two buckets it is padded to. For every way to
    split the budget, the two axes are fitted in turn until the padding no longer falls. Each axis
    is then optimal for the other one; the pair is not proven to be the best of all pairs.

    Args:
        shapes: the observed batches, one row each, two columns.
        steps: granularity per axis.
        maxima: the largest size per axis that can come.
        budget: the greatest number of buckets in the product of the two axes.
        weights: how often each batch was observed; default 1.

    Raises:
        BucketingError: as for `fitted_range`.
    """
    rows = np.asarray(shapes)
    if rows.ndim != 2 or rows.shape[1] != 2:
        raise BucketingError(f"batches of shape {rows.shape} are not rows of two sizes: give two")
    for step in steps:
        _check_step_and_limit(step, budget)
    first, second = (checked_lengths(rows[:, i], maxima[i]) for i in (0, 1))
    weight = checked_weights(weights, len(rows))
    _, *axes = min(
        _alternate((first, second), weight, steps, maxima, limits)
        for limits in _budget_splits(budget)
    )
    return axes[0], axes[1]


def padded(values: Sequence[int], lengths: IntArray) -> IntArray:
    """Each length rounded up to its bucket; no length may be above the last bucket."""
    buckets = np.asarray(values, dtype=np.int64)
    return buckets[np.searchsorted(buckets, lengths)]


def _check_step_and_limit(step: int, limit: int) -> None:
    for name, value in (("step", step), ("limit", limit)):
        if value < 1:
            raise BucketingError(f"fit {name} {value} must be at least 1: raise it")


def _budget_splits(budget: int) -> list[tuple[int, int]]:
    """The limits (first, second) of the two axes that use the budget up."""
    # For one limit of the second axis, only the largest limit of the first can be best.
    seconds = sorted({budget // first for first in range(1, budget + 1)})
    return [(budget // second, second) for second in seconds]


def _alternate(
    sizes: tuple[IntArray, IntArray],
    weight: Weights,
    steps: tuple[int, int],
    maxima: tuple[int, int],
    limits: tuple[int, int],
) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    """Fit one axis for the other in turn until the cost stops falling: (cost, first, second)."""
    axes: list[tuple[int, ...]] = [(), ()]
    least = math.inf
    best: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    cost = weight * sizes[1]
    while True:
        for axis in (0, 1):
            axes[axis] = _fit(sizes[axis], cost, steps[axis], maxima[axis], limits[axis])
            cost = weight * padded(axes[axis], sizes[axis])
        total = float((cost * padded(axes[0], sizes[0])).sum())
        if total >= least:
            return least, *best
        least, best = total, (axes[0], axes[1])


def _fit(lengths: IntArray, weight: Weights, step: int, max: int, limit: int) -> tuple[int, ...]:
    edges, weights = _histogram(lengths, weight, step, max)
    return least_padding_edges(edges, weights, limit)


def _histogram(
    lengths: IntArray, weights: Weights, step: int, max: int
) -> tuple[list[int], list[float]]:
    """The candidate buckets, the last one `max`, and the total weight that rounds up to each."""
    seen = weights > 0
    rounded = np.minimum(round_up(lengths[seen], step), max)
    edges, positions = np.unique(np.append(rounded, max), return_inverse=True)
    totals = np.zeros(len(edges), dtype=weights.dtype)
    np.add.at(totals, positions[:-1], weights[seen])
    # Python numbers from here on: sums of integers stay exact, however large they are.
    return edges.tolist(), totals.tolist()
