"""Validators of attrs fields. Each one rejects a value with the field's name, the value and the
bounds.

The bounds are attributes of the validator, so that help texts and the API's schema can be derived
from them. ``error`` makes the exception from the message and the name of the field: an error class
of this package, or any callable of that form.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import attrs

from trencadis.engine.errors import ConfigError

ErrorFactory = Callable[[str, str], Exception]


@attrs.frozen
class Integer:
    """An integer from ``low`` to ``high``, both included; None: no bound. A bool is not an integer.

    ``optional`` also accepts None as the value.
    """

    low: int | None
    high: int | None
    optional: bool
    error: ErrorFactory

    @property
    def accepted(self) -> str:
        """The accepted values in words."""
        return _accepted("an integer", self.low, self.high)

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if self.optional and value is None:
            return
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or (self.low is not None and value < self.low)
            or (self.high is not None and value > self.high)
        ):
            raise _refusal(self, attribute, value)


@attrs.frozen
class Number:
    """A finite number from ``low`` to ``high``; None means no bound. A bool is not a number.

    ``exclusive_low`` rejects ``low`` itself. ``optional`` also accepts None as the value.
    """

    low: float | None
    high: float | None
    exclusive_low: bool
    optional: bool
    error: ErrorFactory

    @property
    def accepted(self) -> str:
        """The accepted values in words."""
        return _accepted("a number", self.low, self.high, self.exclusive_low)

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if self.optional and value is None:
            return
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not _is_finite(value)
            or (self.low is not None and value < self.low)
            or (self.low is not None and self.exclusive_low and value == self.low)
            or (self.high is not None and value > self.high)
        ):
            raise _refusal(self, attribute, value)


@attrs.frozen
class Boolean:
    """True or False: no number, and no text such as ``"no"``, which counts as true."""

    optional: bool
    error: ErrorFactory

    @property
    def accepted(self) -> str:
        """The accepted values in words."""
        return "True, False or None" if self.optional else "True or False"

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, bool) and not (value is None and self.optional):
            raise _refusal(self, attribute, value)


@attrs.frozen
class Text:
    """A text that UTF-8 can encode: without lone surrogates. ``optional`` also accepts None."""

    optional: bool
    error: ErrorFactory

    @property
    def accepted(self) -> str:
        """The accepted values in words."""
        return "a text that UTF-8 can encode"

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not (is_text(value) or (self.optional and value is None)):
            raise _refusal(self, attribute, value)


@attrs.frozen
class OneOf:
    """One of ``choices``. 1 is not taken for True."""

    choices: tuple[object, ...]
    error: ErrorFactory

    @property
    def accepted(self) -> str:
        """The accepted values in words."""
        return f"one of {', '.join(map(str, self.choices))}"

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not any(isinstance(value, type(choice)) and value == choice for choice in self.choices):
            raise _refusal(self, attribute, value)


def integer(
    low: int | None = None,
    high: int | None = None,
    *,
    optional: bool = False,
    error: ErrorFactory = ConfigError,
) -> Integer:
    """Validate an integer within bounds."""
    return Integer(low, high, optional, error)


def number(
    low: float | None = None,
    high: float | None = None,
    *,
    exclusive_low: bool = False,
    optional: bool = False,
    error: ErrorFactory = ConfigError,
) -> Number:
    """Validate a finite number within bounds."""
    return Number(low, high, exclusive_low, optional, error)


def boolean(*, optional: bool = False, error: ErrorFactory = ConfigError) -> Boolean:
    """Validate True or False."""
    return Boolean(optional, error)


def text(*, optional: bool = False, error: ErrorFactory = ConfigError) -> Text:
    """Validate a text that UTF-8 can encode."""
    return Text(optional, error)


def one_of(*accepted: object, error: ErrorFactory = ConfigError) -> OneOf:
    """Validate a value of a closed list."""
    return OneOf(accepted, error)


MAX_POWER_OF_TWO = 1 << 16
"""Largest value of `power_of_two`. The longest KV blocks in use have 256 tokens."""


def power_of_two(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate a power of two from 1 to `MAX_POWER_OF_TWO`, such as 32."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not 1 <= value <= MAX_POWER_OF_TWO or value & (value - 1):
        raise ConfigError(
            f"{attribute.name} must be a power of two up to {MAX_POWER_OF_TWO}, got {shown(value)}",
            attribute.name,
        )


def device_indices(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate a tuple of distinct indices from 0, or None."""
    if value is None:
        return
    is_valid = (
        isinstance(value, tuple)
        and bool(value)
        and all(isinstance(index, int) and not isinstance(index, bool) for index in value)
        and min(value) >= 0
        and len(set(value)) == len(value)
    )
    if not is_valid:
        raise ConfigError(
            f"{attribute.name} must be distinct indices of devices from 0, as in (0, 1), "
            f"got {shown(value)}",
            attribute.name,
        )


def plain_number(value: Any) -> Any:
    """NumPy's and others' numbers as int or float, which messages carry; other values unchanged."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def items_of(value: Any) -> tuple[Any, ...] | None:
    """The items of a list or another iterable; None for a text, and for what has no items."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return tuple(value)
    except TypeError:  # also from a tensor without dimensions, which claims to be iterable
        return None


def is_text(value: object) -> bool:
    """Whether a value is a str that UTF-8 can encode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class _ShortRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = _MAX_SHOWN

    def repr_int(self, value: int, _: int) -> str:
        # Python does not write an integer of more than 4300 digits.
        bits = value.bit_length()
        return repr(value) if bits <= 256 else f"an integer of {bits} bits"


_MAX_SHOWN = 200
_SHORT_REPR = _ShortRepr()


def shown(value: object) -> str:
    """A value as an error message shows it: its repr, shortened. Never raises."""
    text = _SHORT_REPR.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer past the largest float
        return False


def _refusal(
    validator: Integer | Number | Boolean | Text | OneOf,
    attribute: attrs.Attribute[Any],
    value: object,
) -> Exception:
    message = f"{attribute.name} must be {validator.accepted}, got {shown(value)}"
    return validator.error(message, attribute.name)


def _accepted(kind: str, low: float | None, high: float | None, exclusive_low: bool = False) -> str:
    if low is None:
        return kind if high is None else f"{kind} of at most {_bound(high)}"
    if exclusive_low:
        below = "" if high is None else f" and at most {_bound(high)}"
        return f"{kind} above {_bound(low)}{below}"
    if high is None:
        return f"{kind} of at least {_bound(low)}"
    return f"{kind} from {_bound(low)} to {_bound(high)}"


def _bound(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
