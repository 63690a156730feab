"""The grid: look-ups against brute force, holes, costs, fallback, coverage gaps."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.bucketing import (
    Bucket,
    BucketGrid,
    BucketingError,
    CoverageGap,
    UnknownAxis,
    fallback_size,
    linear_range,
)
from trencadis.bucketing.grid import lookup_table
from trencadis.bucketing.grid.lookup_table import MAX_TABULATED
from trencadis.bucketing.testing import grids, shapes

PLUGIN = json.loads((Path(__file__).parent / "data" / "plugin_ranges.json").read_text())
NAMES = ("batch", "query", "blocks")


class Price:
    """An arbitrary but repeatable cost that does not depend on the size."""

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def __call__(self, bucket: Bucket) -> float:
        return float(hash((self.salt, *bucket.shape)) % 7)


def holds(bucket: Bucket, shape: tuple[int, ...]) -> bool:
    return all(size >= need for size, need in zip(bucket.shape, shape, strict=True))


def within(shape: tuple[int, ...], gap: CoverageGap) -> bool:
    sizes = zip(gap.low, shape, gap.high, strict=True)
    return all(low <= size <= high for low, size, high in sizes)


def cheapest_by_brute_force(
    grid: BucketGrid, cost: Price | None, shape: tuple[int, ...]
) -> Bucket | None:
    def key(bucket: Bucket) -> tuple[float, Bucket]:
        return (cost(bucket) if cost else math.prod(n or 1 for n in bucket.shape), bucket)

    return min((bucket for bucket in grid if holds(bucket, shape)), key=key, default=None)


@st.composite
def filtered_grids(draw: st.DrawFn) -> tuple[BucketGrid, Price | None]:
    """One to three axes, any holes, the default cost or an arbitrary one."""
    cost = draw(st.none() | st.builds(Price, st.integers(0, 1000)))
    return draw(grids(**({"cost": cost} if cost else {}))), cost


def test_an_axis_too_long_for_a_table_gives_the_same_answers() -> None:
    values = (1, 128, MAX_TABULATED, MAX_TABULATED + 128)
    grid = BucketGrid({"query": values})
    for value, larger in itertools.pairwise(values):
        assert grid.find((value,)) == Bucket(("query",), (value,))
        assert grid.find((value + 1,)) == Bucket(("query",), (larger,))
    assert grid.find((values[-1] + 1,)) is None


@given(filtered_grids(), st.data())
def test_find_is_the_cheapest_bucket_that_is_large_enough(
    made: tuple[BucketGrid, Price | None], data: st.DataObject
) -> None:
    grid, cost = made
    shape = data.draw(shapes(grid))
    assert grid.find(shape) == cheapest_by_brute_force(grid, cost, shape)


@given(st.integers(0, 4), st.integers(0, 9_000_000))
def test_an_axis_too_long_for_a_table_is_searched(batch: int, seq: int) -> None:
    grid = BucketGrid({"batch": (1, 3), "seq": (128, 4_096, 8_000_000)})
    assert grid.find((batch, seq)) == cheapest_by_brute_force(grid, None, (batch, seq))


@given(filtered_grids())
def test_a_grid_from_its_own_shapes_gives_the_same_answers(
    made: tuple[BucketGrid, Price | None],
) -> None:
    grid, cost = made
    shapes = [bucket.shape for bucket in reversed(grid.buckets)]
    again = BucketGrid.from_shapes(grid.axes, shapes, **({"cost": cost} if cost else {}))
    assert again.buckets == grid.buckets
    for shape in itertools.product((0, 3, 11, 20), repeat=len(grid.axes)):
        assert again.find(shape) == grid.find(shape)


@given(filtered_grids(), st.integers(0, 25))
def test_coverage_gaps_are_complete(made: tuple[BucketGrid, Price | None], end: int) -> None:
    grid, _ = made
    limits = [end] * len(grid.axes)
    # Reachable, as an example of a budget: shapes whose sizes add up to no more than 20.
    gaps = grid.coverage_gaps(limits, lambda low, high: sum(low) <= 20)
    missing = {
        shape
        for shape in itertools.product(range(end + 1), repeat=len(limits))
        if sum(shape) <= 20 and grid.find(shape) is None
    }
    assert bool(gaps) == bool(missing)
    for shape in missing:
        assert any(within(shape, gap) for gap in gaps)


def test_find_prefers_the_cheap_bucket_to_the_first_in_order() -> None:
    # (1, 4096) sorts before (2, 128), and pads sixteen times as much.
    grid = BucketGrid.from_shapes(("batch", "seq"), [(1, 4096), (2, 128)])
    assert grid.find((1, 100)) == Bucket(("batch", "seq"), (2, 128))


def test_padding_of_the_documentations_example() -> None:
    # Page "Bucketing Mechanism" of the plugin's documentation: 3 sequences, 412 tokens.
    grid = BucketGrid({"batch": (1, 2, 4), "seq": linear_range(128, 128, 2048)})
    buckets = {(3, 412): (4, 512), (2, 412): (2, 512), (4, 513): (4, 640)}
    for shape, expected in buckets.items():
        assert grid.find(shape) == Bucket(("batch", "seq"), expected)
    assert grid.padding((3, 412)) == pytest.approx(4 * 512 / (3 * 412) - 1)
    assert grid.padding((4, 512)) == 0


def test_padding_of_a_shape_that_costs_nothing() -> None:
    grid = BucketGrid({"seq": (0, 128)}, cost=lambda bucket: bucket["seq"])
    assert grid.padding((0,)) == 0
    assert BucketGrid({"seq": (128,)}, cost=lambda bucket: bucket["seq"]).padding((0,)) == math.inf


def test_a_bucket_miss_has_a_fallback() -> None:
    grid = BucketGrid({"batch": (1, 2, 4), "seq": (128, 256)})
    assert grid.find((5, 100)) is None
    assert grid.find((1, 257)) is None
    assert grid.find((1, 1 << 40)) is None
    # The plugin's step is ceil(5 ** (1/3)) * 2 = 4 for 5, and ceil(4090 ** (1/3)) * 32 = 512.
    assert grid.fallback((5, 4090)) == Bucket(("batch", "seq"), (8, 4096))
    assert grid.padding((5, 4090)) == 8 * 4096 / (5 * 4090) - 1


def plugins_fallback(size: int, unit: int) -> int:
    """`calc_fallback_value` of vllm-gaudi, with an exact cube root."""
    root = next(root for root in itertools.count(1) if root**3 >= size)
    return size if size <= 1 else -(-size // (root * unit)) * root * unit


@pytest.mark.parametrize(("given", "expected"), PLUGIN["common.calc_fallback_value (n, base_step)"])
def test_fallback_is_one_of_the_plugins_and_not_above_its_own(
    given: list[int], expected: int
) -> None:
    size, unit = given
    assert plugins_fallback(size, unit) == expected
    name = "batch" if unit == 2 else "blocks"
    (fallback,) = BucketGrid({name: [1]}).fallback((size,)).shape
    assert size <= fallback <= expected


@pytest.mark.parametrize(("name", "unit"), [("batch", 2), ("blocks", 32)])
def test_fallback_is_the_smallest_of_the_plugins_sizes_that_is_large_enough(
    name: str, unit: int
) -> None:
    grid = BucketGrid({name: [1]})
    plugins = sorted({plugins_fallback(size, unit) for size in range(6000)})
    for size in range(3000):
        expected = next(fallback for fallback in plugins if fallback >= size)
        assert grid.fallback((size,)).shape == (expected,)


def test_fallback_of_1000_is_not_above_that_of_1001() -> None:
    grid = BucketGrid({"query": [1]})
    assert grid.fallback((1000,)).shape == grid.fallback((1001,)).shape == (1056,)


@given(filtered_grids(), st.data())
def test_fallback_grows_with_the_shape_and_is_its_own_fallback(
    made: tuple[BucketGrid, Price | None], data: st.DataObject
) -> None:
    grid, _ = made
    size = st.integers(0, 40) | st.integers(0, 10_000) | st.integers(0, 1 << 36)
    shape = tuple(data.draw(size) for _ in grid.axes)
    larger = tuple(need + data.draw(size) for need in shape)
    fallback = grid.fallback(shape)
    assert holds(grid.fallback(larger), fallback.shape)
    assert grid.fallback(fallback.shape) == fallback


@given(filtered_grids(), st.data())
def test_fallback_is_large_enough_and_within_the_axis_where_possible(
    made: tuple[BucketGrid, Price | None], data: st.DataObject
) -> None:
    grid, _ = made
    shape = tuple(data.draw(st.integers(0, 10_000)) for _ in grid.axes)
    fallback = grid.fallback(shape)
    assert holds(fallback, shape)
    for axis, size in zip(grid.axes, shape, strict=True):
        reach = grid.values(axis)[-1]
        assert size > reach or fallback[axis] <= reach


def test_reachable_drops_buckets_that_no_shape_pads_to() -> None:
    grid = BucketGrid(
        {"batch": (1, 4, 8), "query": (128, 512)},
        reachable=lambda low, high: low[0] * low[1] <= 512,
    )
    # (8, 512) would take batches of 5 to 8 with 129 to 512 tokens: 645 at least.
    assert [bucket.shape for bucket in grid] == [(1, 128), (1, 512), (4, 128), (4, 512), (8, 128)]
    assert grid.coverage_gaps() == ()
    assert grid.coverage_gaps(limits=(9, 512)) == (CoverageGap((9, 0), (9, 128)),)


def test_a_grid_describes_itself() -> None:
    grid = BucketGrid({"batch": (1, 2), "seq": (128,)}, phase="prompt", settings_line="From here")
    assert grid.describe() == ("From here", "Generated 2 prompt buckets: [(1, 128), (2, 128)]")
    assert BucketGrid({"n": [1]}).describe() == ("Generated 1 buckets: [(1,)]",)
    (whole,) = BucketGrid({"n": range(1000)}).describe()
    assert whole.endswith(", (998,), (999,)]")
    (line,) = BucketGrid({"n": range(300_000)}).describe()
    assert line.startswith("Generated 300000 buckets: [(0,), (1,), ")
    assert line.endswith(", (998,), (999,), …]")
    assert repr(grid) == "<BucketGrid prompt: 2 buckets, 2 batch × 1 seq>"
    assert (len(grid), list(grid)) == (2, list(grid.buckets))
    assert Bucket(("batch", "seq"), (2, 128)) in grid
    assert Bucket(("batch", "seq"), (2, 127)) not in grid
    assert (2, 128) not in grid
    assert grid.values("batch") == (1, 2)


shapes_of_two = st.tuples(st.integers(0, 24), st.integers(0, 24))


@given(
    st.sets(shapes_of_two, min_size=1, max_size=6),
    st.lists(shapes_of_two, max_size=6),
    st.lists(shapes_of_two, min_size=1, max_size=8),
)
def test_a_grid_with_added_buckets_answers_as_a_grid_of_all_of_them(
    first: set[tuple[int, int]], added: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    grid = original = BucketGrid.from_shapes(("batch", "seq"), sorted(first), limits=(24, 24))
    before = original.buckets
    for shape in added:
        grid = grid.with_bucket(shape)
    whole = BucketGrid.from_shapes(("batch", "seq"), sorted({*first, *added}), limits=(24, 24))
    assert grid.buckets == whole.buckets
    assert [grid.find(shape) for shape in asked] == [whole.find(shape) for shape in asked]
    assert grid.coverage_gaps() == whole.coverage_gaps()
    assert grid.used_buckets() == whole.used_buckets()
    assert original.buckets == before


def test_a_fallback_that_is_added_is_found_and_a_known_bucket_changes_nothing() -> None:
    grid = BucketGrid({"batch": (1, 2), "seq": (64, 128)})
    assert grid.with_bucket((2, 128)) is grid
    compiled = grid.fallback((3, 130))
    wider = grid.with_bucket(compiled.shape)
    assert (wider.find((3, 130)), grid.find((3, 130))) == (compiled, None)
    assert pickle.loads(pickle.dumps(wider)).find((3, 130)) == compiled  # noqa: S301 - our own
    assert wider.values("seq") == (64, 128)
    for wrong in ((3,), (3, -1), (3, "4"), None):
        for call in (wider.find, wider.with_bucket):
            with pytest.raises(BucketingError):
                call(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, None, 1.5, True])
def test_a_fallback_size_is_of_a_size(wrong: Any) -> None:
    assert fallback_size("batch", 9, 8) == 12
    for size, largest in ((wrong, 8), (8, wrong)):
        with pytest.raises(BucketingError, match="must be an integer from 0"):
            fallback_size("batch", size, largest)


def test_a_grid_is_copied_as_itself_and_pickled_unless_a_function_cannot_be() -> None:
    grid = BucketGrid({"batch": (1, 2), "seq": (64, 128)}, filters=[lambda _: True])
    assert copy.copy(grid) is copy.deepcopy(grid) is grid
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(grid, protocol))  # noqa: S301 - our own
        assert loaded.find((1, 65)) == grid.find((1, 65))
        assert loaded.describe() == grid.describe()
    for name in ("cost", "reachable"):
        local = BucketGrid({"batch": (1, 2)}, **{name: lambda *_: 1.0})
        assert copy.deepcopy(local) is local
        with pytest.raises(BucketingError, match=rf"cannot be pickled, because its {name} <func"):
            pickle.dumps(local)


def test_a_bucket_is_a_value() -> None:
    bucket = Bucket(("batch", "seq"), (4, 512))
    assert (bucket["batch"], bucket["seq"]) == (4, 512)
    assert bucket == Bucket(["batch", "seq"], [4, 512])
    assert hash(bucket) == hash(pickle.loads(pickle.dumps(bucket)))  # noqa: S301 - our own
    assert Bucket(("n",), (2,)) < Bucket(("n",), (10,)) >= Bucket(("n",), (9,))
    assert repr(bucket) == "Bucket(batch=4, seq=512)"
    with pytest.raises(AttributeError):
        bucket.shape = (1, 1)  # type: ignore[misc]
    with pytest.raises(KeyError, match="this bucket has batch, seq"):
        bucket["query"]
    with pytest.raises(BucketingError, match="give one size per axis"):
        Bucket(("batch",), (1, 2))


def test_a_size_of_0_costs_as_much_as_one_of_1_and_the_smaller_bucket_is_found() -> None:
    grid = BucketGrid({"query": (128,), "context": (0, 1, 4)})
    assert [grid.find((9, n)) for n in (0, 1, 2)] == [
        Bucket(grid.axes, (128, context)) for context in (0, 1, 4)
    ]
    assert grid.padding((64, 0)) == grid.padding((64, 1)) == 1.0


@pytest.mark.parametrize("length", [1 << 16, (1 << 16) + 1])
def test_the_last_position_of_a_long_axis_is_found(length: int) -> None:
    positions = lookup_table.positions(range(length))  # of two bytes each, or of four
    assert (positions[0], positions[length - 1]) == (0, length - 1)


def test_a_grid_may_have_as_many_cells_as_are_tabulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_table, "MAX_CELLS", 6)
    assert len(BucketGrid({"batch": (1, 2), "seq": (1, 2, 3)})) == 6
    with pytest.raises(BucketingError, match="2 batch × 4 seq sizes has 8 cells, more than the 6"):
        BucketGrid({"batch": (1, 2), "seq": (1, 2, 3, 4)})
    with pytest.raises(BucketingError, match="3 batch × 3 seq sizes has 9 cells"):
        BucketGrid.from_shapes(("batch", "seq"), [(1, 1), (2, 2), (3, 3)])


def test_a_grid_can_be_pickled() -> None:
    grid = BucketGrid({"batch": (1, 2, 4), "seq": linear_range(128, 128, 2048)})
    there = pickle.loads(pickle.dumps(grid))  # noqa: S301 - our own
    assert there.buckets == grid.buckets
    assert there.find((3, 412)) == grid.find((3, 412))


def test_threads_share_a_grid() -> None:
    grid = BucketGrid({"batch": linear_range(1, 8, 64), "seq": linear_range(128, 128, 2048)})
    shapes = list(itertools.product(range(1, 65, 3), range(1, 2049, 111)))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: [grid.find(shape) for shape in shapes], range(8)))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "without axes"),
        ({"seq": []}, "axis seq has no sizes: give at least one"),
        ({"seq": [2, 1]}, "give them increasing"),
        ({"seq": [1, 1]}, "each once"),
        ({"seq": [-1, 1]}, "a size of axis seq must be an integer from 0 to .*, got -1"),
        ({"seq": [1.0, math.nan]}, "a size of axis seq must be an integer from 0 to .*, got 1.0"),
        ({"a": range(5000), "b": range(5000)}, "raise the step of the longest axis"),
        (
            {"a": range((1 << 20) + 1)},
            "a range of 1048577 sizes has more than the 1048576 that are",
        ),
    ],
)
def test_bad_axes_are_an_error(axes: dict[str, list[int]], message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        BucketGrid(axes)


def test_filters_that_drop_every_bucket_are_an_error() -> None:
    with pytest.raises(BucketingError, match=r"none of the 2 buckets of the decode grid .* raise"):
        BucketGrid({"blocks": [1, 2]}, filters=[lambda bucket: False], phase="decode")
    with pytest.raises(BucketingError, match="no shape for the decode grid"):
        BucketGrid.from_shapes(("blocks",), [], phase="decode")


def test_a_cost_of_nan_is_an_error() -> None:
    with pytest.raises(BucketingError, match=r"cost of Bucket\(n=1\) is not a number"):
        BucketGrid({"n": [1, 2]}, cost=lambda bucket: math.nan)


@pytest.mark.parametrize("ask", ["find", "fallback", "padding", "coverage_gaps"])
def test_a_shape_of_the_wrong_length_or_type_is_an_error(ask: str) -> None:
    for longest in (128, 8_000_000):
        grid = BucketGrid({"batch": [1], "seq": [longest]})
        with pytest.raises(BucketingError, match="has 1 sizes for the axes batch, seq"):
            getattr(grid, ask)((1,))
        for shape in (3, "ab", (1, "x"), (1, 2.5), (1, None), (1, math.nan)):
            with pytest.raises(BucketingError, match="integer"):
                getattr(grid, ask)(shape)


def test_negative_sizes_of_a_bucket_are_an_error() -> None:
    for shape in ((-1, 128), (1, -128), (1, -(10**5000))):
        with pytest.raises(BucketingError, match="a size of a bucket must be an integer from 0 to"):
            Bucket(("batch", "seq"), shape)


@pytest.mark.parametrize("axes", ["ab", ("a", "a"), ("a", ""), ("a", 2), 7, (["a"], "b"), None])
def test_axes_without_different_names_are_an_error(axes: Any) -> None:
    with pytest.raises(BucketingError, match=r"axes|axis"):
        Bucket(axes, (1, 2))
    with pytest.raises(BucketingError, match=r"axes|axis"):
        BucketGrid.from_shapes(axes, [(1, 2)])


def test_an_axis_that_does_not_exist_is_an_error() -> None:
    grid = BucketGrid({"batch": [1], "seq": [128]})
    with pytest.raises(UnknownAxis, match=r"no axis .query.: this grid has batch, seq"):
        grid.values("query")
    with pytest.raises(UnknownAxis, match=r"^no axis .query.: this bucket has batch, seq$"):
        grid.buckets[0]["query"]


def test_functions_that_are_none_are_an_error() -> None:
    for wrong in ({"filters": [3]}, {"filters": 3}, {"reachable": 3}, {"cost": 3}):
        with pytest.raises(BucketingError, match=r"not a function|of type Iterable"):
            BucketGrid({"n": [1]}, **wrong)  # type: ignore[arg-type]
    with pytest.raises(BucketingError, match="is not a number"):
        BucketGrid({"n": [1]}, cost=lambda bucket: "much")  # type: ignore[arg-type,return-value]


def test_a_grid_is_asked_for_its_gaps_up_to_its_own_limits() -> None:
    grid = BucketGrid({"batch": (1, 2), "seq": (128,)}, limits=(2, 200))
    assert grid.coverage_gaps() == (
        CoverageGap((0, 129), (1, 200)),
        CoverageGap((2, 129), (2, 200)),
    )
    assert BucketGrid({"batch": (1, 2), "seq": (128,)}).coverage_gaps() == ()
    with pytest.raises(BucketingError, match=r"limits .* has 1 sizes for the axes"):
        BucketGrid({"batch": (1, 2), "seq": (128,)}, limits=(2,))


@pytest.mark.parametrize("shape", [(-1, 100), (2, -1), (2, -300), (2, -(1 << 40))])
@pytest.mark.parametrize("longest", [256, 8_000_000])
def test_a_shape_with_a_negative_size_is_an_error(shape: tuple[int, int], longest: int) -> None:
    grid = BucketGrid({"batch": (1, 2, 4), "seq": (128, longest)})
    with pytest.raises(BucketingError, match="is negative: give sizes of 0 or more"):
        grid.find(shape)


def test_a_bucket_must_pass_every_filter() -> None:
    filters = [lambda bucket: bucket["n"] > 1, lambda bucket: bucket["n"] < 8]
    assert BucketGrid({"n": [1, 2, 4, 8]}, filters=filters).values("n") == (1, 2, 4, 8)
    shapes = [bucket.shape for bucket in BucketGrid({"n": [1, 2, 4, 8]}, filters=filters)]
    assert shapes == [(2,), (4,)]
