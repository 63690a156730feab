"""Checks of settings and of the model. A failure names the setting or the layer, and its value.

`require_at_least` checks a plain argument and `require_paged_attention` the layers of a model. The
others are validators for `attrs.field`, or make one; they raise `InvalidSetting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
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


def require_paged_attention(layer_types: Iterable[str]) -> None:
    """Raises `UnsupportedLayer` for a model with a layer that does not store one entry per token.

    The error names the first such layer and its type. A sliding window overwrites entries that a
    shared prefix needs. A state-space or linear attention layer has one running state per
    sequence, which block copies would corrupt.
    """
    for index, layer_type in enumerate(layer_types):
        if layer_type not in PAGED_ATTENTION:
            raise UnsupportedLayer(
                f"layer {index} is {layer_type!r}, which this cache does not support: only "
                f"{', '.join(sorted(PAGED_ATTENTION))} layers store one entry per token"
            )


def at_least(minimum: int, remedy: str) -> Validator:
    """The validator of an integer of at least ``minimum``."""

    def check(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        require_at_least(attribute.name, value, minimum, remedy)

    return check


def power_of_two(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not _is_integer(value) or value < 1 or value & (value - 1):
        raise InvalidSetting(
            f"{attribute.name} must be a power of two, got {value!r}: use 16, 32, 64 or 128"
        )


def fraction(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not _is_number(value) or not 0 <= value < 1:
        raise InvalidSetting(
            f"{attribute.name} must be at least 0 and below 1, got {value!r}: 0.01 is usual"
        )


def positive(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not _is_number(value) or not value > 0:
        raise InvalidSetting(
            f"{attribute.name} must be a number above 0, got {value!r}: pass a positive number"
        )


def not_negative(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not _is_number(value) or not value >= 0:
        raise InvalidSetting(
            f"{attribute.name} must be a number of at least 0, got {value!r}: "
            "pass 0 or a positive number"
        )


def boolean(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidSetting(
            f"{attribute.name} must be a boolean, got {value!r}: pass True or False"
        )


def ascending(_: object, attribute: attrs.Attribute[Any], value: tuple[Any, ...]) -> None:
    """Positive integers in strictly ascending order."""
    all_positive = all(_is_integer(number) and number > 0 for number in value)
    if not all_positive or any(low >= high for low, high in pairwise(value)):
        raise InvalidSetting(
            f"{attribute.name} must be positive and strictly ascending, got {value!r}: "
            "pass each block count of the decode grid once, in ascending order"
        )


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
