"""Ranges fitted to observed lengths: for one axis alone, or for two axes together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.bucketing.errors import BucketingError, shown
from trencadis.bucketing.rounding import IntArray, round_up
from trencadis.bucketing.shapes import MAX_SIZE, integer_array, numeric_array
from trencadis.bucketing.strategies.optimal_partition import (
    least_cost_edges,
    least_padding_edges,
    padding_costs,
)
from trencadis.bucketing.validators import Validator, integer, number

Weights: TypeAlias = IntArray | npt.NDArray[np.float64]
"""The weights of lengths. Sums of integer weights are exact."""

MAX_TAIL = 1_000_000
"""The largest tail weight of a fit. At this weight, little but the largest padding counts."""

TAIL = number(0, MAX_TAIL)
LIMIT = integer(1)
"""Above the number of sizes that can be chosen, a limit has no effect."""
_STEP, _MAX = integer(1, MAX_SIZE), integer(0, MAX_SIZE)

MAX_CANDIDATES = 512
"""The most sizes that a fit with a tail chooses from: its work grows with their square."""


def fitted_range(
    lengths: npt.ArrayLike,
    step: int,
    max: int,
    limit: int,
    weights: npt.ArrayLike | None = None,
    *,
    tail: float = 0.0,
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
        tail: how much more a token of padding costs where a length has much of it. A token costs
            1 + `tail` × (padding of its length / mean length). 0 gives the least mean padding;
            more gives a smaller worst case for some more mean padding. With a tail, more than
            `MAX_CANDIDATES` different lengths are first rounded up to so many.

    Raises:
        BucketingError: no lengths, or one that is negative, NaN or above `max`; a bad weight or
            tail; a step or limit below 1.
    """
    step, max = _STEP.checked("fit step", step), _MAX.checked("fit max", max)
    limit, tail = LIMIT.checked("fit limit", limit), TAIL.checked("fit tail", tail)
    integers = _checked_lengths(lengths, max)
    weight = checked_weights(weights, len(integers))
    batches = _Batches(
        sizes=(np.ones_like(integers), integers), weight=weight, maxima=(1, max), tail=tail
    )
    return batches.fit(1, np.ones_like(integers), step, limit)[1]


def fitted_axes(
    shapes: npt.ArrayLike,
    steps: tuple[int, int],
    maxima: tuple[int, int],
    budget: int,
    weights: npt.ArrayLike | None = None,
    *,
    tail: float = 0.0,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two axes, such as batch and length, that pad these batches least within `budget` graphs.

    A batch of shape (b, l) costs the product of the two buckets it is padded to. For every way to
    split the budget, the two axes are fitted in turn until the cost no longer falls. Each axis
    is then optimal for the other one; the pair is not proven to be the best of all pairs.

    Args:
        shapes: the observed batches, one row each, two columns.
        steps: granularity per axis.
        maxima: the largest size per axis that can come.
        budget: the greatest number of buckets in the product of the two axes.
        weights: how often each batch was observed; default 1.
        tail: how much more a token of padding costs in a batch with much of it, as for
            `fitted_range`: 1 + `tail` × (padding of its batch / mean tokens of a batch).

    Raises:
        BucketingError: as for `fitted_range`.
    """
    rows = integer_array("batches to fit", shapes)
    if rows.ndim != 2 or rows.shape[1] != 2:
        raise BucketingError(f"batches of shape {rows.shape} are not rows of two sizes: give two")
    strides, ends = _checked_pair(_STEP, "fit step", steps), _checked_pair(_MAX, "fit max", maxima)
    limit, tail = LIMIT.checked("fit limit", budget), TAIL.checked("fit tail", tail)
    first, second = (_checked_lengths(rows[:, i], ends[i]) for i in (0, 1))
    weight = checked_weights(weights, len(rows))
    batches = _Batches(sizes=(first, second), weight=weight, maxima=ends, tail=tail)
    counts = (batches.num_candidates(0, strides[0]), batches.num_candidates(1, strides[1]))
    splits = _budget_splits(limit, counts)
    _, *axes = min(_alternate(batches, strides, limits) for limits in splits)
    return axes[0], axes[1]


def padded(values: Sequence[int], lengths: IntArray) -> IntArray:
    """Each length rounded up to its bucket; no length may be above the last bucket."""
    buckets = np.asarray(values, dtype=np.int64)
    return buckets[np.searchsorted(buckets, lengths)]


def _checked_pair(size: Validator, name: str, values: Sequence[int]) -> tuple[int, int]:
    try:
        first, second = values
    except (TypeError, ValueError):
        raise BucketingError(
            f"{name} {shown(values)} must be a pair: give one size per axis"
        ) from None
    return size.checked(name, first), size.checked(name, second)


def _checked_lengths(lengths: npt.ArrayLike, max: int) -> IntArray:
    """The lengths to fit a range to, as an array of integers.

    Raises:
        BucketingError: no length, one that is not an integer, or one outside 0 to `max`.
    """
    integers = integer_array("lengths to fit", lengths)
    if integers.ndim != 1:
        raise BucketingError(
            f"lengths to fit have {integers.ndim} dimensions: give a sequence of integers"
        )
    if integers.size == 0:
        raise BucketingError("no lengths to fit: record some traffic, or use the exp strategy")
    if integers.min() < 0 or integers.max() > max:
        raise BucketingError(
            f"lengths to fit run from {integers.min()} to {integers.max()}, "
            f"outside 0 to max {max}: raise max, or remove them"
        )
    return integers


def checked_weights(weights: npt.ArrayLike | None, count: int) -> Weights:
    """The weights of `count` lengths; each is 1 where `weights` is None. Integers stay integers.

    Raises:
        BucketingError: not `count` weights, one that is negative or not finite, or all of them 0.
    """
    if weights is None:
        return np.ones(count, dtype=np.int64)
    numbers = numeric_array("weights", weights)
    if numbers.shape != (count,) or not np.all(np.isfinite(numbers)) or not np.all(numbers >= 0):
        raise BucketingError(
            f"the {numbers.size} weights must be finite, not negative, and one for each of the "
            f"{count} lengths: correct them"
        )
    if not numbers.any():
        raise BucketingError("all weights are 0, which leaves nothing to fit: give a positive one")
    exact = np.issubdtype(numbers.dtype, np.integer) and numbers.max() <= MAX_SIZE
    return numbers.astype(np.int64) if exact else numbers.astype(np.float64)


def _budget_splits(budget: int, counts: tuple[int, int]) -> list[tuple[int, int]]:
    """The limits (first, second) of the two axes that use the budget up.

    `counts` has the number of candidates per axis: a higher limit gives no other range.
    """
    # For one limit of the second axis, only the largest limit of the first can be best.
    most = min(budget, counts[0])
    seconds = sorted({min(budget // first, counts[1]) for first in range(1, most + 1)})
    return [(min(budget // second, counts[0]), second) for second in seconds]


def _alternate(
    batches: _Batches, steps: tuple[int, int], limits: tuple[int, int]
) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    """Fit one axis for the other in turn until the cost stops falling: (cost, first, second)."""
    axes: list[tuple[int, ...]] = [(), ()]
    least = math.inf
    best: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    other = batches.sizes[1]
    while True:
        cost = math.inf
        for axis in (0, 1):
            cost, axes[axis] = batches.fit(axis, other, steps[axis], limits[axis])
            other = padded(axes[axis], batches.sizes[axis])
        if cost >= least:
            return least, *best
        least, best = cost, (axes[0], axes[1])


@attrs.frozen(kw_only=True, eq=False)
class _Batches:
    """The observed batches of a fit, and what padding them costs.

    Attributes:
        sizes: the sizes of all batches along the first axis, and along the second.
        weight: how often each batch was observed.
        maxima: the largest size per axis that can come.
        tail: as for `fitted_axes`.
    """

    sizes: tuple[IntArray, IntArray]
    weight: Weights
    maxima: tuple[int, int]
    tail: float

    def num_candidates(self, axis: int, step: int) -> int:
        """How many different buckets the sizes of an axis can need, the largest size included."""
        return len(self._candidates(axis, step)[0])

    def fit(
        self, axis: int, other: IntArray, step: int, limit: int
    ) -> tuple[float, tuple[int, ...]]:
        """The cost and the values of one axis, while each batch has size `other` on the other."""
        if self.tail:
            return self._fit_with_tail(axis, other.astype(np.float64), step, limit)
        weight = self._exact_weight() * other
        edges, positions = self._candidates(axis, step)
        totals = np.zeros(len(edges), dtype=weight.dtype)
        np.add.at(totals, positions, weight)
        # Python numbers from here on: sums of integers stay exact, however large they are.
        values = least_padding_edges(edges.tolist(), totals.tolist(), limit)
        return float((weight * padded(values, self.sizes[axis])).sum()), values

    def _fit_with_tail(
        self, axis: int, other: npt.NDArray[np.float64], step: int, limit: int
    ) -> tuple[float, tuple[int, ...]]:
        edges, positions = self._candidates(axis, step)
        if len(edges) > MAX_CANDIDATES:
            kept = np.linspace(0, len(edges) - 1, MAX_CANDIDATES).round().astype(np.int64)
            edges, positions = edges[kept], np.searchsorted(kept, positions)
        real = self.sizes[0].astype(np.float64) * self.sizes[1]
        weight = self.weight / self.weight.sum()
        mean = float(weight @ real) or 1.0
        costs = padding_costs(edges, positions, other / mean, real / mean, weight, self.tail)
        return least_cost_edges(edges.tolist(), costs, limit)

    def _candidates(self, axis: int, step: int) -> tuple[IntArray, IntArray]:
        """The candidate buckets, the last one the maximum, and the position of each batch's."""
        # A batch that was never seen makes no candidate; it is at the position of the next one.
        sizes = self.sizes[axis]
        rounded = np.minimum(round_up(sizes, step), self.maxima[axis])
        edges = np.unique(np.append(rounded[self.weight > 0], self.maxima[axis]))
        return edges, np.searchsorted(edges, rounded)

    def _exact_weight(self) -> Weights:
        """The weights: integers where no sum of padded tokens can exceed 64 bits."""
        largest = float(self.weight.sum(dtype=np.float64)) * math.prod(map(float, self.maxima))
        return self.weight if largest < 1 << 62 else self.weight.astype(np.float64)
