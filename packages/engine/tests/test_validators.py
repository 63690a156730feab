"""The validators of settings: which values pass, and what a refusal says."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from trencadis.engine import ConfigError, InvalidRequest
from trencadis.engine.validators import Integer, Number, OneOf, integer, number, one_of


def value_of(validator: Integer | Number | OneOf, value: object) -> object:
    """The value of a field ``x`` with this validator, after validation."""
    holder = attrs.make_class("Holder", {"x": attrs.field(validator=validator)}, frozen=True)
    return holder(x=value).x


@pytest.mark.parametrize(
    ("validator", "value"),
    [
        (integer(), -5),
        (integer(1), 1),
        (integer(0, 65_535), 65_535),
        (integer(2, optional=True), None),
        (number(), -0.5),
        (number(0), 0),
        (number(0, 1, exclusive_low=True), 1.0),
        (number(0, optional=True), None),
        (one_of("a", "b"), "b"),
        (one_of(True, False, "never"), True),
        (one_of(0, 1), 1),
    ],
)
def test_a_value_within_the_bounds_passes(
    validator: Integer | Number | OneOf, value: object
) -> None:
    assert value_of(validator, value) is value


@pytest.mark.parametrize(
    ("validator", "value", "accepted"),
    [
        (integer(), "1", "an integer"),
        (integer(), 1.0, "an integer"),
        (integer(), True, "an integer"),
        (integer(), None, "an integer"),
        (integer(1), 0, "an integer of at least 1"),
        (integer(high=4), 5, "an integer of at most 4"),
        (integer(0, 65_535), 70_000, "an integer from 0 to 65535"),
        (number(), "1", "a number"),
        (number(), math.nan, "a number"),
        (number(), math.inf, "a number"),
        (number(), False, "a number"),
        (number(), None, "a number"),
        (number(0), -1, "a number of at least 0"),
        (number(0, exclusive_low=True), 0.0, "a number above 0"),
        (number(0.0, 1.0, exclusive_low=True), 0, "a number above 0 and at most 1"),
        (number(-0.5, 2), 2.1, "a number from -0.5 to 2"),
        (number(high=2), 3, "a number of at most 2"),
        (one_of("a", "b"), "c", "one of a, b"),
        (one_of(True, False, "never"), 1, "one of True, False, never"),
        (one_of("a"), ["a"], "one of a"),
    ],
)
def test_a_refusal_names_field_bounds_and_value(
    validator: Integer | Number | OneOf, value: object, accepted: str
) -> None:
    assert validator.accepted == accepted
    with pytest.raises(ConfigError) as refusal:
        value_of(validator, value)
    assert str(refusal.value) == f"x must be {accepted}, got {value!r}"
    assert refusal.value.field == "x"


def test_the_error_can_be_chosen() -> None:
    for validator in (
        integer(1, error=InvalidRequest),
        number(1, error=InvalidRequest),
        one_of("a", error=InvalidRequest),
    ):
        with pytest.raises(InvalidRequest, match="x must be") as refusal:
            value_of(validator, 0)
        assert refusal.value.field == "x"

    def renamed(message: str, name: str) -> Any:
        return KeyError(f"{name}: {message}")

    with pytest.raises(KeyError, match="x: x must be an integer"):
        value_of(integer(error=renamed), "y")


def test_the_bounds_can_be_read() -> None:
    assert (integer(1, 128).low, integer(1, 128).high) == (1, 128)
    bounds = number(0, 1, exclusive_low=True)
    assert (bounds.low, bounds.high, bounds.exclusive_low) == (0, 1, True)
    assert one_of("a", "b").choices == ("a", "b")
