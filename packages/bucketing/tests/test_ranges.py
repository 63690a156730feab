"""Ranges: the plugin's numbers, properties, and errors."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.bucketing import (
    BucketingError,
    exponential_range,
    linear_range,
    padding_aware_range,
)

# Results of vllm-project/vllm-gaudi; data/README.md says how they were recorded.
PLUGIN = json.loads((Path(__file__).parent / "data" / "plugin_ranges.json").read_text())


def recorded(function: str) -> list[Any]:
    return [pytest.param(*case, id=str(case[0])) for case in PLUGIN[function]]


@pytest.mark.parametrize(("settings", "expected"), recorded("linear.warmup_range (min, step, max)"))
def test_linear_range_has_the_plugins_numbers(settings: list[int], expected: list[int]) -> None:
    assert linear_range(*settings) == tuple(expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    recorded("exponential.warmup_range_with_limit (min, step, max, limit)"),
)
def test_exponential_range_has_the_plugins_numbers(
    settings: list[int], expected: list[int]
) -> None:
    # The plugin gives max twice where rounding lifts its last two values above max.
    assert exponential_range(*settings) == tuple(dict.fromkeys(expected))


@pytest.mark.parametrize(
    ("settings", "expected"),
    recorded("padding_aware.warmup_range_with_limits (min, step, max, pad_max, pad_percent)"),
)
def test_padding_aware_range_has_the_plugins_numbers(
    settings: list[int], expected: list[int]
) -> None:
    assert padding_aware_range(*settings) == tuple(expected)


def test_ranges_of_the_documentation() -> None:
    # Page "Bucketing Mechanism" of the plugin's documentation.
    assert linear_range(2, 32, 64) == (2, 4, 8, 16, 32, 64)
    assert linear_range(128, 128, 512) == (128, 256, 384, 512)


def test_batch_sizes_of_a_published_server_log() -> None:
    # tests/unit_tests/test_bucketing.py of the plugin, from a log of Qwen3-32B on two Gaudis.
    assert exponential_range(1, 2, 256, 9) == (1, 2, 4, 8, 14, 24, 42, 78, 140, 256)


steps, sizes = st.integers(1, 300), st.integers(0, 5000)
bounds = st.tuples(sizes, sizes).map(sorted)


@given(bounds, steps)
def test_a_linear_range_increases_from_min_and_stays_within_max(
    bounds: list[int], step: int
) -> None:
    low, high = bounds
    values = linear_range(low, step, high)
    assert list(values) == sorted(set(values))
    assert all(low <= value <= high for value in values)
    if low <= step or low % step == 0:
        assert values[0] == low
    assert all(value % step == 0 for value in values if value >= step)
    assert high - (values[-1] if values else low) < step or values[-1] < step


@given(bounds, steps, st.integers(1, 40))
def test_an_exponential_range_increases_to_max_within_its_limit(
    bounds: list[int], step: int, limit: int
) -> None:
    low, high = bounds
    values = exponential_range(low, step, high, limit)
    assert list(values) == sorted(set(values))
    assert values[-1] == high
    if limit > 1:
        assert values[0] == (low if low < 2 else min(math.ceil(low / step) * step, high))
    # A min of 0 or 1 comes on top of the limit.
    assert len(values) <= limit + (low < 2)
    assert all(value % step == 0 for value in values[:-1] if value > 1)


@given(bounds, steps, sizes, st.integers(0, 50))
def test_a_padding_aware_range_increases_from_min_to_max_within_its_limits(
    bounds: list[int], step: int, pad_max: int, percent: int
) -> None:
    low, high = bounds
    values = padding_aware_range(low, step, high, pad_max, percent)
    assert list(values) == sorted(set(values))
    assert (values[0], values[-1]) == (low, high)
    widest = pad_max or high
    pairs = [pair for pair in itertools.pairwise(values) if pair[0] > step]
    for before, value in pairs:
        # The next of the values a step apart is always there; any wider gap keeps both limits.
        if value - before > step:
            padding = value - before - 1
            assert padding <= widest
            assert padding / value <= percent / 100


RANGES: dict[str, Callable[..., tuple[int, ...]]] = {
    "linear": linear_range,
    "exponential": lambda *settings: exponential_range(*settings, 8),
    "padding_aware": lambda *settings: padding_aware_range(*settings, 64, 25),
}


@pytest.mark.parametrize("make", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((129, 128, 128), "min 129 is above max 128: lower min or raise max"),
        ((1, 0, 128), "step must be an integer from 1 to 1099511627776, got 0"),
        ((1, -2, 128), "step must be an integer from 1 to 1099511627776, got -2"),
        ((-1, 2, 128), "min must be an integer from 0 to 1099511627776, got -1"),
        ((1, 2, math.nan), "max must be an integer from 0 to 1099511627776, got nan"),
        ((1.5, 2, 8), "min must be an integer from 0 to 1099511627776, got 1.5"),
    ],
)
def test_a_bad_setting_is_an_error_with_the_remedy(
    make: Callable[..., tuple[int, ...]], settings: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(BucketingError, match=message):
        make(*settings)


def test_the_limits_of_a_strategy_are_checked() -> None:
    with pytest.raises(BucketingError, match="limit must be an integer of at least 1, got 0"):
        exponential_range(1, 2, 8, 0)
    for percent in (-1, 51, math.nan):
        with pytest.raises(
            BucketingError, match="pad_percent must be a finite number from 0 to 50, got"
        ):
            padding_aware_range(1, 2, 8, 4, percent)
    with pytest.raises(BucketingError, match="pad_max must be an integer of at least 0, got -1"):
        padding_aware_range(1, 2, 8, -1, 25)


def every_multiple(step: int, max: int) -> tuple[int, ...]:
    return (1, *range(step, max, step), max)


@pytest.mark.parametrize("limit", [5000, 10**9, 10**5000], ids=["5e3", "1e9", "1e5000"])
def test_a_huge_limit_gives_every_useful_size_at_once(limit: int) -> None:
    assert exponential_range(1, 128, 10_000, limit) == every_multiple(128, 10_000)


@given(st.integers(0, 300), st.integers(1, 60), st.integers(0, 300), st.integers(1, 4000))
def test_a_limit_above_the_useful_number_changes_nothing(
    low: int, step: int, more: int, limit: int
) -> None:
    # The formula without a bound on the number of values.
    high = low + more
    first = step if low < 2 else low
    if limit == 1 or high == 0:
        expected = {high}
    else:
        powers = (
            first * float(np.float_power(high / first, 1 / (limit - 1) * i)) for i in range(limit)
        )
        rounded = {math.ceil(power / step) * step for power in powers}
        expected = (
            {size for size in rounded if size < high} | {high} | ({low} if low < 2 else set())
        )
    assert exponential_range(low, step, high, limit) == tuple(sorted(expected))


@pytest.mark.parametrize(
    "make",
    [
        lambda: linear_range(1, 1, 10**9),
        lambda: exponential_range(1, 1, 10**9, 10**9),
        lambda: padding_aware_range(1, 1, 10**9, 8, 25),
    ],
    ids=["lin", "exp", "pad"],
)
def test_a_range_too_long_to_be_useful_is_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(BucketingError, match=r"more than the 1048576 .*: (raise step|lower limit)"):
        make()


def test_a_range_of_as_many_sizes_as_are_useful_is_made() -> None:
    assert len(linear_range(0, 1, 1 << 20)) == (1 << 20) + 1
    with pytest.raises(BucketingError, match="a range of 1048577 sizes has more than the 1048576"):
        linear_range(0, 1, (1 << 20) + 1)


def test_the_length_of_a_range_counts_from_its_min() -> None:
    billion = 10**9
    assert linear_range(billion, 1, billion + 1) == (billion, billion + 1)
    assert padding_aware_range(billion, 1, billion + 2, 1, 25) == tuple(range(billion, billion + 3))


@pytest.mark.parametrize("size", [1, 5, 1 << 40])
def test_a_range_may_begin_at_its_max(size: int) -> None:
    assert linear_range(size, size, size) == (size,)
    assert exponential_range(size, size, size, 4) == (size,)
    assert padding_aware_range(size, size, size, 0, 25) == (size,)


def test_settings_beyond_sense_are_refused() -> None:
    for wrong in ((1, 10**5000, 10**5001), (1, 1 << 41, 10), (0, 1, 1 << 41)):
        with pytest.raises(
            BucketingError, match=r"(step|max) must be an integer from \d to 1099511627776, got "
        ):
            linear_range(*wrong)
    for percent in ("25", None, 51, math.nan):
        with pytest.raises(
            BucketingError, match="pad_percent must be a finite number from 0 to 50, got"
        ):
            padding_aware_range(1, 1, 8, 4, percent)  # type: ignore[arg-type]
    assert linear_range(10**9, 1, 10**9 + 2) == (10**9, 10**9 + 1, 10**9 + 2)
