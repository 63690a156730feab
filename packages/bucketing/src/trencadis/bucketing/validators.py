"""Checks of settings and arguments, each with an error that names the value and the remedy."""

from __future__ import annotations

import functools
import itertools
import operator
import os
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.rounding import IntArray

Validator: TypeAlias = Callable[[Any, Any, Any], None]
"""A validator of attrs: it takes the instance, the attribute and the value."""

Weights: TypeAlias = IntArray | npt.NDArray[np.float64]
"""The weights of lengths. Sums of integer weights are exact."""

MAX_SIZE = 1 << 40
"""The largest size and the largest setting, in any unit. Products of three sizes stay finite as
floats, and a size fits an array of 64-bit integers."""

MAX_SIZES = 1 << 20
"""The most sizes of a range. Far more graphs than a server captures; a step that is too small by
mistake is rejected before it fills the memory."""

MAX_TAIL = 1_000_000
"""The largest tail weight of a fit. At this weight, little but the largest padding counts."""


MAX_AXES = 16
"""The most axes of a grid."""

MAX_ROWS = 1 << 26
"""The most numbers of a sequence that is copied to an array."""


def shown(value: object) -> str:
    """`value` for an error message: shortened, and without the digits of a huge integer."""
    # Python does not print an integer of thousands of digits.
    if isinstance(value, int) and value.bit_length() > 256:
        return f"of {value.bit_length()} bits"
    if isinstance(value, (tuple, list)):
        items = ", ".join(map(shown, value[:_MOST_SHOWN]))
        return f"({items}, …)" if len(value) > _MOST_SHOWN else f"({items})"
    try:
        text = repr(value)
    except ValueError:  # it contains such an integer
        text = f"of type {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


_MOST_SHOWN, _LONGEST_SHOWN = 8, 120


def optional_integer(minimum: int, maximum: int = MAX_SIZE) -> Validator:
    """The field holds None or an int within the bounds (a bool is not an int here)."""
    # The bound of every setting is above anything that fits a device: no message needs it.
    bounds = f"at least {minimum}" if maximum == MAX_SIZE else f"{minimum} to {maximum}"

    def validate(_: Any, attribute: Any, value: Any) -> None:
        if value is None:
            return
        if type(value) is int and value > maximum == MAX_SIZE:
            raise BucketingError(
                f"bucket {attribute.name} {shown(value)} is above {MAX_SIZE}: lower it"
            )
        if type(value) is not int or not minimum <= value <= maximum:
            raise BucketingError(
                f"bucket {attribute.name} {shown(value)} must be an integer, {bounds}: change it"
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
            f"bucketing {attribute.name} {shown(value)} ({attribute.metadata['env']}) is unknown: "
            f"choose from {', '.join(choices)}"
        )

    return validate


def instance_of(kind: type, *, optional: bool = False) -> Validator:
    """The field holds an instance of `kind`; None too where it is optional."""

    def validate(_: Any, attribute: Any, value: Any) -> None:
        if not isinstance(value, kind) and not (optional and value is None):
            raise BucketingError(
                f"bucketing {attribute.name} {shown(value)} has the wrong type: "
                f"give an instance of {kind.__name__}"
            )

    return validate


def check_positive(**limits: int) -> None:
    """Raise `BucketingError` unless every limit is an int of at least 1, and `MAX_SIZE` at most."""
    for name, value in limits.items():
        if type(value) is not int or value < 1:
            raise BucketingError(
                f"{name} {shown(value)} must be an integer of at least 1: change it"
            )
        if value > MAX_SIZE:
            raise BucketingError(f"{name} {shown(value)} is above {MAX_SIZE}: lower it")


def check_instance(name: str, value: object, kind: type | tuple[type, ...]) -> None:
    """Raise `BucketingError` unless the argument `name` is an instance of `kind`."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise BucketingError(
            f"{name} {shown(value)} has the wrong type: "
            f"give {' or '.join(choice.__name__ for choice in kinds)}"
        )


def check_path(path: object) -> None:
    """Raise `BucketingError` unless `path` can name a file."""
    check_instance("path", path, (str, os.PathLike))
    try:
        encoded = os.fsencode(path)  # type: ignore[arg-type]
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise BucketingError(f"path {shown(path)} cannot name a file: give one that can")


def checked_integer(name: str, value: SupportsIndex) -> int:
    """`value` as an int; raises `BucketingError` for a float, even an integral one."""
    try:
        return operator.index(value)
    except TypeError:
        raise BucketingError(
            f"range {name} {shown(value)} is not an integer: give an int"
        ) from None


def _first_integers(sizes: Iterable[SupportsIndex]) -> tuple[int, ...] | None:
    """The integers of an iterable, `MAX_SIZES` + 1 at most; None if there is anything else."""
    try:
        return tuple(map(operator.index, itertools.islice(sizes, MAX_SIZES + 1)))
    except TypeError:
        return None


def checked_sizes(what: str, sizes: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """`sizes` as ints from 0 to `MAX_SIZE`; `what` names them in the error.

    Raises:
        BucketingError: not an iterable of such integers.
    """
    values = _first_integers(sizes)
    if values is None:
        raise BucketingError(f"{what} {shown(sizes)} are not all integers: give a sequence of ints")
    if values and min(values) < 0:
        raise BucketingError(f"{what} {shown(values)} has a negative size: give sizes of 0 or more")
    if values and max(values) > MAX_SIZE:
        raise BucketingError(f"{what} {shown(values)} has a size above {MAX_SIZE}: lower it")
    return values


@functools.lru_cache(maxsize=256)
def _check_names(names: tuple[str, ...]) -> None:
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise BucketingError(f"axes {shown(names)} must be different names: correct them")
    if len(names) > MAX_AXES:
        raise BucketingError(f"axes {shown(names)} are more than {MAX_AXES}: give fewer")


def checked_names(axes: Iterable[str]) -> tuple[str, ...]:
    """The names of axes as a tuple.

    Raises:
        BucketingError: not names, an empty name, or one that occurs twice.
    """
    try:
        # A text would be a sequence of one-letter names.
        names = (axes,) if isinstance(axes, str) else tuple(itertools.islice(axes, MAX_AXES + 1))
        _check_names(names)
    except TypeError:  # no iterable, or a name that is not hashable
        raise BucketingError(
            f"axes {shown(axes)} are not names: give a sequence of strings"
        ) from None
    return names


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
        raise BucketingError(f"range min {shown(low)} is negative: give 0 or more")
    if stride < 1:
        raise BucketingError(
            f"range step {shown(stride)} never reaches max {shown(high)}: give a step of 1 or more"
        )
    if low > high:
        raise BucketingError(
            f"range min {shown(low)} is above max {shown(high)}: lower min or raise max"
        )
    for name, value in (("step", stride), ("max", high)):
        if value > MAX_SIZE:
            raise BucketingError(f"range {name} {shown(value)} is above {MAX_SIZE}: lower it")
    return low, stride, high


def check_range_length(count: float, remedy: str) -> None:
    """Raise `BucketingError` for a range of about `count` sizes if that is above `MAX_SIZES`."""
    if count > MAX_SIZES:
        raise BucketingError(
            f"a range of {count:.0f} sizes has more than the {MAX_SIZES} that are useful: {remedy}"
        )


def checked_axis(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes of one axis of a grid as ints.

    Raises:
        BucketingError: no size, one that is negative or not an integer, or sizes that do not
            strictly increase.
    """
    values = _first_integers(sizes)
    if values is None:
        raise BucketingError(
            f"axis {name} has sizes {shown(sizes)}, not all of them integers: give ints"
        )
    check_range_length(len(values), "give fewer")
    if not values:
        raise BucketingError(f"axis {name} has no sizes: give at least one")
    if any(low >= high for low, high in itertools.pairwise(values)) or values[0] < 0:
        raise BucketingError(
            f"axis {name} has sizes {shown(values)}: give them increasing, each once, none negative"
        )
    if values[-1] > MAX_SIZE:
        raise BucketingError(f"axis {name} ends at {shown(values[-1])}, above {MAX_SIZE}: lower it")
    return values


def checked_lengths(lengths: npt.ArrayLike, max: int) -> IntArray:
    """The lengths to fit a range to, as an array of integers.

    Raises:
        BucketingError: no length, one that is not an integer, or one outside 0 to `max`.
    """
    integers = integer_array("lengths to fit", lengths)
    if integers.ndim != 1:
        raise BucketingError(
            f"lengths to fit have {integers.ndim} dimensions: give a sequence of integers"
        )
    if integers.size == 0:
        raise BucketingError("no lengths to fit: record some traffic, or use the exp strategy")
    if integers.min() < 0 or integers.max() > max:
        raise BucketingError(
            f"lengths to fit run from {integers.min()} to {integers.max()}, "
            f"outside 0 to max {max}: raise max, or remove them"
        )
    return integers


def integer_array(name: str, values: npt.ArrayLike) -> IntArray:
    """`values` as an array of integers; integral floats are accepted.

    Raises:
        BucketingError: not an array of integers of at most `MAX_SIZE`.
    """
    given = numeric_array(name, values)
    if not np.all(np.isfinite(given)) or np.any(given != np.floor(given)):
        raise BucketingError(f"{name} must be integers: remove NaN and fractions")
    if np.any(np.abs(given) > MAX_SIZE):
        raise BucketingError(f"{name} are above {MAX_SIZE}: remove them")
    return given.astype(np.int64)


def _check_row_count(name: str, count: int) -> None:
    if count > MAX_ROWS:
        raise BucketingError(f"{name} are more than {MAX_ROWS}: give an array of NumPy")


def numeric_array(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """`values` as an array of integers or floats.

    Raises:
        BucketingError: anything else, such as text, rows of different lengths, or integers of
            more than 64 bits.
    """
    try:
        if not isinstance(values, np.ndarray) and isinstance(values, Sized):
            _check_row_count(name, len(values))
        given = np.asarray(values)
    except BucketingError:
        raise
    except (TypeError, OverflowError, ValueError):
        raise BucketingError(f"{name} are not an array: give numbers") from None
    if given.size == 0:
        return np.zeros(given.shape, dtype=np.int64)
    if not (np.issubdtype(given.dtype, np.integer) or np.issubdtype(given.dtype, np.floating)):
        raise BucketingError(f"{name} must be integers: remove what is not a number")
    return given


def checked_weights(weights: npt.ArrayLike | None, count: int) -> Weights:
    """The weights of `count` lengths; each is 1 where `weights` is None. Integers stay integers.

    Raises:
        BucketingError: not `count` weights, one that is negative or not finite, or all of them 0.
    """
    if weights is None:
        return np.ones(count, dtype=np.int64)
    given = numeric_array("weights", weights)
    if given.shape != (count,) or not np.all(np.isfinite(given)) or not np.all(given >= 0):
        raise BucketingError(
            f"the {given.size} weights must be finite, not negative, and one for each of the "
            f"{count} lengths: correct them"
        )
    if not given.any():
        raise BucketingError("all weights are 0, which leaves nothing to fit: give a positive one")
    exact = np.issubdtype(given.dtype, np.integer) and given.max() <= MAX_SIZE
    return given.astype(np.int64) if exact else given.astype(np.float64)


def check_tail(tail: float) -> None:
    """Raise `BucketingError` unless `tail` is a number from 0 to `MAX_TAIL`."""
    if not isinstance(tail, (int, float)) or not 0 <= tail <= MAX_TAIL:  # NaN fails this too
        raise BucketingError(
            f"fit tail {shown(tail)} is not a number from 0 to {MAX_TAIL}: change it"
        )
