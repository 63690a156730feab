"""Bucket ranges: the values of one axis of a grid, from a few settings.

Each strategy gives exactly the numbers of Gaudi's vLLM plugin for the same settings
(vllm-project/vllm-gaudi, `vllm_gaudi/extension/bucketing`). A range is a tuple of ints, strictly
increasing. It may end below its `max`; `Strategy.values` then adds `max`.
"""

from __future__ import annotations

import builtins
import math

import numpy as np

from trencadis.bucketing.errors import BucketingError, shown
from trencadis.bucketing.rounding import round_up
from trencadis.bucketing.shapes import MAX_SIZE, check_range_length
from trencadis.bucketing.validators import integer, number


def linear_range(min: int, step: int, max: int) -> tuple[int, ...]:
    """Ramp-up, then stable: `min` doubled while below `step`, then the multiples of `step`.

    A `min` of 0 gives a leading 0, then the multiples of `step`. Multiples of `step` below `min`
    are left out. `max` is left out too if it is not a multiple of `step`, and the range is empty
    if there is no multiple between `min` and `max`.

    >>> linear_range(2, 32, 64)
    (2, 4, 8, 16, 32, 64)

    Raises:
        BucketingError: a negative or non-integer setting, a step of 0, min above max, or more
            than `MAX_SIZES` sizes.
    """
    low, stride, high = _checked_range(min, step, max)
    check_range_length((high - low) / stride, f"raise step {stride} or lower max {high}")
    first = low or stride
    values = [0] if low == 0 else []
    doubled = first
    # Doubling from 0 would never end; a min of 0 starts at step instead and never doubles.
    while doubled < stride and doubled <= high:
        values.append(doubled)
        doubled *= 2
    values.extend(range(round_up(first, stride), high + 1, stride))
    return tuple(values)


def exponential_range(min: int, step: int, max: int, limit: int) -> tuple[int, ...]:
    """At most `limit` values spaced exponentially, each rounded up to `step`, the last one `max`.

    Values that are equal after rounding are given once. A `min` of 0 or 1 is not rounded; it comes
    in addition to `limit` values that start at `step`. Any other `min` is rounded up to `step`.
    With a `limit` of 1, the only value is `max`. A `limit` above the number of useful values
    costs nothing.

    >>> exponential_range(128, 128, 2048, 10)
    (128, 256, 384, 512, 640, 896, 1152, 1536, 2048)

    Raises:
        BucketingError: a negative or non-integer setting, a step or limit of 0, min above max, or
            more than `MAX_SIZES` sizes.
    """
    low, stride, high = _checked_range(min, step, max)
    count = integer(1).checked("range limit", limit)
    if count == 1 or high == 0:
        return (high,)
    first = stride if low < 2 else low
    count = builtins.min(count, _most_useful_values(first, stride, high))
    check_range_length(count, f"lower limit {shown(limit)} or raise step {stride}")
    # np.float_power and this order of operations, as in the plugin: where a power is close to a
    # multiple of step, another rounding error would move the bucket by one step.
    exponent = 1.0 / (count - 1)
    powers = (first * float(np.float_power(high / first, exponent * i)) for i in range(count))
    rounded = (math.ceil(power / stride) * stride for power in powers)
    values = {value for value in rounded if value < high} | {high}
    if low < 2:
        values.add(low)
    return tuple(sorted(values))


def _most_useful_values(first: int, stride: int, high: int) -> int:
    """How many exponentially spaced values round up to every multiple of `stride`.

    With so many, neighbours differ by half of `stride` at most, so further values change nothing.
    """
    growth = abs(math.log(high / first))
    return 2 + math.ceil(2 * high / stride * growth)


def padding_aware_range(
    min: int,
    step: int,
    max: int,
    pad_max: int,
    pad_percent: float,
) -> tuple[int, ...]:
    """Buckets as far apart as the padding limits allow.

    `min` is doubled up to the first value above `step` (0 is followed by 1). The candidates after
    that are `step` apart. A candidate is kept if it is a multiple of `pad_max`, or if, without it,
    the next candidate could pad a shape by more than `pad_max` or by more than `pad_percent` of
    the bucket. `max` always ends the range. A `pad_max` of 0 means `max`.

    >>> padding_aware_range(16, 16, 128, 32, 25)
    (16, 32, 48, 64, 80, 96, 128)

    Raises:
        BucketingError: a negative or non-integer setting, a step of 0, min above max, or a
            `pad_percent` outside 0 to 50, or more than `MAX_SIZES` candidates.
    """
    low, stride, high = _checked_range(min, step, max)
    check_range_length((high - low) / stride, f"raise step {stride} or lower max {high}")
    widest = integer(0).checked("range pad_max", pad_max) or high
    pad_percent = number(0, 50).checked("range pad_percent", pad_percent)
    values = [low]
    while values[-1] <= stride and (values[-1] * 2 or 1) <= high:
        values.append(values[-1] * 2 or 1)
    if values[-1] > stride:
        _extend_while_padding_allows(values, stride, high, widest, pad_percent)
    if values[-1] != high:
        values.append(high)
    return tuple(values)


def _extend_while_padding_allows(
    values: list[int], step: int, max: int, pad_max: int, pad_percent: float
) -> None:
    for value in range(values[-1] + step, max + 1, step):
        # The most that the next candidate could pad if this one were left out.
        padding = value + step - values[-1] - 1
        too_much = padding / (value + step) > pad_percent / 100.0 or padding > pad_max
        if too_much or value % pad_max == 0:
            values.append(value)


def _checked_range(min: int, step: int, max: int) -> tuple[int, int, int]:
    """The settings (min, step, max) that every range has, as ints. Raises `BucketingError`."""
    size = integer(0, MAX_SIZE)
    low, high = size.checked("range min", min), size.checked("range max", max)
    if low > high:
        raise BucketingError(f"range min {low} is above max {high}: lower min or raise max")
    return low, integer(1, MAX_SIZE).checked("range step", step), high
