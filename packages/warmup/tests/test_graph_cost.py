"""Linear costs are predicted exactly; other costs with a lower bound that reflects the error."""

from __future__ import annotations

from math import inf
from operator import le

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.bucketing import Bucket, BucketGrid
from trencadis.warmup.graph_cost import GraphCostModel, _t_quantile

MIB = 1 << 20
GRID = BucketGrid({"batch": (1, 2, 4, 8), "seq": range(128, 1025, 128)})


def make_bucket(batch: int, seq: int) -> Bucket:
    return Bucket(("batch", "seq"), (batch, seq))


def linear(parts: tuple[float, ...], bucket: Bucket) -> float:
    batch, seq = bucket.shape
    return MIB * (parts[0] + parts[1] * batch + parts[2] * seq + parts[3] * batch * seq)


def test_before_a_measurement_the_expected_size_is_the_number_of_elements() -> None:
    grid = BucketGrid({"batch": (1, 4), "query": (8,), "context_blocks": (0, 3)})
    model = GraphCostModel(grid)
    assert [model.expected(bucket) for bucket in grid] == [8, 24, 32, 96]
    assert not any(model.has_fit_for(bucket) for bucket in grid)


# Student's distribution, two-sided 95 %: NIST, "Critical Values of the Student's t Distribution".
T_QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 1000: 1.962}


@pytest.mark.parametrize("degrees_of_freedom", T_QUANTILES)
def test_the_quantile_of_the_prediction_error_is_within_8_percent(degrees_of_freedom: int) -> None:
    assert _t_quantile(degrees_of_freedom) == pytest.approx(
        T_QUANTILES[degrees_of_freedom], rel=0.08
    )


PARTS = st.tuples(*[st.floats(0.01, 100)] * 4)
SPANNING = [make_bucket(1, 128), make_bucket(2, 128), make_bucket(1, 256), make_bucket(2, 256)]


@given(parts=PARTS)
def test_linear_costs_are_predicted_exactly_after_one_measurement_per_coefficient(
    parts: tuple[float, ...],
) -> None:
    model = GraphCostModel(GRID)
    for seen in SPANNING:
        model.observe(seen, linear(parts, seen))
    for bucket in GRID:
        assert model.expected(bucket) == pytest.approx(linear(parts, bucket), rel=1e-4)


@given(parts=PARTS)
def test_the_lower_bound_never_exceeds_a_linear_cost_and_converges_to_it(
    parts: tuple[float, ...],
) -> None:
    model = GraphCostModel(GRID)
    for seen in list(GRID)[:20]:
        for bucket in GRID:
            assert model.lower_bound(bucket) <= linear(parts, bucket) * (1 + 1e-9)
        model.observe(seen, linear(parts, seen))
    for bucket in GRID:
        assert model.lower_bound(bucket) >= 0.999 * linear(parts, bucket)


def test_each_correct_prediction_raises_the_lower_bound() -> None:
    model, asked, claims = GraphCostModel(GRID), make_bucket(8, 1024), []
    for seen in (*SPANNING, make_bucket(4, 128), make_bucket(4, 256), make_bucket(1, 384)):
        model.observe(seen, seen["batch"] * seen["seq"])
        claims.append(model.lower_bound(asked) if model.has_fit_for(asked) else 0.0)
    assert claims[:4] == [0.0] * 4
    assert claims[4] < claims[5] < claims[6] < 8 * 1024


def test_the_fit_does_not_cover_an_unmeasured_batch_size() -> None:
    model = GraphCostModel(GRID)
    for seq in (128, 256, 384, 512):
        model.observe(make_bucket(8, seq), 8 * seq)
    assert model.has_fit_for(make_bucket(8, 1024))
    assert not model.has_fit_for(make_bucket(4, 128))
    assert model.lower_bound(make_bucket(4, 128)) == 0


def test_without_a_fit_a_larger_shape_costs_no_less_than_a_smaller_one() -> None:
    model = GraphCostModel(GRID)
    assert model.lower_bound(make_bucket(1, 128)) == 0
    model.observe(make_bucket(2, 256), 100)
    assert model.lower_bound(make_bucket(4, 256)) == 100
    assert model.lower_bound(make_bucket(4, 128)) == 0


def test_the_lower_bound_falls_with_the_prediction_error() -> None:
    exact, noisy = GraphCostModel(GRID), GraphCostModel(GRID)
    for i, bucket in enumerate(list(GRID)[:12]):
        tokens = bucket["batch"] * bucket["seq"]
        exact.observe(bucket, 1000 * tokens)
        noisy.observe(bucket, 1000 * tokens * (1.2 if i % 2 else 0.8))
    asked = make_bucket(2, 1024)
    assert exact.lower_bound(asked) > 0.99 * 2_048_000
    assert noisy.lower_bound(asked) < 0.9 * 2_048_000


def test_costs_of_zero_are_predicted_as_zero() -> None:
    model = GraphCostModel(GRID)
    for bucket in list(GRID)[:8]:
        model.observe(bucket, 0)
    assert model.lower_bound(make_bucket(8, 1024)) == 0


@settings(max_examples=30)
@given(costs=st.lists(st.integers(0, 1000), min_size=len(GRID), max_size=len(GRID)))
def test_whatever_the_fit_says_the_lower_bound_is_within_the_sizes_of_its_neighbours(
    costs: list[int],
) -> None:
    measured = dict(zip(GRID, costs, strict=True))
    model, seen = GraphCostModel(GRID), list(GRID)[::2]
    for bucket in seen:
        model.observe(bucket, measured[bucket])
    for bucket in GRID:
        smaller = [measured[b] for b in seen if all(map(le, b.shape, bucket.shape))]
        larger = [measured[b] for b in seen if all(map(le, bucket.shape, b.shape))]
        low, high = max(smaller, default=0), min(larger, default=inf)
        assert min(low, high) <= model.lower_bound(bucket) <= max(low, high)
