"""Tests of what uses buckets, for its author: random grids, random shapes, and a proof by search.

    from hypothesis import given, strategies as st
    from trencadis.bucketing.testing import check_find, grids, shapes

    @given(grids(), st.data())
    def test_my_padding(grid, data):
        shape = data.draw(shapes(grid))
        ...

    def test_my_search():
        check_find(my_find, ((batch, seq) for batch in range(1, 9) for seq in range(1, 4097)))

It needs Hypothesis, the extra ``test``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from hypothesis import strategies as st

from trencadis.bucketing.grid import Bucket, BucketGrid, Shape
from trencadis.bucketing.grid.bucket import Cost, element_count


class SearchFault(AssertionError):
    """A shape that can come gets no bucket, or one that is too small."""


def check_find(
    find: Callable[[Shape], Bucket | Sequence[int] | None], reachable: Iterable[Shape]
) -> None:
    """Search the bucket of every shape that can come. Raises `SearchFault`, naming the shape.

    Args:
        find: the search, such as that of a `BucketGrid` or of another runtime. It returns a bucket
            or its sizes, or None.
        reachable: shapes, one size per axis.
    """
    for shape in reachable:
        found = find(shape)
        sizes = found.shape if isinstance(found, Bucket) else found
        if sizes is None:
            raise SearchFault(f"the shape {shape} has no bucket")
        if len(sizes) != len(shape) or any(map(int.__lt__, map(int, sizes), shape)):
            raise SearchFault(f"the shape {shape} gets {tuple(sizes)}, which does not hold it")


@st.composite
def grids(
    draw: st.DrawFn,
    axes: Sequence[str] = ("batch", "query", "blocks"),
    *,
    max_size: int = 20,
    cost: Cost = element_count,
) -> BucketGrid:
    """Grids along one or more of the first ``axes``, with any holes."""
    names = axes[: draw(st.integers(1, len(axes)))]
    sizes = st.sets(st.integers(0, max_size), min_size=1, max_size=6).map(sorted)
    values = {name: draw(sizes) for name in names}
    product = list(itertools.product(*values.values()))
    kept = draw(st.sets(st.sampled_from(product), min_size=1))
    return BucketGrid(values, filters=[lambda bucket: bucket.shape in kept], cost=cost)


def shapes(grid: BucketGrid, *, beyond: int = 2) -> st.SearchStrategy[Shape]:
    """Shapes of a grid's axes, up to ``beyond`` above its largest sizes."""
    return st.tuples(*(st.integers(0, grid.values(axis)[-1] + beyond) for axis in grid.axes))
