"""Validators of attrs fields. Each one refuses a value with the field's name, the value and the
bounds.

The bounds are attributes of the validator, so that help texts and the API's schema can be derived
from them. ``error`` makes the exception from the message and the name of the field: an error class
of this package, or any callable of that form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from trencadis.engine.errors import ConfigError

ErrorFactory = Callable[[str, str], Exception]


@attrs.frozen
class Integer:
    """An integer from ``low`` to ``high``, both included; None is no bound. A bool is no integer.

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
    """A finite number from ``low`` to ``high``; None is no bound. A bool is no number.

    ``exclusive_low`` refuses ``low`` itself. ``optional`` also accepts None as the value.
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
            or not math.isfinite(value)
            or (self.low is not None and value < self.low)
            or (self.low is not None and self.exclusive_low and value == self.low)
            or (self.high is not None and value > self.high)
        ):
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


def one_of(*accepted: object, error: ErrorFactory = ConfigError) -> OneOf:
    """Validate a value of a closed list."""
    return OneOf(accepted, error)


def power_of_two(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate a power of two, such as 32."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
        raise ConfigError(f"{attribute.name} must be a power of two, got {value!r}", attribute.name)


def _refusal(
    validator: Integer | Number | OneOf, attribute: attrs.Attribute[Any], value: object
) -> Exception:
    message = f"{attribute.name} must be {validator.accepted}, got {value!r}"
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
