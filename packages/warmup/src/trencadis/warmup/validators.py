"""Validators of settings. An error names the field, the accepted values and the value given.

A validator is a frozen value with public bounds, so that other layers derive their bounds from it:
``attrs.fields(WarmupConfig).graph_prompt_ratio.validator.high``.
"""

from __future__ import annotations

from typing import Any

import attrs

from trencadis.warmup.errors import ConfigError


@attrs.frozen
class IntegerValidator:
    """Accepts integers of at least ``low``. A bool is no integer."""

    low: int

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < self.low:
            raise ConfigError(
                f"{attribute.name} must be an integer of at least {self.low}, got {value!r}"
            )


@attrs.frozen
class NumberValidator:
    """Accepts numbers from ``low`` to ``high``. NaN and a bool are no numbers."""

    low: float
    high: float

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:
            raise ConfigError(
                f"{attribute.name} must be a number from {self.low:g} to {self.high:g}, "
                f"got {value!r}"
            )


@attrs.frozen
class ChoiceValidator:
    """Accepts the values in ``accepted``."""

    accepted: tuple[str, ...]

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in self.accepted:
            raise ConfigError(
                f"{attribute.name} must be one of {', '.join(self.accepted)}, got {value!r}"
            )


def integer(low: int) -> IntegerValidator:
    """Accepts integers of at least ``low``."""
    return IntegerValidator(low)


def number(low: float, high: float) -> NumberValidator:
    """Accepts numbers from ``low`` to ``high``."""
    return NumberValidator(low, high)


def one_of(*accepted: str) -> ChoiceValidator:
    """Accepts these values only."""
    return ChoiceValidator(accepted)
