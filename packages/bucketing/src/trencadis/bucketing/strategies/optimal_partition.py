"""The bucket edges of least cost, by dynamic programming.

`least_padding_edges` is for the mean padding, `least_cost_edges` for any cost of a bucket.

For the mean padding, a bucket costs its edge times the weight of the lengths it holds. The best k
buckets for the first n edges are a last bucket after the best k - 1 buckets for the first i edges,
for the best i. As a function of the last edge, the cost of each i is a line, so the best i for
every n is read from the lower envelope of those lines in one sweep. The work per bucket is linear
in the number of edges. For any other cost, every i is tried for every n. Both results are the
optimum, not an approximation.
"""

from __future__ import annotations

import itertools
import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trencadis.bucketing.rounding import IntArray

Floats: TypeAlias = npt.NDArray[np.float64]


def least_padding_edges(edges: list[int], weights: list[float], limit: int) -> tuple[int, ...]:
    """At most `limit` of `edges` to which the lengths pad least; the last edge is always chosen.

    Of choices that pad equally, one with the fewest edges.

    Args:
        edges: candidates for a bucket, increasing.
        weights: the total weight of the lengths above the previous edge and up to each edge.
            Integer weights are added exactly.
        limit: the greatest number of edges to choose.
    """
    below = [0, *itertools.accumulate(weights)]
    costs = [0, *(edge * weight for edge, weight in zip(edges, below[1:], strict=True))]
    begins_per_layer: list[list[int]] = []
    for layer in range(2, min(limit, len(edges)) + 1):
        extended, begins = _add_bucket(costs, edges, below, layer)
        if extended[-1] >= costs[-1]:  # once another bucket saves nothing, no further one does
            break
        begins_per_layer.append(begins)
        costs = extended
    return _chosen_edges(edges, begins_per_layer)


def least_cost_edges(edges: list[int], costs: Floats, limit: int) -> tuple[float, tuple[int, ...]]:
    """The least cost, and at most `limit` of `edges` that have it; the last edge is always chosen.

    Of choices that cost the same up to rounding, one with the fewest edges.

    Args:
        edges: candidates for a bucket, increasing.
        costs: one row per edge before the first of a bucket (the first row: none), one column per
            last edge: what the bucket costs; infinite where it would be empty.
        limit: the greatest number of edges to choose.
    """
    best = costs[0]
    # What rounding can make of equal costs.
    least_saving = 1e-12 * float(best[-1])
    begins_per_layer: list[list[int]] = []
    for _ in range(2, min(limit, len(edges)) + 1):
        before = np.concatenate([[math.inf], best[:-1]])
        totals = before[:, np.newaxis] + costs
        begins = totals.argmin(axis=0)
        extended = np.take_along_axis(totals, begins[np.newaxis], axis=0)[0]
        if extended[-1] >= best[-1] - least_saving:
            break
        begins_per_layer.append([0, *begins.tolist()])
        best = extended
    return float(best[-1]), _chosen_edges(edges, begins_per_layer)


def padding_costs(
    edges: IntArray,
    positions: IntArray,
    other: Floats,
    real: Floats,
    weight: Floats,
    tail: float,
) -> Floats:
    """What every possible bucket of one axis costs, for `least_cost_edges`.

    A batch of `real` tokens in a bucket that ends at e has p = e × `other` − `real` tokens of
    padding, and costs its weight × (p + `tail` × p²).

    Args:
        edges: candidates for a bucket, increasing.
        positions: for every batch, the position of the smallest edge that holds it.
        other: for every batch, the size that it is padded to on the other axis.
        real: for every batch, its tokens before padding.
        weight: how often each batch came.
        tail: the weight of the squares.
    """

    def between(values: Floats) -> Floats:
        """The sum of `values` over the batches after each edge (rows) up to each edge (columns)."""
        sums = np.zeros(len(edges) + 1)
        np.add.at(sums, positions + 1, values)
        sums = np.cumsum(sums)
        return sums[np.newaxis, 1:] - sums[:-1, np.newaxis]

    last = edges.astype(np.float64)
    costs = last * between(weight * other) - between(weight * real)
    squares = last**2 * between(weight * other**2)
    squares -= 2 * last * between(weight * other * real)
    squares += between(weight * real**2)
    # Rounding may leave sums of no padding below 0.
    costs = np.maximum(costs, 0) + tail * np.maximum(squares, 0)
    costs[np.tril_indices(len(edges), -1)] = math.inf
    return costs


def _chosen_edges(edges: list[int], begins_per_layer: list[list[int]]) -> tuple[int, ...]:
    """The edges of the best choice, followed back from the last edge."""
    chosen, end = [edges[-1]], len(edges)
    for begins in reversed(begins_per_layer):
        end = begins[end]
        chosen.append(edges[end - 1])
    return tuple(reversed(chosen))


def _add_bucket(
    costs: list[float], edges: list[int], below: list[float], layer: int
) -> tuple[list[float], list[int]]:
    """The least cost of the first n edges with one bucket more, and where that bucket begins.

    For a bucket that begins after edge i and ends at edge n, the cost is
    `costs[i] - edges[n] * below[i]`, plus a term that depends on n alone. That is a line in
    edges[n]. Each further i has a steeper line, and edges[n] only grows. So lines are appended
    to the envelope, and lines at its front are dropped for good.
    """
    best, begins = [math.inf] * len(costs), [0] * len(costs)
    envelope: list[int] = []
    front = 0
    for end in range(layer, len(costs)):
        new = end - 1
        while len(envelope) - front >= 2:
            a, b = envelope[-2], envelope[-1]
            if (costs[new] - costs[a]) * (below[b] - below[a]) > (costs[b] - costs[a]) * (
                below[new] - below[a]
            ):
                break
            envelope.pop()
        envelope.append(new)
        edge = edges[end - 1]
        while front + 1 < len(envelope) and (
            costs[envelope[front + 1]] - edge * below[envelope[front + 1]]
            <= costs[envelope[front]] - edge * below[envelope[front]]
        ):
            front += 1
        begin = envelope[front]
        best[end] = costs[begin] + edge * (below[end] - below[begin])
        begins[end] = begin
    return best, begins
