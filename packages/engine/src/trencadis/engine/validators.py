"""Checks of settings: each refuses a value in words that name setting, value and bounds."""

from __future__ import annotations

import math
from typing import Any

import attrs

from trencadis.engine.errors import ConfigError


def at_least(low: int, *, optional: bool = False) -> Any:
    """A whole number of at least ``low``, or None where that is ``optional``."""

    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if optional and value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(
                f"{attribute.name} must be an integer of at least {low}, got {value!r}"
            )

    return check


def fraction(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A number above 0 and at most 1."""
    if not isinstance(value, (int, float)) or not 0.0 < value <= 1.0:
        raise ConfigError(f"{attribute.name} must be above 0 and at most 1, got {value!r}")


def positive(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    """A number above 0."""
    if not _is_number(value) or value <= 0:
        raise ConfigError(f"{attribute.name} must be above 0, got {value!r}")


def not_negative(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    """A number of 0 or more."""
    if not _is_number(value) or value < 0:
        raise ConfigError(f"{attribute.name} must be 0 or more, got {value!r}")


def longest_sequence(asked: int | None, made_for: int) -> int:
    """Tokens of the longest sequence: as ``asked``, and no more than the model was made for.

    Raises `ConfigError`.
    """
    if asked is not None and asked > made_for:
        raise ConfigError(
            f"max_model_len {asked} is above what the model was made for, {made_for}: lower it"
        )
    return made_for if asked is None else asked


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
