"""The look-up table of a grid: the answer for every cell, computed once.

A cell is the set of shapes between two neighbouring values of every axis. All shapes of a cell
have the same answer.
"""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.grid.bucket import Shape

MAX_CELLS = 1 << 24
"""Of the full product, before any filter. A server captures at most a few thousand graphs. At
this size, a grid takes half a minute and some hundred MiB to make."""

MAX_TABULATED = 1 << 20
"""Up to this size, an axis has a table of every size, of two or four bytes each. A longer axis is
searched by bisection, which takes about half as long again."""


class CoverageGap(NamedTuple):
    """Shapes without a bucket: from the smallest to the largest, size by size."""

    low: Shape
    high: Shape


class Positions(Protocol):
    """For a size along an axis, 0 or more, the position of the smallest value that holds it.

    Above the last value: the number of values, or `IndexError`.
    """

    def __getitem__(self, size: int, /) -> int: ...


class SearchedPositions:
    """Positions along an axis that is too long for a table."""

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[int]) -> None:
        self._values = values

    def __getitem__(self, size: int, /) -> int:
        return bisect_left(self._values, operator.index(size))


def positions(values: Sequence[int]) -> Positions:
    """The positions along an axis with these values."""
    if values[-1] > MAX_TABULATED:
        return SearchedPositions(values)
    table = np.searchsorted(values, np.arange(values[-1] + 1))
    # An array returns plain ints, and a short one stays in the processor's cache.
    return array("H" if len(values) <= 1 << 16 else "I", table.tolist())


def check_cell_count(axes: Mapping[str, Sequence[int]]) -> int:
    """The number of cells of a grid.

    Raises:
        BucketingError: no axes, or more than `MAX_CELLS` cells.
    """
    if not axes:
        raise BucketingError("a grid without axes has no buckets: give at least one axis")
    count = math.prod(map(len, axes.values()))
    if count > MAX_CELLS:
        sizes = " × ".join(f"{len(values)} {name}" for name, values in axes.items())
        raise BucketingError(
            f"a grid of {sizes} sizes has {count} cells, more than the {MAX_CELLS} that fit a "
            "look-up table: raise the step of the longest axis, or use the exp strategy"
        )
    return count


def cell_edges(values: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """The smallest and the largest size of each cell along one axis, up to `limit`.

    Where `limit` is above the last value, the last cell has no bucket.
    """
    uppers = [*(value for value in values if value < limit), limit]
    lowers = [0, *(upper + 1 for upper in uppers[:-1])]
    return list(zip(lowers, uppers, strict=True))


def cells(edges: Sequence[Sequence[tuple[int, int]]]) -> Iterator[tuple[Shape, Shape]]:
    """The smallest and the largest shape of every cell of the product, in order."""
    for cell in itertools.product(*edges):
        low, high = zip(*cell, strict=True)
        yield low, high


def cheapest_dominating(
    values: Sequence[Sequence[int]], shapes: Sequence[Shape], costs: Sequence[float]
) -> npt.NDArray[np.int32]:
    """For every cell of the product of `values`, the cheapest shape that is large enough.

    Returns:
        Indices into `shapes`, -1 where no shape is large enough. Of equally cheap shapes, the
        first.
    """
    cheapest_first = np.argsort(np.asarray(costs), kind="stable").astype(np.int32)
    ranks = np.empty_like(cheapest_first)
    ranks[cheapest_first] = np.arange(len(shapes), dtype=np.int32)
    columns = zip(values, np.asarray(shapes).T, strict=True)
    own_cells = tuple(np.searchsorted(axis, column) for axis, column in columns)
    best = np.full([len(axis) for axis in values], len(shapes), dtype=np.int32)
    best[own_cells] = ranks
    # A shape holds its own cell and every smaller one: carry the best rank down each axis.
    for axis in range(best.ndim):
        best = np.flip(np.minimum.accumulate(np.flip(best, axis), axis=axis), axis)
    return np.append(cheapest_first, np.int32(-1))[best]


def nested_answers(indices: list[Any], answers: Sequence[Any]) -> tuple[Any, ...]:
    """`indices`, nested lists with one level per axis, as nested tuples of `answers`."""
    if indices and isinstance(indices[0], list):
        return tuple(nested_answers(row, answers) for row in indices)
    return tuple(map(answers.__getitem__, indices))
