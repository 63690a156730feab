"""Integer division and multiples, rounded up, for integers and arrays of integers."""

from __future__ import annotations

from typing import TypeVar

from trencadis.bucketing.array_types import IntArray

Integers = TypeVar("Integers", int, IntArray)


def ceil_div(dividend: Integers, divisor: int) -> Integers:
    """`dividend / divisor`, rounded up to an integer, without floating-point error."""
    return -(-dividend // divisor)


def round_up(size: Integers, step: int) -> Integers:
    """The smallest multiple of `step` that is at least `size`."""
    return ceil_div(size, step) * step
