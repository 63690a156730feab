"""Ranges fitted to the lengths that were really seen, by dynamic programming.

Padding every length up to its bucket costs, bucket by bucket, its value times the number of lengths
it takes. With k buckets the best last one extends a best choice of k - 1 before it; as a function
of the length where the last one begins, each such extension is a line, so the best of them for
every end is read off the lower envelope of those lines in one sweep. A layer is linear in the
number of candidate values, and the result is the optimum, not an approximation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trencadis.bucketing.errors import BucketingError

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


def fitted_range(
    lengths: npt.ArrayLike,
    step: int,
    max: int,
    limit: int,
    weights: npt.ArrayLike | None = None,
) -> tuple[int, ...]:
    """The range of at most `limit` buckets that pads these lengths least.

    Every bucket is a multiple of `step`, but for `max`, which always ends the range. Of ranges
    that pad equally, one with the fewest buckets is given.

    Args:
        lengths: what was seen, one entry per batch or request, each 0 to `max`.
        step: the granularity of the buckets, 1 or more.
        max: the largest length that may ever come, seen or not.
        limit: the greatest number of buckets.
        weights: how often, or at what cost per padded element, each length was seen; default 1.

    Raises:
        BucketingError: no lengths, or one that is negative, NaN or above `max`; a bad weight; a
            step or limit below 1.
    """
    seen, weight = _checked(lengths, weights, step, max, limit)
    edges, heights = _histogram(seen, weight, step, max)
    return _best_edges(edges, heights, limit)


def fitted_axes(
    shapes: npt.ArrayLike,
    steps: tuple[int, int],
    maxima: tuple[int, int],
    budget: int,
    weights: npt.ArrayLike | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two axes, such as batch and length, that pad these batches least within `budget` graphs.

    A batch of shape (b, l) costs the product of the two buckets it is padded to. For every way to
    split the budget the axes are fitted in turn, each exactly and to what the other makes of the
    batches, until neither gets better. That is the least padding for each axis given the other;
    the pair is not proven to be the best of all pairs.

    Args:
        shapes: the batches seen, one row each, two columns.
        steps: granularity per axis.
        maxima: the largest size per axis that may ever come.
        budget: the greatest number of buckets in the product of the two axes.
        weights: how often each batch was seen; default 1.

    Raises:
        BucketingError: as for `fitted_range`.
    """
    rows = np.asarray(shapes)
    if rows.ndim != 2 or rows.shape[1] != 2:
        raise BucketingError(f"batches of shape {rows.shape} are not rows of two sizes: give two")
    columns = [_checked(rows[:, i], weights, steps[i], maxima[i], budget) for i in (0, 1)]
    first, second, weight = columns[0][0], columns[1][0], columns[0][1]
    _, *axes = min(
        _alternate((first, second), weight, steps, maxima, counts) for counts in _splits(budget)
    )
    return axes[0], axes[1]


def padded(values: Sequence[int], lengths: Ints) -> Ints:
    """Each length rounded up to its bucket; none may lie above the last one."""
    edges = np.asarray(values, dtype=np.int64)
    return edges[np.searchsorted(edges, lengths)]


def _splits(budget: int) -> list[tuple[int, int]]:
    # For one count of the second axis only the largest of the first is worth trying.
    seconds = sorted({budget // first for first in range(1, budget + 1)})
    return [(budget // second, second) for second in seconds]


def _alternate(
    sizes: tuple[Ints, Ints],
    weight: Ints | Floats,
    steps: tuple[int, int],
    maxima: tuple[int, int],
    counts: tuple[int, int],
) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    axes: list[tuple[int, ...]] = [(), ()]
    least = math.inf
    best: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    cost = weight * sizes[1]
    while True:
        for axis in (0, 1):
            edges, heights = _histogram(sizes[axis], cost, steps[axis], maxima[axis])
            axes[axis] = _best_edges(edges, heights, counts[axis])
            cost = weight * padded(axes[axis], sizes[axis])
        total = float((cost * padded(axes[0], sizes[0])).sum())
        if total >= least:
            return least, *best
        least, best = total, (axes[0], axes[1])


def _histogram(
    lengths: Ints, weights: Ints | Floats, step: int, max: int
) -> tuple[list[int], list[float]]:
    """The values worth a bucket, the last one `max`, and the weight that ends at each."""
    ends = np.minimum(-(-lengths // step) * step, max)
    edges, which = np.unique(np.append(ends, max), return_inverse=True)
    heights = np.zeros(len(edges), dtype=weights.dtype)
    np.add.at(heights, which[:-1], weights)
    # Python numbers from here on: whole weights stay exact, however large the sums.
    return edges.tolist(), heights.tolist()


def _best_edges(edges: list[int], heights: list[float], limit: int) -> tuple[int, ...]:
    total = [0.0 if isinstance(heights[0], float) else 0]
    for height in heights:
        total.append(total[-1] + height)
    costs = [edge * below for edge, below in zip(edges, total[1:], strict=True)]
    costs.insert(0, total[0])
    choices: list[list[int]] = []
    for layer in range(2, min(limit, len(edges)) + 1):
        extended, begins = _extend(costs, edges, total, layer)
        if extended[-1] >= costs[-1]:  # once a bucket more is no gain, none ever is
            break
        choices.append(begins)
        costs = extended
    chosen, end = [edges[-1]], len(edges)
    for begins in reversed(choices):
        end = begins[end]
        chosen.append(edges[end - 1])
    return tuple(reversed(chosen))


def _extend(
    costs: list[float], edges: list[int], total: list[float], layer: int
) -> tuple[list[float], list[int]]:
    """The least cost of the first n edges with one bucket more, and where that bucket begins.

    For a bucket that begins after edge i and ends at edge n, the cost is
    `costs[i] - edges[n] * total[i]`, up to a term of n alone: a line in edges[n], steeper for
    every further i, asked at ever larger edges. So lines enter the envelope at its end and leave
    it at its front for good.
    """
    best, begins = [math.inf] * len(costs), [0] * len(costs)
    envelope: list[int] = []
    front = 0
    for end in range(layer, len(costs)):
        new = end - 1
        while len(envelope) - front >= 2:
            a, b = envelope[-2], envelope[-1]
            if (costs[new] - costs[a]) * (total[b] - total[a]) > (costs[b] - costs[a]) * (
                total[new] - total[a]
            ):
                break
            envelope.pop()
        envelope.append(new)
        edge = edges[end - 1]
        while front + 1 < len(envelope) and (
            costs[envelope[front + 1]] - edge * total[envelope[front + 1]]
            <= costs[envelope[front]] - edge * total[envelope[front]]
        ):
            front += 1
        begin = envelope[front]
        best[end] = costs[begin] + edge * (total[end] - total[begin])
        begins[end] = begin
    return best, begins


def _checked(
    lengths: npt.ArrayLike, weights: npt.ArrayLike | None, step: int, max: int, limit: int
) -> tuple[Ints, Ints | Floats]:
    for name, value in (("step", step), ("limit", limit)):
        if value < 1:
            raise BucketingError(f"fit {name} {value} must be at least 1: raise it")
    seen = np.asarray(lengths)
    if seen.size == 0:
        raise BucketingError("no lengths to fit: record some traffic, or use the exp strategy")
    numeric = np.issubdtype(seen.dtype, np.number)
    if not numeric or not np.all(np.isfinite(seen)) or np.any(seen != np.floor(seen)):
        raise BucketingError("lengths to fit must be whole numbers: drop NaN and fractions")
    whole = seen.astype(np.int64)
    if whole.min() < 0 or whole.max() > max:
        raise BucketingError(
            f"lengths to fit run from {whole.min()} to {whole.max()}, outside 0 to max {max}: "
            "raise max, or drop them"
        )
    if weights is None:
        return whole, np.ones(len(whole), dtype=np.int64)
    given = np.asarray(weights)
    exact = np.issubdtype(given.dtype, np.integer)
    weight: Ints | Floats = given.astype(np.int64) if exact else given.astype(np.float64)
    if len(weight) != len(whole) or not np.all(np.isfinite(weight)) or not np.all(weight >= 0):
        raise BucketingError(
            f"the {len(weight)} weights must be finite, not negative, and one for each of the "
            f"{len(whole)} lengths: mend them"
        )
    if not weight.any():
        raise BucketingError("all weights are 0, which leaves nothing to fit: give a positive one")
    kept = weight > 0
    return whole[kept], weight[kept]
