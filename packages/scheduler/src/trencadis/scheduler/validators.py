"""Validators of settings. An error names the field, the accepted values and the value given.

A validator is a frozen value with public bounds, so that other layers (an HTTP schema, a command
line) derive their bounds from it: ``attrs.fields(Config).some_field.validator.low``.

A bool is never an integer or a number; a NumPy integer is. NaN and infinities are never numbers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any

import attrs

from trencadis.scheduler.errors import ConfigError, SchedulerError

MAX_TOKEN_ID = 2**31 - 1
"""The KV cache keeps token ids as signed integers of 32 bits."""


@attrs.frozen
class IntegerValidator:
    """Accepts integers from ``low`` to ``high`` (None: no bound on that side)."""

    low: int | None
    high: int | None
    optional: bool
    error: type[SchedulerError]

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and self.optional:
            return
        if not is_integer(value) or not self._is_within_bounds(value):
            raise self.error(f"{attribute.name} must be {self}, got {value!r}")

    def _is_within_bounds(self, value: int) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        bounds = "" if self.low is None else f" of at least {self.low}"
        if self.high is not None:
            bounds = f" from {self.low} to {self.high}"
        return f"an integer{bounds}{' or None' if self.optional else ''}"


@attrs.frozen
class NumberValidator:
    """Accepts finite numbers from ``low`` to ``high`` (None: no bound on that side).

    ``exclusive_low``: ``low`` itself is rejected.
    """

    low: float | None
    high: float | None
    exclusive_low: bool
    optional: bool
    error: type[SchedulerError]

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and self.optional:
            return
        if not is_finite(value) or not self._is_within_bounds(value):
            raise self.error(f"{attribute.name} must be {self}, got {value!r}")

    def _is_within_bounds(self, value: float) -> bool:
        if self.low is not None and (
            value < self.low or (self.exclusive_low and value == self.low)
        ):
            return False
        return self.high is None or value <= self.high

    def __str__(self) -> str:
        bounds = []
        if self.low is not None:
            bounds.append(f"above {self.low:g}" if self.exclusive_low else f"at least {self.low:g}")
        if self.high is not None:
            bounds.append(f"at most {self.high:g}")
        text = f"a finite number, {' and '.join(bounds)}" if bounds else "a finite number"
        return f"{text}{', or None' if self.optional else ''}"


@attrs.frozen
class ChoiceValidator:
    """Accepts the values in ``accepted``, and none that is equal but of another type."""

    accepted: tuple[Any, ...]
    error: type[SchedulerError]

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        # 1 equals True. A NumPy array has another type, and its comparison has no truth value.
        if type(value) not in map(type, self.accepted) or value not in self.accepted:
            raise self.error(f"{attribute.name} must be {self}, got {value!r}")

    def __str__(self) -> str:
        return f"one of {', '.join(map(str, self.accepted))}"


@attrs.frozen
class TypeValidator:
    """Accepts instances of ``expected``."""

    expected: type
    optional: bool
    error: type[SchedulerError]

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, self.expected) and not (value is None and self.optional):
            raise self.error(f"{attribute.name} must be {self}, got {value!r}")

    def __str__(self) -> str:
        return f"a {self.expected.__name__}{' or None' if self.optional else ''}"


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, also one of NumPy; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold, also NaN; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:  # an integer beyond the range of floats
        return False
    return True


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number, also one of NumPy; a bool is none."""
    return is_number(value) and math.isfinite(value)


def integer(
    low: int | None,
    high: int | None = None,
    *,
    optional: bool = False,
    error: type[SchedulerError] = ConfigError,
) -> IntegerValidator:
    """Accepts integers from ``low`` to ``high``, and None where ``optional``."""
    return IntegerValidator(low, high, optional, error)


def number(
    low: float | None = None,
    high: float | None = None,
    *,
    exclusive_low: bool = False,
    optional: bool = False,
    error: type[SchedulerError] = ConfigError,
) -> NumberValidator:
    """Accepts finite numbers from ``low`` to ``high``, and None where ``optional``."""
    return NumberValidator(low, high, exclusive_low, optional, error)


def instance_of(
    accepted: type, *, optional: bool = False, error: type[SchedulerError] = ConfigError
) -> TypeValidator:
    """Accepts instances of this class, and None where ``optional``."""
    return TypeValidator(accepted, optional, error)


def one_of(*accepted: Any, error: type[SchedulerError] = ConfigError) -> ChoiceValidator:
    """Accepts these values only."""
    return ChoiceValidator(accepted, error)


def check_instance(
    name: str, value: Any, *accepted: type, error: type[SchedulerError] = ConfigError
) -> None:
    """Raise ``error`` unless ``value``, the argument ``name``, is an instance of ``accepted``."""
    if not isinstance(value, accepted):
        names = " or ".join(kind.__name__ for kind in accepted)
        raise error(f"{name} must be a {names}, got {value!r}")


def check_token_id(value: Any, name: str, error: type[SchedulerError]) -> None:
    """Raise ``error`` unless ``value`` is an integer from 0 to `MAX_TOKEN_ID`."""
    if not is_integer(value) or not 0 <= value <= MAX_TOKEN_ID:
        raise error(f"{name} must be an integer from 0 to {MAX_TOKEN_ID}, got {value!r}")


def as_token_ids(values: Iterable[int], name: str, error: type[SchedulerError]) -> tuple[int, ...]:
    """The token ids as plain integers. Raises ``error``, naming the value, unless they are some."""
    try:
        token_ids = tuple(values)
    except TypeError:
        raise error(f"{name} must be a sequence of token ids, got {values!r}") from None
    if not are_token_ids(token_ids):
        for index, value in enumerate(token_ids):
            check_token_id(value, f"{name}[{index}]", error)
    return tuple(map(int, token_ids))


def are_token_ids(values: Collection[Any]) -> bool:
    """Whether all values are integers from 0 to `MAX_TOKEN_ID`.

    Checked in C: a prompt may have a hundred thousand tokens, and every step has some hundred.
    """
    try:
        return not values or min(array("i", values)) >= 0
    except (TypeError, OverflowError):
        return False
