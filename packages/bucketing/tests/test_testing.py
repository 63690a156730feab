"""`check_find` finds each shape that a search does not serve, and passes a grid that covers all."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.bucketing import BucketGrid
from trencadis.bucketing.grid import Shape
from trencadis.bucketing.testing import SearchFault, check_find, grids, shapes

GRID = BucketGrid({"batch": (1, 2, 4), "seq": (16, 64)})
REACHABLE = list(itertools.product(range(1, 5), range(1, 65)))


def test_a_grid_that_covers_all_passes() -> None:
    check_find(GRID.find, REACHABLE)
    check_find(lambda shape: (4, 64), REACHABLE)


def test_a_shape_without_a_bucket_is_named() -> None:
    with pytest.raises(SearchFault, match=r"\(1, 65\) has no bucket"):
        check_find(GRID.find, [*REACHABLE, (1, 65)])


@pytest.mark.parametrize("answer", [(2, 64), (4, 16), (4, 64, 1), ()])
def test_a_bucket_that_does_not_hold_its_shape_is_named(answer: Shape) -> None:
    with pytest.raises(SearchFault, match=r"\(4, 64\) gets .*, which does not hold it"):
        check_find(lambda _: answer, [(4, 64)])


@settings(max_examples=50)
@given(grids(), st.data())
def test_random_shapes_are_served_where_no_hole_is_above_them(
    grid: BucketGrid, data: st.DataObject
) -> None:
    shape = data.draw(shapes(grid))
    has_bucket = any(
        all(size <= most for size, most in zip(shape, bucket.shape, strict=True)) for bucket in grid
    )
    if has_bucket:
        check_find(grid.find, [shape])
    else:
        with pytest.raises(SearchFault, match="has no bucket"):
            check_find(grid.find, [shape])
