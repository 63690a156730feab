"""Fitted ranges: as good as exhaustive search, better than every other range."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.bucketing import (
    BucketingError,
    exponential_range,
    fitted_axes,
    fitted_range,
    linear_range,
    padding_aware_range,
)
from trencadis.bucketing.strategies import padded
from trencadis.bucketing.strategies.optimal_partition import padding_costs


def padding(values: tuple[int, ...], lengths: list[int], weights: list[float]) -> float:
    """Padded elements, by linear search."""
    return sum(
        weight * (next(value for value in values if value >= length) - length)
        for length, weight in zip(lengths, weights, strict=True)
    )


def least_padding(
    lengths: list[int], weights: list[float], step: int, max: int, limit: int
) -> float:
    """The least padding of any range, by exhaustive search."""
    candidates = range(0, max, step)
    return min(
        padding((*chosen, max), lengths, weights)
        for count in range(min(limit, len(candidates) + 1))
        for chosen in itertools.combinations(candidates, count)
    )


@st.composite
def small_fits(draw: st.DrawFn) -> tuple[list[int], list[int], int, int, int]:
    step, max = draw(st.integers(1, 4)), draw(st.integers(1, 24))
    lengths = draw(st.lists(st.integers(0, max), min_size=1, max_size=12))
    weights = draw(st.lists(st.integers(1, 9), min_size=len(lengths), max_size=len(lengths)))
    return lengths, weights, step, max, draw(st.integers(1, 5))


@settings(max_examples=150, deadline=None)
@given(small_fits())
def test_a_fit_pads_as_little_as_exhaustive_search(
    fit: tuple[list[int], list[int], int, int, int],
) -> None:
    lengths, weights, step, max, limit = fit
    values = fitted_range(lengths, step, max, limit, weights)
    assert list(values) == sorted(set(values))
    assert len(values) <= limit
    assert values[-1] == max
    assert all(value % step == 0 for value in values[:-1])
    best = least_padding(lengths, list(weights), step, max, limit)
    assert padding(values, lengths, list(weights)) == best


@given(small_fits())
def test_a_fit_has_no_bucket_that_saves_nothing(
    fit: tuple[list[int], list[int], int, int, int],
) -> None:
    lengths, weights, step, max, limit = fit
    values = fitted_range(lengths, step, max, limit, weights)
    paid = padding(values, lengths, list(weights))
    for bucket in values[:-1]:
        fewer = tuple(value for value in values if value != bucket)
        assert padding(fewer, lengths, list(weights)) > paid


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 4096), min_size=1, max_size=200),
    st.sampled_from([1, 16, 128]),
    st.integers(0, 50),
)
def test_no_other_range_of_the_same_size_pads_less(
    lengths: list[int], step: int, percent: int
) -> None:
    for rule in (
        (*linear_range(step, step * 8, 4000), 4096),
        exponential_range(step, step, 4096, 12),
        padding_aware_range(step, step, 4096, 1024, percent),
    ):
        # Values that double up from step are multiples of it, as those of a fit are.
        fit = fitted_range(lengths, step, 4096, len(rule))
        ones = [1.0] * len(lengths)
        assert padding(fit, lengths, ones) <= padding(rule, lengths, ones)


@given(small_fits())
def test_weights_count_as_repetition(fit: tuple[list[int], list[int], int, int, int]) -> None:
    lengths, weights, step, max, limit = fit
    repeated = [length for length, w in zip(lengths, weights, strict=True) for _ in range(w)]
    assert fitted_range(lengths, step, max, limit, weights) == fitted_range(
        repeated, step, max, limit
    )


def test_fractional_weights_and_weights_of_zero() -> None:
    assert fitted_range([3, 7, 9], 1, 10, 2, [0.5, 0.0, 0.25]) == (3, 10)
    assert fitted_range([3, 7], 1, 10, 3, [0, 4]) == (7, 10)


def test_a_large_fit_is_optimal() -> None:
    # 1,024 candidates and 64 buckets; the plain quadratic recurrence is the oracle.
    lengths = np.random.default_rng(0).lognormal(8, 1.2, 20_000).clip(1, 131_072).astype(np.int64)
    values = np.array(fitted_range(lengths, 128, 131_072, 64))
    edges = np.arange(128, 131_073, 128)
    below = np.searchsorted(np.sort(lengths), edges, side="right")
    costs = edges * below
    starts = np.concatenate([[0], below])
    for _ in range(63):
        table = np.concatenate([[0], costs])[:, None] + edges * (below - starts[:, None])
        costs = np.where(np.arange(1025)[:, None] <= np.arange(1024), table, 1 << 60).min(axis=0)
    assert values[np.searchsorted(values, lengths)].sum() == costs[-1]


def padded_tokens(axes: tuple[tuple[int, ...], tuple[int, ...]], rows: list[list[int]]) -> int:
    return sum(
        math.prod(
            next(value for value in values if value >= size)
            for values, size in zip(axes, row, strict=True)
        )
        for row in rows
    )


batches = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)).map(list), min_size=1)


@settings(deadline=None)
@given(batches, st.integers(1, 12))
def test_two_axes_keep_the_budget_and_each_is_optimal_for_the_other(
    rows: list[list[int]], budget: int
) -> None:
    first, second = fitted_axes(rows, (1, 4), (6, 40), budget)
    assert len(first) * len(second) <= budget
    assert (first[-1], second[-1]) == (6, 40)
    paid = padded_tokens((first, second), rows)
    by_second = [row[0] * next(value for value in second if value >= row[1]) for row in rows]
    weight = [paid // row[0] for paid, row in zip(by_second, rows, strict=True)]
    again = fitted_range([row[0] for row in rows], 1, 6, len(first), weight)
    assert padded_tokens((again, second), rows) == paid


@settings(deadline=None)
@given(batches)
def test_two_axes_with_a_bucket_for_every_size_pad_nothing(rows: list[list[int]]) -> None:
    first, second = fitted_axes(rows, (1, 1), (6, 40), 6 * 40)
    assert padded_tokens((first, second), rows) == sum(math.prod(row) for row in rows)


def test_two_axes_fitted_together_pad_less_than_fitted_apart() -> None:
    # Large batches are short and small ones long: each axis should spend its buckets there.
    rows = [[8, n] for n in range(8, 64)] + [[n % 2 + 1, 60 * n] for n in range(1, 34)]
    together = fitted_axes(rows, (1, 1), (8, 2048), 12)
    apart = (
        fitted_range([row[0] for row in rows], 1, 8, 3),
        fitted_range([row[1] for row in rows], 1, 2048, 4),
    )
    assert padded_tokens(together, rows) < padded_tokens(apart, rows)


@pytest.mark.parametrize(
    ("lengths", "changed", "message"),
    [
        ([], {}, "no lengths to fit: record some traffic, or use the exp strategy"),
        ([1, math.nan], {}, "must be integers: remove NaN and fractions"),
        ([1.5], {}, "must be integers"),
        ([math.inf], {}, "must be integers"),
        (["a"], {}, "must be integers"),
        ([-1], {}, "run from -1 to -1, outside 0 to max 1024: raise max"),
        ([2000], {}, "outside 0 to max 1024"),
        ([1], {"step": 0}, "fit step must be an integer from 1 to .*, got 0"),
        ([1], {"limit": 0}, "fit limit must be an integer of at least 1, got 0"),
        ([1], {"weights": [1, 2]}, "one for each of the 1 lengths"),
        ([1], {"weights": [math.nan]}, "must be finite, not negative"),
        ([1], {"weights": [-1]}, "must be finite, not negative"),
        ([1], {"weights": [0]}, "all weights are 0"),
    ],
)
def test_bad_lengths_or_weights_are_an_error(
    lengths: list[float], changed: dict[str, object], message: str
) -> None:
    arguments: dict[str, object] = {"step": 128, "max": 1024, "limit": 4, **changed}
    with pytest.raises(BucketingError, match=message):
        fitted_range(lengths, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_above_the_largest_size_is_named_as_such(sign: int) -> None:
    for large in (sign * ((1 << 40) + 1), sign * 1e300):
        with pytest.raises(BucketingError, match="lengths to fit are above 1099511627776: remove"):
            fitted_range([1, large], 1, 1 << 40, 2)


def test_the_ends_of_the_settings_of_a_fit_are_accepted() -> None:
    largest = 1 << 40
    assert fitted_range([0, 0], 1, 0, 1) == (0,)
    assert fitted_range([largest], largest, largest, 1) == (largest,)
    assert fitted_range([1, 4], 1, 4, 2, tail=1_000_000) == (1, 4)
    assert fitted_axes([[0, largest]], (1, largest), (0, largest), 1) == ((0,), (largest,))
    with pytest.raises(BucketingError, match=r"fit tail must be .* to 1000000, got 1000001"):
        fitted_range([1, 4], 1, 4, 2, tail=1_000_001)


def test_batches_must_be_rows_of_two() -> None:
    with pytest.raises(BucketingError, match="not rows of two sizes"):
        fitted_axes([[1, 2, 3]], (1, 1), (4, 4), 4)
    with pytest.raises(BucketingError, match="limit must be an integer of at least 1, got 0"):
        fitted_axes([[1, 2]], (1, 1), (4, 4), 0)


def cost(values: tuple[int, ...], lengths: list[int], weights: list[int], tail: float) -> float:
    """The cost of a fit with a tail, as its docstring has it."""
    mean = sum(w * n for n, w in zip(lengths, weights, strict=True)) / sum(weights) or 1.0
    tokens = [next(value for value in values if value >= n) - n for n in lengths]
    return sum(w * p * (1 + tail * p / mean) for p, w in zip(tokens, weights, strict=True))


@settings(max_examples=150, deadline=None)
@given(small_fits(), st.sampled_from([0.01, 0.5, 3.0, 100.0]))
def test_a_fit_with_a_tail_costs_as_little_as_exhaustive_search(
    fit: tuple[list[int], list[int], int, int, int], tail: float
) -> None:
    lengths, weights, step, max, limit = fit
    values = fitted_range(lengths, step, max, limit, weights, tail=tail)
    assert list(values) == sorted(set(values))
    assert len(values) <= limit
    assert values[-1] == max
    candidates = range(0, max, step)
    ranges = [
        (*chosen, max)
        for count in range(min(limit, len(candidates) + 1))
        for chosen in itertools.combinations(candidates, count)
    ]
    least = min(cost(candidate, lengths, weights, tail) for candidate in ranges)
    assert cost(values, lengths, weights, tail) == pytest.approx(least)
    # Of ranges that cost the same, one with the fewest buckets.
    assert len(values) == min(
        len(candidate)
        for candidate in ranges
        if cost(candidate, lengths, weights, tail) <= least + 1e-9 * (1 + least)
    )


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=12
    ),
    st.sampled_from([0.0, 0.5, 3.0]),
)
def test_a_bucket_costs_the_padding_of_its_batches_and_the_squares(
    batches: list[tuple[int, int, int]], tail: float
) -> None:
    edges = np.arange(10, 50, 10)
    lengths, others, weights = (np.array(column) for column in zip(*batches, strict=True))
    positions = np.searchsorted(edges, lengths)
    costs = padding_costs(
        edges, positions, *(x.astype(float) for x in (others, lengths * others, weights)), tail
    )
    for begin, end in itertools.combinations_with_replacement(range(len(edges)), 2):
        held = (positions >= begin) & (positions <= end)
        pads = (edges[end] - lengths) * others
        expected = (weights * (pads + tail * pads**2))[held].sum()
        assert costs[begin, end] == pytest.approx(expected, abs=1e-6)


def test_a_tail_lowers_the_worst_padding_of_a_rare_length() -> None:
    lengths = [100] * 500 + [200] * 300 + [300] * 300 + [1000]
    most = [
        max(next(v for v in values if v >= n) - n for n in lengths)
        for values in (fitted_range(lengths, 100, 4000, 4, tail=tail) for tail in (0, 10))
    ]
    assert most == [3000, 100]


def test_two_axes_with_a_tail_pad_the_worst_batch_less() -> None:
    # Many small batches, and one of each size that is rare.
    rows = [[b, n] for b in (1, 2, 3, 4) for n in range(100, 1001, 100)] * 50
    rows += [[16, 1000], [8, 2000], [16, 3000]]
    batches = np.array(rows)
    worst = []
    for tail in (0.0, 10.0):
        first, second = fitted_axes(batches, (1, 100), (16, 4000), 24, tail=tail)
        assert len(first) * len(second) <= 24
        padded_tokens = padded(first, batches[:, 0]) * padded(second, batches[:, 1])
        worst.append(int((padded_tokens - batches.prod(axis=1)).max()))
    assert worst[1] < worst[0] / 2


def test_more_lengths_than_candidates_are_rounded_up_first() -> None:
    values = fitted_range(range(5000), 1, 6000, 5000, tail=1.0)
    assert len(values) <= 512
    assert values[-1] == 6000
    assert max(high - low for low, high in itertools.pairwise(values[:-1])) <= 11


@pytest.mark.parametrize("tail", [0.0, 1.0])
def test_a_budget_beyond_all_candidates_is_no_more_work(tail: float) -> None:
    rows = [[1, 130], [2, 260], [3, 500]]
    axes = fitted_axes(rows, (1, 128), (4, 1024), 10**5000, tail=tail)
    assert axes == ((1, 2, 3, 4), (256, 384, 512, 1024))


@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.integers(1, 100_000), st.integers(1, 1000)),
        min_size=2,
        max_size=6,
    ),
    st.integers(1, 9),
)
def test_weights_whose_sums_exceed_64_bits_fit_as_smaller_ones(
    batches: list[tuple[int, int, int]], budget: int
) -> None:
    rows = [[first, second] for first, second, _ in batches]
    small, large = (
        fitted_axes(
            rows, (1, 100), (1000, 100_000), budget, [weight << shift for *_, weight in batches]
        )
        for shift in (0, 30)
    )
    assert small == large


def test_sums_above_64_bits_are_no_negative_costs() -> None:
    rows = [[1, 100], [1000, 100_000]]
    for weights in ([1 << 40, 1 << 40], [1e300, 1e300]):
        axes = fitted_axes(rows, (1, 100), (1 << 30, 1 << 30), 9, weights)
        assert axes == ((1, 1000, 1 << 30), (100, 100_000, 1 << 30))


def test_settings_may_be_integers_of_numpy() -> None:
    lengths = np.array([5, 9])
    step, limit = np.int64(4), np.int32(3)
    assert fitted_range(lengths, step, lengths.max(), limit) == (8, 9)


@pytest.mark.parametrize(
    "tail", [-1, math.nan, math.inf, "1", None, [1.0], 10**5000], ids=lambda t: type(t).__name__
)
def test_a_tail_that_is_no_weight_is_an_error(tail: object) -> None:
    with pytest.raises(
        BucketingError, match="fit tail must be a finite number from 0 to 1000000, got"
    ):
        fitted_range([1], 1, 4, 2, tail=tail)  # type: ignore[arg-type]
    with pytest.raises(BucketingError, match="fit tail"):
        fitted_axes([[1, 2]], (1, 1), (4, 4), 2, tail=tail)  # type: ignore[arg-type]


def test_arguments_of_the_wrong_type_are_an_error() -> None:
    for changed in ({"step": 1.5}, {"max": "4"}, {"limit": None}, {"max": 1 << 50}):
        with pytest.raises(BucketingError, match=r"fit (step|max|limit)"):
            fitted_range([1], **{"step": 1, "max": 4, "limit": 2, **changed})  # type: ignore[arg-type]
    for changed in ({"steps": 1}, {"maxima": (4,)}, {"budget": "x"}, {"steps": (1, None)}):
        with pytest.raises(BucketingError, match=r"fit (step|max|limit)"):
            fitted_axes(
                [[1, 2]],
                **{"steps": (1, 1), "maxima": (4, 4), "budget": 2, **changed},  # type: ignore[arg-type]
            )
    for lengths in ([[1], [2, 3]], [10**30], "abc", [[1]], [1 << 50], None):
        with pytest.raises(BucketingError, match="lengths to fit"):
            fitted_range(lengths, 1, 1 << 40, 2)  # type: ignore[arg-type]
    for weights in ([[1]], "a", [None], 3):
        with pytest.raises(BucketingError, match="weights"):
            fitted_range([1], 1, 4, 2, weights)  # type: ignore[arg-type]
