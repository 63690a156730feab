"""Validators of the settings: each error names the setting, its value and what is accepted."""

from __future__ import annotations

import math
from typing import Any

import attrs

from trencadis.warmup.errors import ConfigError


def fraction(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if math.isnan(value) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"{attribute.name} must be from 0 to 1, got {value!r}")


def positive(_: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if value <= 0:
        raise ConfigError(f"{attribute.name} must be positive, got {value!r}")


def not_negative(_: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if value < 0:
        raise ConfigError(f"{attribute.name} must not be negative, got {value!r}")
