"""Checks of settings and of the model. A failure names the setting or the layer, and its value.

The functions named ``require_*`` and `as_integer` check a plain argument. The others are validators
for `attrs.field`, or make one. All but `require_paged_attention` raise `InvalidSetting`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any, TypeGuard

import attrs

from trencadis.kvcache.errors import InvalidSetting, UnsupportedLayer

Validator = Callable[[object, "attrs.Attribute[Any]", Any], None]

PAGED_ATTENTION = frozenset({"attention", "full_attention"})
"""Layer types that store one key and one value vector per token and never overwrite them.

The names are those of ``layer_types`` in a ``transformers`` model configuration.
"""


def require_at_least(name: str, value: object, minimum: int, remedy: str) -> None:
    """Raises `InvalidSetting` unless ``value`` is an integer of at least ``minimum``."""
    if not _is_integer(value) or value < minimum:
        raise InvalidSetting(
            f"{name} must be an integer of at least {minimum}, got {value!r}: {remedy}"
        )


def require_between(name: str, value: object, minimum: int, maximum: int, remedy: str) -> None:
    """Raises `InvalidSetting` unless ``value`` is an integer from ``minimum`` to ``maximum``."""
    if not _is_integer(value) or not minimum <= value <= maximum:
        raise InvalidSetting(
            f"{name} must be an integer from {minimum} to {maximum}, got {value!r}: {remedy}"
        )


def as_integer(name: str, value: object, remedy: str, minimum: int | None = None) -> int:
    """``value`` as an int of at least ``minimum``; NumPy's integers are accepted, a bool is not.

    Raises `InvalidSetting`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidSetting(f"{name} must be an integer, got {value!r}: {remedy}")
    if minimum is not None:
        require_at_least(name, int(value), minimum, remedy)
    return int(value)


def require_finite(name: str, value: object) -> None:
    """Raises `InvalidSetting` unless ``value`` is a finite number."""
    if not _is_finite(value):
        raise InvalidSetting(f"{name} must be a finite number, got {value!r}: pass seconds")


def require_instance(name: str, value: object, kind: type | tuple[type, ...]) -> None:
    """Raises `InvalidSetting` unless ``value`` is an instance of ``kind``, or of one of them."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise InvalidSetting(
            f"{name} must be of type {' or '.join(kind.__name__ for kind in kinds)}, "
            f"got {value!r}: pass such an object"
        )


def require_paged_attention(layer_types: Sequence[str]) -> None:
    """Raises `UnsupportedLayer` for a model with a layer that does not store one entry per token.

    The error names the first such layer and its type. A sliding window overwrites entries that a
    shared prefix needs. A state-space or linear attention layer has one running state per
    sequence, which block copies would corrupt.
    """
    if not isinstance(layer_types, (list, tuple)):
        raise UnsupportedLayer(
            f"layer_types must be the names of the layers, got {layer_types!r}: pass a list"
        )
    for index, layer_type in enumerate(layer_types):
        if not isinstance(layer_type, str) or layer_type not in PAGED_ATTENTION:
            raise UnsupportedLayer(
                f"layer {index} is {layer_type!r}, which this cache does not support: only "
                f"{', '.join(sorted(PAGED_ATTENTION))} layers store one entry per token"
            )


def at_least(minimum: int, remedy: str) -> Validator:
    """The validator of an integer of at least ``minimum``."""

    def check(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        require_at_least(attribute.name, value, minimum, remedy)

    return check


def between(minimum: int, maximum: int, remedy: str) -> Validator:
    """The validator of an integer from ``minimum`` to ``maximum``."""

    def check(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        require_between(attribute.name, value, minimum, maximum, remedy)

    return check


def power_of_two(maximum: int) -> Validator:
    """The validator of a power of two up to ``maximum``."""

    def check(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not _is_integer(value) or not 1 <= value <= maximum or value & (value - 1):
            raise InvalidSetting(
                f"{attribute.name} must be a power of two up to {maximum}, got {value!r}: "
                "use 16, 32, 64 or 128"
            )

    return check


def fraction(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not _is_number(value) or not 0 <= value < 1:
        raise InvalidSetting(
            f"{attribute.name} must be at least 0 and below 1, got {value!r}: 0.01 is usual"
        )


def positive(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not _is_finite(value) or not value > 0:
        raise InvalidSetting(
            f"{attribute.name} must be a finite number above 0, got {value!r}: "
            "pass a positive number"
        )


def not_negative(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not _is_number(value) or not value >= 0:
        raise InvalidSetting(
            f"{attribute.name} must be a number of at least 0, got {value!r}: "
            "pass 0 or a positive number"
        )


def boolean(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    require_bool(attribute.name, value)


def require_bool(name: str, value: object) -> None:
    """Raises `InvalidSetting` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise InvalidSetting(f"{name} must be a boolean, got {value!r}: pass True or False")


def ascending(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    require_ascending(attribute.name, value)


def require_ascending(name: str, value: object) -> None:
    """Raises `InvalidSetting` unless ``value`` is a tuple of ascending positive integers."""
    if (
        not isinstance(value, tuple)
        or not all(_is_integer(number) and number > 0 for number in value)
        or any(low >= high for low, high in pairwise(value))
    ):
        raise InvalidSetting(
            f"{name} must be positive and strictly ascending, got {value!r}: "
            "pass each block count of the decode grid once, in ascending order"
        )


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Whether ``value`` is a number that a float can hold. An int may be larger than that."""
    return _is_number(value) and -sys.float_info.max <= value <= sys.float_info.max
