"""The grid: a set of buckets that answers, for any shape, which bucket to pad it to.

The answer for every cell is computed when the grid is made, and so is the position of every size
along its axis. A look-up is then one index per axis and one walk into a nested table, for any
number of buckets and any holes that the filters leave.
"""

from __future__ import annotations

import itertools
import math
import operator
import pickle
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias

from trencadis.bucketing.errors import BucketingError, UnknownAxis, shown
from trencadis.bucketing.grid.bucket import Bucket, Cost, Shape, element_count
from trencadis.bucketing.grid.fallback_sizes import fallback_size
from trencadis.bucketing.grid.lookup_table import (
    CoverageGap,
    cell_edges,
    cells,
    cheapest_dominating,
    check_cell_count,
    nested_answers,
    positions,
)
from trencadis.bucketing.grid.reachable_shapes import Reachable, every_shape
from trencadis.bucketing.shapes import check_range_length, checked_names, checked_sizes
from trencadis.bucketing.validators import instance_of, plain_number

Filter: TypeAlias = Callable[[Bucket], bool]

_MOST_DESCRIBED = 1000
"""Buckets in a log line: some 14 kB of text. More are more than a server captures."""


class BucketGrid:
    """An immutable set of buckets with named axes, safe to share between threads.

    A copy is the grid itself. To pickle it, `reachable` and `cost` must be functions of a module.

    Args:
        axes: the sizes of each axis, increasing; the buckets are their full product, except
            those that `filters` or `reachable` drop.
        filters: a bucket is dropped if any of these returns False for it.
        reachable: a bucket is dropped if no shape that can come pads to it. The function gets the
            smallest and the largest shape that pad to the bucket in the full product, and says
            whether any shape between them can come.
        limits: the largest size on each axis that can come, which `coverage_gaps` proves; by
            default the axis's last size.
        cost: what running a bucket costs, in any unit; `find` returns the cheapest.
        phase: what the grid is for, such as "prompt"; `describe` names it.
        settings_line: the log line of the settings the axes came from; `describe` gives it first.

    Raises:
        BucketingError: an axis without sizes, or with a negative or repeated one; a cost that is
            not a number; filters that drop every bucket; a product too large to tabulate; an
            argument of the wrong type.
    """

    __slots__ = (
        "_added",
        "_axes",
        "_buckets",
        "_cost",
        "_limits",
        "_phase",
        "_positions",
        "_reachable",
        "_settings_line",
        "_table",
        "_values",
    )

    def __init__(
        self,
        axes: Mapping[str, Sequence[int]],
        *,
        filters: Iterable[Filter] = (),
        reachable: Reachable = every_shape,
        limits: Sequence[int] | None = None,
        cost: Cost = element_count,
        phase: str = "",
        settings_line: str = "",
    ) -> None:
        instance_of(Mapping).checked("axes", axes)
        values = {name: _checked_axis(name, sizes) for name, sizes in axes.items()}
        count = check_cell_count(values)
        names, keep = checked_names(values), _checked_functions(filters, reachable, cost)
        edges = [cell_edges(sizes, sizes[-1]) for sizes in values.values()]
        product = (Bucket(names, high) for low, high in cells(edges) if reachable(low, high))
        buckets = [bucket for bucket in product if all(allows(bucket) for allows in keep)]
        if not buckets:
            raise BucketingError(
                f"none of the {count} buckets of the {phase or 'bucket'} grid passes its filters: "
                f"raise the limits they come from, or lower the min of {', '.join(names)}"
            )
        self._set(values, buckets, reachable, limits, cost, phase, settings_line)

    @classmethod
    def from_shapes(
        cls,
        axes: Sequence[str],
        shapes: Iterable[Sequence[int]],
        *,
        reachable: Reachable = every_shape,
        limits: Sequence[int] | None = None,
        cost: Cost = element_count,
        phase: str = "",
        settings_line: str = "",
    ) -> BucketGrid:
        """A grid of these shapes alone, such as those of a bucket file, in any order.

        Raises:
            BucketingError: no shape, or as for the class.
        """
        names = checked_names(axes)
        instance_of(Iterable).checked("shapes", shapes)
        _checked_functions((), reachable, cost)
        given = {Bucket(names, shape) for shape in shapes}
        buckets = sorted(given, key=operator.attrgetter("shape"))
        if not buckets:
            raise BucketingError(f"no shape for the {phase or 'bucket'} grid: give at least one")
        columns = zip(names, zip(*(bucket.shape for bucket in buckets), strict=True), strict=True)
        values = {name: _checked_axis(name, sorted(set(sizes))) for name, sizes in columns}
        check_cell_count(values)
        grid = cls.__new__(cls)
        grid._set(values, buckets, reachable, limits, cost, phase, settings_line)
        return grid

    def _set(
        self,
        values: dict[str, tuple[int, ...]],
        buckets: list[Bucket],
        reachable: Reachable,
        limits: Sequence[int] | None,
        cost: Cost,
        phase: str,
        settings_line: str,
    ) -> None:
        self._added: tuple[tuple[float, Bucket], ...] = ()
        """The buckets of `with_bucket` with their costs, the cheapest first."""
        self._axes = tuple(values)
        self._values = tuple(values.values())
        self._buckets = tuple(buckets)
        self._reachable = reachable
        ends = [sizes[-1] for sizes in self._values]
        self._limits = self._checked_shape("limits", ends if limits is None else limits)
        self._cost = cost
        self._phase = phase
        self._settings_line = settings_line
        shapes = [bucket.shape for bucket in buckets]
        answers = cheapest_dominating(self._values, shapes, _checked_costs(buckets, cost))
        self._positions = tuple(map(positions, self._values))
        # One level of tuples per axis; None where no bucket is large enough.
        self._table = nested_answers(answers.tolist(), (*self._buckets, None))

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, in the order of every shape."""
        return self._axes

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, sorted by shape."""
        return self._buckets

    def values(self, axis: str) -> tuple[int, ...]:
        """The sizes of one axis, increasing. Raises `UnknownAxis`."""
        if not isinstance(axis, str) or axis not in self._axes:
            raise UnknownAxis(f"no axis {shown(axis)}: this grid has {', '.join(self._axes)}")
        return self._values[self._axes.index(axis)]

    def find(self, shape: Sequence[int]) -> Bucket | None:
        """The cheapest bucket that is at least `shape` on every axis; of equals, the first.

        Args:
            shape: one size per axis, in axis order.

        Returns:
            None for a bucket miss: no bucket is large enough. `fallback` then gives a shape.

        Raises:
            BucketingError: not one integer per axis, or a negative one.
        """
        answer: Any = self._table
        try:
            if len(shape) != len(self._axes):
                self._checked_shape("shape", shape)
            # The lengths are equal, as checked above; strict= would take a third of the time.
            for axis_positions, size in zip(self._positions, shape):  # noqa: B905
                if size < 0:
                    raise BucketingError(
                        f"shape {shown(tuple(shape))} is negative: give sizes of 0 or more"
                    )
                answer = answer[axis_positions[size]]
        except IndexError:
            answer = None
        except TypeError:
            raise BucketingError(
                f"shape {shown(shape)} is not a sequence of integers: give one size per axis"
            ) from None
        bucket: Bucket | None = answer
        return self._cheaper(shape, bucket) if self._added else bucket

    def _cheaper(self, shape: Sequence[int], tabulated: Bucket | None) -> Bucket | None:
        """The bucket for a shape among those that were added and the one in the table."""
        sizes = self._checked_shape("shape", shape)
        best = (math.inf, None) if tabulated is None else (self._cost(tabulated), tabulated.shape)
        for cost, bucket in self._added:
            if best[1] is not None and (cost, bucket.shape) > best:
                break
            if all(map(operator.le, sizes, bucket.shape)):
                return bucket
        return tabulated

    def with_bucket(self, shape: Sequence[int]) -> BucketGrid:
        """This grid with one more bucket, such as that of a `fallback`; made in microseconds.

        For a host that compiles a shape after a bucket miss. `values` do not change, and `find`
        looks at each added bucket in turn: make a grid of all shapes where there are many.

        Raises:
            BucketingError: as for `find`; a cost that is not a number.
        """
        bucket = Bucket(self._axes, self._checked_shape("shape", shape))
        position = bisect_left(self._buckets, bucket)
        if self._buckets[position : position + 1] == (bucket,):
            return self
        (cost,) = _checked_costs([bucket], self._cost)
        grid = BucketGrid.__new__(BucketGrid)
        for name in self.__slots__:
            setattr(grid, name, getattr(self, name))
        grid._buckets = (*self._buckets[:position], bucket, *self._buckets[position:])
        grid._added = tuple(sorted((*self._added, (cost, bucket))))
        return grid

    def fallback(self, shape: Sequence[int]) -> Bucket:
        """The bucket to compile after a bucket miss, each size grown as `fallback_size` says.

        A size within its axis is not grown beyond the axis's last value. A larger shape never has
        a smaller fallback, and a fallback is its own fallback.

        Raises:
            BucketingError: as for `find`.
        """
        sizes = zip(self._axes, self._values, self._checked_shape("shape", shape), strict=True)
        return Bucket(
            self._axes, [fallback_size(name, size, values[-1]) for name, values, size in sizes]
        )

    def padding(self, shape: Sequence[int]) -> float:
        """The cost of padding `shape`, relative to its own cost: 0.25 is a quarter more."""
        bucket = self.find(shape) or self.fallback(shape)
        padded, real = self._cost(bucket), self._cost(Bucket(self._axes, shape))
        if real == 0:
            return 0.0 if padded == 0 else math.inf
        return padded / real - 1

    def coverage_gaps(
        self, limits: Sequence[int] | None = None, reachable: Reachable | None = None
    ) -> tuple[CoverageGap, ...]:
        """The cells that have reachable shapes but no bucket; an empty result proves full coverage.

        Every shape up to `limits` is in one cell, and all shapes of a cell have the same answer,
        so looking each cell up once is a proof for all shapes.

        Args:
            limits: the largest size on each axis that can come; by default the grid's own limits:
                for a grid of `prompt_grid`, `decode_grid` or `sequence_grid` those of serving.
            reachable: as for the class; by default the grid's own.

        Returns:
            The smallest and the largest shape of each such cell.

        Raises:
            BucketingError: not one limit per axis.
        """
        ends = self._limits if limits is None else self._checked_shape("limits", limits)
        edges = self._cell_edges(ends)
        can_come = self._reachable if reachable is None else reachable
        return tuple(
            CoverageGap(low, high)
            for low, high in cells(edges)
            if self.find(high) is None and can_come(low, high)
        )

    def used_buckets(self) -> tuple[Bucket, ...]:
        """The buckets that some reachable shape is padded to.

        A grid of a full product has no others. A list of buckets may: such as a batch whose tokens
        are above the limit, while every shorter prompt in it has a bucket of its own.
        """
        edges = self._cell_edges(self._limits)
        used: set[Bucket] = set()
        for low, high in cells(edges):
            bucket = self.find(high)
            if bucket is None or bucket in used or not self._reachable(low, high):
                continue
            # The cell can come, but can it be padded to this bucket?
            if self._reachable(low, bucket.shape):
                used.add(bucket)
        return tuple(bucket for bucket in self._buckets if bucket in used)

    def _cell_edges(self, ends: Shape) -> list[list[tuple[int, int]]]:
        """The cells along each axis up to these sizes, also those of the added buckets."""
        added = [bucket.shape for _, bucket in self._added]
        columns = zip(*added, strict=True) if added else [()] * len(self._axes)
        return [
            cell_edges(sorted({*values, *column}), end)
            for values, column, end in zip(self._values, columns, ends, strict=True)
        ]

    def describe(self) -> tuple[str, ...]:
        """The log lines of the grid: its settings, if given, and its first thousand buckets."""
        shapes = ", ".join(str(bucket.shape) for bucket in self._buckets[:_MOST_DESCRIBED])
        shapes += ", …" if len(self._buckets) > _MOST_DESCRIBED else ""
        kind = f"{self._phase} buckets" if self._phase else "buckets"
        generated = f"Generated {len(self._buckets)} {kind}: [{shapes}]"
        return (self._settings_line, generated) if self._settings_line else (generated,)

    def _checked_shape(self, what: str, shape: Sequence[int]) -> Shape:
        sizes = checked_sizes(what, shape)
        if len(sizes) != len(self._axes):
            raise BucketingError(
                f"{what} {shown(sizes)} has {len(sizes)} sizes for the axes "
                f"{', '.join(self._axes)}: give one size per axis"
            )
        return sizes

    def __copy__(self) -> BucketGrid:
        return self

    def __deepcopy__(self, memo: object) -> BucketGrid:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Raises `BucketingError` for a function that cannot be pickled, such as a lambda."""
        self._require_picklable("cost", self._cost)
        self._require_picklable("reachable", self._reachable)
        return super().__reduce_ex__(max(2, operator.index(protocol)))  # 2: the first with slots

    def _require_picklable(self, name: str, function: object) -> None:
        try:
            pickle.dumps(function)
        except Exception as error:  # whatever the function's own protocol raises
            raise BucketingError(
                f"{self!r} cannot be pickled, because its {name} {shown(function)} cannot "
                f"({error}): define that function in a module"
            ) from error

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __repr__(self) -> str:
        pairs = zip(self._axes, self._values, strict=True)
        product = " × ".join(f"{len(values)} {name}" for name, values in pairs)
        return f"<BucketGrid {self._phase}: {len(self)} buckets, {product}>"


def _checked_axis(name: str, sizes: Iterable[int]) -> tuple[int, ...]:
    """The sizes of one axis as ints, strictly increasing. Raises `BucketingError` for others."""
    values = checked_sizes(f"axis {name}", sizes)
    check_range_length(len(values), "give fewer")
    if not values:
        raise BucketingError(f"axis {name} has no sizes: give at least one")
    if any(low >= high for low, high in itertools.pairwise(values)):
        raise BucketingError(
            f"axis {name} has sizes {shown(values)}: give them increasing, each once"
        )
    return values


def _checked_functions(
    filters: Iterable[Filter], reachable: Reachable, cost: Cost
) -> tuple[Filter, ...]:
    instance_of(Iterable).checked("filters", filters)
    functions: list[Filter] = []
    for function in itertools.chain((reachable, cost), filters):
        if not callable(function):
            raise BucketingError(
                f"{shown(function)} is not a function: "
                "give functions as filters, reachable and cost"
            )
        functions.append(function)
    return tuple(functions[2:])


def _checked_costs(buckets: Sequence[Bucket], cost: Cost) -> list[float]:
    costs = [plain_number(cost(bucket)) for bucket in buckets]
    for bucket, value in zip(buckets, costs, strict=True):
        if not isinstance(value, (int, float)) or math.isnan(value):
            raise BucketingError(f"the cost of {bucket} is not a number: correct the cost function")
    return costs
