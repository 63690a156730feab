"""The grid: a set of buckets that answers, for any shape, which bucket to pad it to.

The answer for every cell between two neighbouring values of every axis is worked out once, when
the grid is made, and so is the position of every size along its axis; a look-up is then one index
per axis and one walk into that table, however many buckets there are and whatever holes the
filters have left.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from trencadis.bucketing.bucket import Bucket
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.lookup_table import (
    Shape,
    cell_edges,
    cells,
    cheapest_dominating,
    positions,
)
from trencadis.bucketing.rounding import round_up
from trencadis.bucketing.validators import checked_axis

Filter: TypeAlias = Callable[[Bucket], bool]
Cost: TypeAlias = Callable[[Bucket], float]
Reachable: TypeAlias = Callable[[Shape, Shape], bool]

# Of the full product, before any filter. Nobody captures a thousandth as many graphs; at this size
# a grid takes half a minute and some hundred MiB to make.
MAX_CELLS = 1 << 24


def element_count(bucket: Bucket) -> float:
    """The default cost: the product of the sizes, a size of 0 counting as 1."""
    return float(math.prod(size or 1 for size in bucket.shape))


def anything(low: Shape, high: Shape) -> bool:
    """The default of `reachable`: every shape may come."""
    return True


class BucketGrid:
    """An immutable set of buckets with named axes, safe to share between threads.

    Args:
        axes: for each axis, in order, the sizes it may take; their full product is the grid ...
        filters: ... less the buckets for which any of these says no ...
        reachable: ... and less those to which no shape that can ever come would pad. It is given
            the least and the greatest shape that pad to a bucket in the full product, and says
            whether any from the one to the other can come.
        cost: what running a bucket costs, in any unit; `find` answers with the cheapest.
        phase: what the grid is for, such as "prompt"; `describe` names it.
        origin: a line that says from which settings the axes came; `describe` gives it first.

    Raises:
        BucketingError: an axis without values or with a negative or repeated one, a cost that is
            not a number, no bucket left by the filters, or a product too large to tabulate.
    """

    __slots__ = (
        "_axes",
        "_buckets",
        "_cost",
        "_origin",
        "_phase",
        "_positions",
        "_reachable",
        "_table",
        "_values",
    )

    def __init__(
        self,
        axes: Mapping[str, Sequence[int]],
        *,
        filters: Iterable[Filter] = (),
        reachable: Reachable = anything,
        cost: Cost = element_count,
        phase: str = "",
        origin: str = "",
    ) -> None:
        values = {name: checked_axis(name, sizes) for name, sizes in axes.items()}
        count = _checked_count(values)
        names, keep = tuple(values), tuple(filters)
        edges = [cell_edges(sizes, sizes[-1]) for sizes in values.values()]
        product = (Bucket(names, high) for low, high in cells(edges) if reachable(low, high))
        buckets = [bucket for bucket in product if all(allows(bucket) for allows in keep)]
        if not buckets:
            raise BucketingError(
                f"none of the {count} buckets of the {phase or 'bucket'} grid passes its filters: "
                f"raise the limits they come from, or lower the min of {', '.join(names)}"
            )
        self._set(values, buckets, reachable, cost, phase, origin)

    @classmethod
    def from_shapes(
        cls,
        axes: Sequence[str],
        shapes: Iterable[Sequence[int]],
        *,
        reachable: Reachable = anything,
        cost: Cost = element_count,
        phase: str = "",
        origin: str = "",
    ) -> BucketGrid:
        """A grid of just these shapes, such as those of a bucket file, in any order.

        Raises:
            BucketingError: no shape at all, or as for the class.
        """
        buckets = sorted({Bucket(axes, shape) for shape in shapes})
        if not buckets:
            raise BucketingError(f"no shape for the {phase or 'bucket'} grid: give at least one")
        columns = zip(axes, zip(*(bucket.shape for bucket in buckets), strict=True), strict=True)
        values = {name: checked_axis(name, sorted(set(sizes))) for name, sizes in columns}
        _checked_count(values)
        grid = cls.__new__(cls)
        grid._set(values, buckets, reachable, cost, phase, origin)
        return grid

    def _set(
        self,
        values: dict[str, tuple[int, ...]],
        buckets: list[Bucket],
        reachable: Reachable,
        cost: Cost,
        phase: str,
        origin: str,
    ) -> None:
        self._axes = tuple(values)
        self._values = tuple(values.values())
        self._buckets = tuple(buckets)
        self._reachable = reachable
        self._cost = cost
        self._phase = phase
        self._origin = origin
        shapes, costs = [bucket.shape for bucket in buckets], [cost(bucket) for bucket in buckets]
        if any(map(math.isnan, costs)):
            worst = buckets[[math.isnan(price) for price in costs].index(True)]
            raise BucketingError(f"the cost of {worst} is not a number: mend the cost function")
        answers = cheapest_dominating(self._values, shapes, costs)
        self._positions = tuple(map(positions, self._values))
        # One level of tuples per axis; None where the filters have left nothing that dominates.
        self._table = _nested(answers.tolist(), (*self._buckets, None))

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, in the order of every shape."""
        return self._axes

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, sorted by shape."""
        return self._buckets

    @property
    def phase(self) -> str:
        """What the grid is for, such as "prompt" or "decode"; empty where nobody said."""
        return self._phase

    def values(self, axis: str) -> tuple[int, ...]:
        """The sizes that one axis takes, increasing."""
        return self._values[self._axes.index(axis)]

    def find(self, shape: Sequence[int]) -> Bucket | None:
        """The cheapest bucket that dominates `shape`; of equally cheap ones the first in order.

        Args:
            shape: one size per axis, in axis order.

        Returns:
            None where no bucket dominates: `fallback` then says what to compile.

        Raises:
            BucketingError: not one size per axis, or a negative one.
        """
        if len(shape) != len(self._axes):
            raise BucketingError(
                f"shape {tuple(shape)} has {len(shape)} sizes for the axes "
                f"{', '.join(self._axes)}: give one size per axis"
            )
        found: Any = self._table
        try:
            # Of one length by now; strict= alone would take a third of the time.
            for places, size in zip(self._positions, shape):  # noqa: B905
                if size < 0:
                    raise BucketingError(
                        f"shape {tuple(shape)} is negative: give sizes of 0 or more"
                    )
                found = found[places[size]]
        except IndexError:
            return None
        bucket: Bucket | None = found
        return bucket

    def fallback(self, shape: Sequence[int]) -> Bucket:
        """The bucket to use for a shape that no bucket dominates.

        As Gaudi's plugin grows one: each size n is rounded up to a multiple of its step times the
        cube root of n, rounded up, so that ever longer shapes meet ever wider buckets; the step is
        2 for an axis named batch and 32 for any other. Up to the last value of an axis it is not
        grown past it.
        """
        sizes = zip(self._axes, self._values, shape, strict=True)
        return Bucket(self._axes, [_grown(name, size, values[-1]) for name, values, size in sizes])

    def padding(self, shape: Sequence[int]) -> float:
        """What padding adds to the cost of `shape`, as a share of it: 0.25 is a quarter more."""
        bucket = self.find(shape) or self.fallback(shape)
        padded, real = self._cost(bucket), self._cost(Bucket(self._axes, shape))
        if real == 0:
            return 0.0 if padded == 0 else math.inf
        return padded / real - 1

    def cover(
        self, limits: Sequence[int] | None = None, reachable: Reachable | None = None
    ) -> tuple[Shape, ...]:
        """Proof that every reachable shape has a bucket: the cells for which that is not so.

        All shapes between two neighbouring values of every axis have the same answer, so that it
        is enough to ask once for each such cell.

        Args:
            limits: the largest size of any shape, per axis; by default the last of each axis.
            reachable: as for the class, and by default what the grid was made with.

        Returns:
            The greatest shape of each cell that has reachable shapes and no bucket; empty is the
            proof.
        """
        ends = [values[-1] for values in self._values] if limits is None else limits
        edges = [cell_edges(values, end) for values, end in zip(self._values, ends, strict=True)]
        comes = self._reachable if reachable is None else reachable
        return tuple(
            high for low, high in cells(edges) if self.find(high) is None and comes(low, high)
        )

    def describe(self) -> tuple[str, ...]:
        """The log lines of the grid: the settings it came from, if known, and its buckets."""
        shapes = ", ".join(str(bucket.shape) for bucket in self._buckets)
        kind = f"{self._phase} buckets" if self._phase else "buckets"
        generated = f"Generated {len(self._buckets)} {kind}: [{shapes}]"
        return (self._origin, generated) if self._origin else (generated,)

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __contains__(self, bucket: object) -> bool:
        if not isinstance(bucket, Bucket):
            return False
        at = bisect_left(self._buckets, bucket)
        return at < len(self._buckets) and self._buckets[at] == bucket

    def __repr__(self) -> str:
        pairs = zip(self._axes, self._values, strict=True)
        product = " × ".join(f"{len(values)} {name}" for name, values in pairs)
        return f"<BucketGrid {self._phase}: {len(self)} buckets, {product}>"


def _checked_count(values: Mapping[str, Sequence[int]]) -> int:
    if not values:
        raise BucketingError("a grid without axes has no buckets: give at least one axis")
    count = math.prod(map(len, values.values()))
    if count > MAX_CELLS:
        sizes = " × ".join(f"{len(sizes)} {name}" for name, sizes in values.items())
        raise BucketingError(
            f"a grid of {sizes} sizes has {count} cells, more than the {MAX_CELLS} that fit a "
            "look-up table: raise the step of the longest axis, or use the exp strategy"
        )
    return count


def _nested(answers: list[Any], buckets: Sequence[Bucket | None]) -> tuple[Any, ...]:
    if answers and isinstance(answers[0], list):
        return tuple(_nested(row, buckets) for row in answers)
    return tuple(map(buckets.__getitem__, answers))


def _grown(axis: str, size: int, reach: int) -> int:
    if size <= 1:
        return size
    step = 2 if axis == "batch" else 32
    width = math.ceil(math.pow(size, 1 / 3)) * step
    grown = round_up(size, width)
    return min(grown, reach) if size <= reach else grown
