"""The cells of a grid: shapes between neighbouring values of every axis, which share one answer."""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Shape: TypeAlias = tuple[int, ...]

# Up to this size an axis has a table of every size, of two or four bytes each; a longer one is
# searched, which takes about half as long again.
MAX_TABULATED = 1 << 20


class Positions(Protocol):
    """For a size along an axis, 0 or more, the position of the least value that reaches it.

    Past the last value: the number of values, or `IndexError`.
    """

    def __getitem__(self, size: int, /) -> int: ...


class SearchedPositions:
    """Positions along an axis too long for a table."""

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[int]) -> None:
        self._values = values

    def __getitem__(self, size: int, /) -> int:
        return bisect_left(self._values, size)


def positions(values: Sequence[int]) -> Positions:
    """The positions along an axis of these values."""
    if values[-1] > MAX_TABULATED:
        return SearchedPositions(values)
    table = np.searchsorted(values, np.arange(values[-1] + 1))
    # Plain ints come out of an array, and a short one stays in the processor's cache.
    return array("H" if len(values) <= 1 << 16 else "I", table.tolist())


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
    """The answer for every cell of the product of `values`.

    Returns:
        Indices into `shapes`, -1 where none dominates. Of equally cheap shapes the first wins.
    """
    cheapest_first = np.argsort(np.asarray(costs), kind="stable").astype(np.int32)
    ranks = np.empty_like(cheapest_first)
    ranks[cheapest_first] = np.arange(len(shapes), dtype=np.int32)
    columns = zip(values, np.asarray(shapes).T, strict=True)
    own_cells = tuple(np.searchsorted(axis, column) for axis, column in columns)
    best = np.full([len(axis) for axis in values], len(shapes), dtype=np.int32)
    best[own_cells] = ranks
    # A shape serves its own cell and every cell below: sweep the best rank down each axis.
    for axis in range(best.ndim):
        best = np.flip(np.minimum.accumulate(np.flip(best, axis), axis=axis), axis)
    return np.append(cheapest_first, np.int32(-1))[best]
