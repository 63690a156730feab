"""Validators of attrs fields. An error names the field, what it accepts, and the value it got."""

from __future__ import annotations

from typing import Any

import attrs

from trencadis.warmup.errors import ConfigError


@attrs.frozen
class integer:  # noqa: N801  reads as a function at its uses
    """Accepts integers of at least ``low``; no bool. Raises `ConfigError`."""

    low: int

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < self.low:
            raise ConfigError(
                f"{attribute.name} must be an integer of at least {self.low}, got {value!r}"
            )


@attrs.frozen
class number:  # noqa: N801
    """Accepts finite numbers from ``low`` to ``high``; no bool. Raises `ConfigError`."""

    low: float
    high: float

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not self.low <= value <= self.high
        ):
            raise ConfigError(
                f"{attribute.name} must be a number from {self.low} to {self.high}, got {value!r}"
            )


@attrs.frozen(init=False)
class one_of:  # noqa: N801
    """Accepts the values in ``accepted``. Raises `ConfigError`."""

    accepted: tuple[object, ...]

    def __init__(self, *accepted: object) -> None:
        self.__attrs_init__(accepted)

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in self.accepted:
            listed = ", ".join(map(str, self.accepted))
            raise ConfigError(f"{attribute.name} must be one of {listed}, got {value!r}")
