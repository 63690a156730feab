"""What counts as an integer or a number, and how a rejection reads.

NumPy's integers are integers and its floats numbers, kept as Python's; a bool is neither.
A rejection reads ``NAME must be an integer of at least 1, got 0: REMEDY``.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection
from functools import partial
from itertools import islice
from numbers import Integral, Real
from typing import Any, TypeGuard

import attrs

from trencadis.engine.errors import ConfigError as Refusal
from trencadis.engine.errors import shown


def plain_number(value: Any) -> Any:
    """A number of NumPy, or a fraction, as an int or a float; any other value unchanged."""
    if isinstance(value, int) or not isinstance(value, Real):
        return value
    try:
        return operator.index(value) if isinstance(value, Integral) else float(value)
    except (TypeError, OverflowError):  # a duration of NumPy; a fraction above the largest float
        return value


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer."""
    return isinstance(plain_number(value), int) and not isinstance(value, bool)


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that a float can hold, other than NaN and the infinities."""
    plain = plain_number(value)
    return (isinstance(plain, float) or is_integer(plain)) and abs(plain) <= sys.float_info.max


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a value is a str that UTF-8 can encode: one without lone surrogates."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


@attrs.frozen
class Validator:
    """Accepts what ``is_kind``, in words ``kind``, within the bounds, if any. ``error`` makes the
    exception from the message and the name of the value."""

    kind: str
    is_kind: Callable[[Any], bool]
    low: float | None = None
    high: float | None = None
    exclusive_low: bool = False
    choices: Collection[Any] = ()
    optional: bool = False
    remedy: str = ""
    error: Callable[[str, str], Exception] = Refusal

    @property
    def accepted(self) -> str:
        """The accepted values in words."""
        low, high = (str(bound).removesuffix(".0") for bound in (self.low, self.high))
        if self.choices:
            return f"{self.kind} {', '.join(map(str, self.choices))}"
        if self.exclusive_low:
            return f"{self.kind} above {low}{'' if self.high is None else f' and at most {high}'}"
        if self.high is not None:
            return f"{self.kind} from {low} to {high}"
        return self.kind if self.low is None else f"{self.kind} of at least {low}"

    def accepts(self, value: Any) -> bool:
        """Whether a value, a number as Python's, is accepted."""
        if not self.is_kind(value):
            return value is None and self.optional
        if self.low is not None and (value <= self.low if self.exclusive_low else value < self.low):
            return False
        return self.high is None or value <= self.high

    def checked(self, name: str, value: Any) -> Any:
        """The value of an argument, a number as Python's. Raises unless it is accepted."""
        value = plain_number(value)
        if not self.accepts(value):
            remedy = f": {self.remedy}" if self.remedy else ""
            raise self.error(f"{name} must be {self.accepted}, got {shown(value)}{remedy}", name)
        return value

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if (plain := self.checked(attribute.name, value)) is not value:
            object.__setattr__(instance, attribute.name, plain)


integer = partial(Validator, "an integer", is_integer)
number = partial(Validator, "a finite number", is_finite)
boolean = partial(Validator, "True or False", lambda value: isinstance(value, bool))
text = partial(Validator, "a text that UTF-8 can encode", is_text)
MAX_ITEMS = 1 << 24  # more than any model's context has tokens


def one_of(choices: Collection[Any], **options: Any) -> Validator:
    """Accepts each of ``choices``, and not 1 for True."""

    def is_choice(value: Any) -> bool:
        return any(isinstance(value, type(choice)) and value == choice for choice in choices)

    return Validator("one of", is_choice, choices=choices, **options)


def items_of(value: Any) -> tuple[Any, ...] | None:
    """The items of an iterable; None for a text, for others, and for more than `MAX_ITEMS`."""
    try:
        is_long = isinstance(value, (str, bytes)) or operator.length_hint(value) > MAX_ITEMS
        items = () if is_long else tuple(islice(value, MAX_ITEMS + 1))
        return None if is_long or len(items) > MAX_ITEMS else items
    except (TypeError, OverflowError):  # also from a tensor without dimensions; from a range
        return None
