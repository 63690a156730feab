"""Integer division and multiples, rounded up, for integers and arrays of integers."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
Integers = TypeVar("Integers", int, IntArray)


def ceil_div(dividend: Integers, divisor: int) -> Integers:
    """`dividend / divisor`, rounded up to an integer, without floating-point error."""
    return -(-dividend // divisor)


def round_up(size: Integers, step: int) -> Integers:
    """The smallest multiple of `step` that is at least `size`."""
    return ceil_div(size, step) * step
