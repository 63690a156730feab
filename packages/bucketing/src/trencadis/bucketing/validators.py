"""Checks of settings and arguments, each with an error that names the value and the remedy."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.rounding import IntArray

Validator: TypeAlias = Callable[[Any, Any, Any], None]
"""A validator of attrs: it takes the instance, the attribute and the value."""

Weights: TypeAlias = IntArray | npt.NDArray[np.float64]
"""The weights of lengths. Sums of integer weights are exact."""


def optional_integer(minimum: int, maximum: int | None = None) -> Validator:
    """The field holds None or an int within the bounds (a bool is not an int here)."""
    bounds = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"

    def validate(_: Any, attribute: Any, value: Any) -> None:
        if value is None:
            return
        within = type(value) is int and minimum <= value and (maximum is None or value <= maximum)
        if not within:
            raise BucketingError(
                f"bucket {attribute.name} {value!r} must be an integer, {bounds}: change it"
            )

    return validate


def one_of(choices: Collection[str], *, optional: bool = False) -> Validator:
    """The field holds one of `choices`; None too where it is optional.

    The field's metadata has its environment variable under `env`, for the error message.
    """

    def validate(_: Any, attribute: Any, value: Any) -> None:
        if (optional and value is None) or (isinstance(value, str) and value in choices):
            return
        raise BucketingError(
            f"bucketing {attribute.name} {value!r} ({attribute.metadata['env']}) is unknown: "
            f"choose from {', '.join(choices)}"
        )

    return validate


def instance_of(kind: type, *, optional: bool = False) -> Validator:
    """The field holds an instance of `kind`; None too where it is optional."""

    def validate(_: Any, attribute: Any, value: Any) -> None:
        if not isinstance(value, kind) and not (optional and value is None):
            raise BucketingError(
                f"bucketing {attribute.name} {value!r} has the wrong type: "
                f"give an instance of {kind.__name__}"
            )

    return validate


def check_positive(**limits: int) -> None:
    """Raise `BucketingError` unless every limit is an int of at least 1."""
    for name, value in limits.items():
        if type(value) is not int or value < 1:
            raise BucketingError(f"{name} {value!r} must be an integer of at least 1: change it")


def checked_integer(name: str, value: SupportsIndex) -> int:
    """`value` as an int; raises `BucketingError` for a float, even an integral one."""
    try:
        return operator.index(value)
    except TypeError:
        raise BucketingError(f"range {name} {value!r} is not an integer: give an int") from None


def checked_range(
    min: SupportsIndex, step: SupportsIndex, max: SupportsIndex
) -> tuple[int, int, int]:
    """The settings (min, step, max) that every range has, as ints.

    Raises:
        BucketingError: a setting that is not an integer, `min` below 0 or above `max`, or `step`
            below 1.
    """
    low, stride, high = (
        checked_integer("min", min),
        checked_integer("step", step),
        checked_integer("max", max),
    )
    if low < 0:
        raise BucketingError(f"range min {low} is negative: give 0 or more")
    if stride < 1:
        raise BucketingError(
            f"range step {stride} never reaches max {high}: give a step of 1 or more"
        )
    if low > high:
        raise BucketingError(f"range min {low} is above max {high}: lower min or raise max")
    return low, stride, high


def checked_axis(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes of one axis of a grid as ints.

    Raises:
        BucketingError: no size, one that is negative or not an integer, or sizes that do not
            strictly increase.
    """
    try:
        values = tuple(operator.index(size) for size in sizes)
    except TypeError:
        raise BucketingError(
            f"axis {name} has sizes {sizes}, not all of them integers: give ints"
        ) from None
    if not values:
        raise BucketingError(f"axis {name} has no sizes: give at least one")
    if any(low >= high for low, high in itertools.pairwise(values)) or values[0] < 0:
        raise BucketingError(
            f"axis {name} has sizes {values}: give them increasing, each once, none negative"
        )
    return values


def checked_lengths(lengths: npt.ArrayLike, max: int) -> IntArray:
    """The lengths to fit a range to, as an array of integers.

    Raises:
        BucketingError: no length, one that is not an integer, or one outside 0 to `max`.
    """
    given = np.asarray(lengths)
    if given.size == 0:
        raise BucketingError("no lengths to fit: record some traffic, or use the exp strategy")
    numeric = np.issubdtype(given.dtype, np.number)
    if not numeric or not np.all(np.isfinite(given)) or np.any(given != np.floor(given)):
        raise BucketingError("lengths to fit must be integers: remove NaN and fractions")
    integers = given.astype(np.int64)
    if integers.min() < 0 or integers.max() > max:
        raise BucketingError(
            f"lengths to fit run from {integers.min()} to {integers.max()}, "
            f"outside 0 to max {max}: raise max, or remove them"
        )
    return integers


def checked_weights(weights: npt.ArrayLike | None, count: int) -> Weights:
    """The weights of `count` lengths; each is 1 where `weights` is None. Integers stay integers.

    Raises:
        BucketingError: not `count` weights, one that is negative or not finite, or all of them 0.
    """
    if weights is None:
        return np.ones(count, dtype=np.int64)
    given = np.asarray(weights)
    exact = np.issubdtype(given.dtype, np.integer)
    values: Weights = given.astype(np.int64) if exact else given.astype(np.float64)
    if len(values) != count or not np.all(np.isfinite(values)) or not np.all(values >= 0):
        raise BucketingError(
            f"the {len(values)} weights must be finite, not negative, and one for each of the "
            f"{count} lengths: correct them"
        )
    if not values.any():
        raise BucketingError("all weights are 0, which leaves nothing to fit: give a positive one")
    return values
