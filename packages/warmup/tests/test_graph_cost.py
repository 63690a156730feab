"""Costs are predicted exactly where they are linear, and with honest doubt where they are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.bucketing import Bucket, BucketGrid
from trencadis.warmup.graph_cost import GraphCostModel

MIB = 1 << 20
GRID = BucketGrid({"batch": (1, 2, 4, 8), "seq": range(128, 1025, 128)})


def bucket(batch: int, seq: int) -> Bucket:
    return Bucket(("batch", "seq"), (batch, seq))


def linear(parts: tuple[float, ...], one: Bucket) -> float:
    batch, seq = one.shape
    return MIB * (parts[0] + parts[1] * batch + parts[2] * seq + parts[3] * batch * seq)


PARTS = st.tuples(*[st.floats(0.01, 100)] * 4)
SPANNING = [bucket(1, 128), bucket(2, 128), bucket(1, 256), bucket(2, 256)]


@given(parts=PARTS)
def test_linear_costs_are_expected_right_once_every_unknown_has_been_seen(
    parts: tuple[float, ...],
) -> None:
    model = GraphCostModel(GRID)
    for seen in SPANNING:
        model.observe(seen, linear(parts, seen))
    for one in GRID:
        assert model.expected(one) == pytest.approx(linear(parts, one), rel=1e-4)


@given(parts=PARTS)
def test_what_is_reckoned_with_never_exceeds_a_linear_cost_and_soon_comes_close(
    parts: tuple[float, ...],
) -> None:
    model = GraphCostModel(GRID)
    for seen in list(GRID)[:20]:
        for one in GRID:
            assert model.at_least(one) <= linear(parts, one) * (1 + 1e-9)
        model.observe(seen, linear(parts, seen))
    for one in GRID:
        assert model.at_least(one) >= 0.999 * linear(parts, one)


def test_each_graph_that_was_got_right_lowers_the_doubt() -> None:
    model, asked, claims = GraphCostModel(GRID), bucket(8, 1024), []
    for seen in (*SPANNING, bucket(4, 128), bucket(4, 256), bucket(1, 384)):
        model.observe(seen, seen["batch"] * seen["seq"])
        claims.append(model.at_least(asked) if model.knows(asked) else 0.0)
    assert claims[:4] == [0.0] * 4
    assert claims[4] < claims[5] < claims[6] < 8 * 1024


def test_nothing_is_claimed_of_a_batch_size_that_was_never_measured() -> None:
    model = GraphCostModel(GRID)
    for seq in (128, 256, 384, 512):
        model.observe(bucket(8, seq), 8 * seq)
    assert model.knows(bucket(8, 1024))
    assert not model.knows(bucket(4, 128))
    assert model.at_least(bucket(4, 128)) == 0


def test_before_the_fit_speaks_a_larger_shape_costs_no_less_than_a_smaller_one() -> None:
    model = GraphCostModel(GRID)
    assert model.at_least(bucket(1, 128)) == 0
    model.observe(bucket(2, 256), 100)
    assert model.at_least(bucket(4, 256)) == 100
    assert model.at_least(bucket(4, 128)) == 0


def test_doubt_grows_with_the_errors_made() -> None:
    exact, noisy = GraphCostModel(GRID), GraphCostModel(GRID)
    for i, one in enumerate(list(GRID)[:12]):
        tokens = one["batch"] * one["seq"]
        exact.observe(one, 1000 * tokens)
        noisy.observe(one, 1000 * tokens * (1.2 if i % 2 else 0.8))
    asked = bucket(2, 1024)
    assert exact.at_least(asked) > 0.99 * 2_048_000
    assert noisy.at_least(asked) < 0.9 * 2_048_000


def test_costs_of_nothing_are_predicted_as_nothing() -> None:
    model = GraphCostModel(GRID)
    for one in list(GRID)[:8]:
        model.observe(one, 0)
    assert model.at_least(bucket(8, 1024)) == 0
