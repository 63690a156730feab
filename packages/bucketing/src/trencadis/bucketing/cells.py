"""The cells of a grid: shapes between neighbouring values of every axis, which share one answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Shape: TypeAlias = tuple[int, ...]


def cell_edges(values: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """The least and the greatest size of each stretch up to `limit` that one value answers for.

    Where `limit` is past the last value, the last stretch is the one that none answers for.
    """
    uppers = [*(value for value in values if value < limit), limit]
    lowers = [0, *(upper + 1 for upper in uppers[:-1])]
    return list(zip(lowers, uppers, strict=True))


def cells(edges: Sequence[Sequence[tuple[int, int]]]) -> Iterator[tuple[Shape, Shape]]:
    """The least and the greatest shape of every cell of the product, in order."""
    for cell in itertools.product(*edges):
        low, high = zip(*cell, strict=True)
        yield low, high


def cheapest_dominating(
    values: Sequence[Sequence[int]], shapes: Sequence[Shape], costs: Sequence[float]
) -> npt.NDArray[np.int32]:
    """The answer for every cell of the product of `values`, and for what is past each axis.

    Returns:
        Indices into `shapes`, -1 where none dominates; per axis one more than it has values. Of
        equally cheap shapes the first wins.
    """
    cheapest_first = np.argsort(np.asarray(costs), kind="stable").astype(np.int32)
    ranks = np.empty_like(cheapest_first)
    ranks[cheapest_first] = np.arange(len(shapes), dtype=np.int32)
    columns = zip(values, np.asarray(shapes).T, strict=True)
    own_cells = tuple(np.searchsorted(axis, column) for axis, column in columns)
    best = np.full([len(axis) + 1 for axis in values], len(shapes), dtype=np.int32)
    best[own_cells] = ranks
    # A shape serves its own cell and every cell below: sweep the best rank down each axis.
    for axis in range(best.ndim):
        best = np.flip(np.minimum.accumulate(np.flip(best, axis), axis=axis), axis)
    return np.append(cheapest_first, np.int32(-1))[best]
