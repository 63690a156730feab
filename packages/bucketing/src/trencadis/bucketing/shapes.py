"""Sizes of shapes, names of axes and arrays of sizes, from arguments of any type."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from trencadis.bucketing.errors import BucketingError, shown
from trencadis.bucketing.rounding import IntArray
from trencadis.bucketing.validators import integer

MAX_SIZE = 1 << 40
"""The largest size and the largest setting, in any unit. Products of three sizes stay finite as
floats, and a size fits an array of 64-bit integers."""

MAX_SIZES = 1 << 20
"""The most sizes of a range. Far more graphs than a server captures; a step that is too small by
mistake is rejected before it fills the memory."""

MAX_AXES = 16
"""The most axes of a grid."""

MAX_ROWS = 1 << 26
"""The most numbers of a sequence that is copied to an array."""


def checked_limits(**limits: int) -> list[int]:
    """The limits as ints. Raises `BucketingError` for one that is not from 1 to `MAX_SIZE`."""
    return [integer(1, MAX_SIZE).checked(name, value) for name, value in limits.items()]


def checked_sizes(what: str, sizes: Iterable[int]) -> tuple[int, ...]:
    """`sizes` as ints from 0 to `MAX_SIZE`; `what` names them in the error.

    Raises:
        BucketingError: not an iterable of such integers.
    """
    try:
        values = tuple(itertools.islice(sizes, MAX_SIZES + 1))
    except TypeError:
        raise BucketingError(f"{what} {shown(sizes)} must be a sequence of integers") from None
    if set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_SIZE:
        return values
    size = integer(0, MAX_SIZE)
    return tuple(size.checked(f"a size of {what}", value) for value in values)


def check_range_length(count: float, remedy: str) -> None:
    """Raise `BucketingError` for a range of about `count` sizes if that is above `MAX_SIZES`."""
    if count > MAX_SIZES:
        raise BucketingError(
            f"a range of {count:.0f} sizes has more than the {MAX_SIZES} that are useful: {remedy}"
        )


def checked_names(axes: Iterable[str]) -> tuple[str, ...]:
    """The names of axes as a tuple.

    Raises:
        BucketingError: not names, an empty name, or one that occurs twice.
    """
    try:
        # A text would be a sequence of one-letter names.
        names = (axes,) if isinstance(axes, str) else tuple(itertools.islice(axes, MAX_AXES + 1))
    except TypeError:
        raise BucketingError(f"axes {shown(axes)} must be a sequence of names") from None
    is_named = all(isinstance(name, str) and name for name in names)
    if not is_named or len(set(names)) < len(names):
        raise BucketingError(f"axes {shown(names)} must be different names: correct them")
    if len(names) > MAX_AXES:
        raise BucketingError(f"axes {shown(names)} are more than {MAX_AXES}: give fewer")
    return names


def integer_array(name: str, values: npt.ArrayLike) -> IntArray:
    """`values` as an array of integers; integral floats are accepted.

    Raises:
        BucketingError: not an array of integers of at most `MAX_SIZE`.
    """
    numbers = numeric_array(name, values)
    if not np.all(np.isfinite(numbers)) or np.any(numbers != np.floor(numbers)):
        raise BucketingError(f"{name} must be integers: remove NaN and fractions")
    if np.any(np.abs(numbers) > MAX_SIZE):
        raise BucketingError(f"{name} are above {MAX_SIZE}: remove them")
    return numbers.astype(np.int64)


def numeric_array(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """`values` as an array of integers or floats.

    Raises:
        BucketingError: anything else, such as text, rows of different lengths, or integers of
            more than 64 bits.
    """
    try:
        copied = values if isinstance(values, Sized) and not isinstance(values, np.ndarray) else ()
        numbers = None if len(copied) > MAX_ROWS else np.asarray(values)
    except (TypeError, OverflowError, ValueError):
        raise BucketingError(f"{name} are not an array: give numbers") from None
    if numbers is None:
        raise BucketingError(f"{name} are more than {MAX_ROWS}: give an array of NumPy")
    if numbers.size == 0:
        return np.zeros(numbers.shape, dtype=np.int64)
    if numbers.dtype.kind not in "iuf":
        raise BucketingError(f"{name} must be integers: remove what is not a number")
    return numbers
