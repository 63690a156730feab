"""The validators of `trencadis.kvcache` with the errors of this package, and those of token ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import attrs

from trencadis.kvcache import validators
from trencadis.kvcache.validators import Validator, is_finite, is_integer, plain_number
from trencadis.scheduler.errors import ConfigError

__all__ = ["Validator", "is_finite", "is_integer"]

integer = partial(validators.integer, error=ConfigError)
number = partial(validators.number, error=ConfigError)
boolean = partial(validators.boolean, error=ConfigError)
one_of = partial(validators.one_of, error=ConfigError)
instance_of = partial(validators.instance_of, error=ConfigError)

POSITIVE = number(0, exclusive_low=True)


def setting(default: Any, validator: Validator, help: str) -> Any:
    """A field with its meaning as metadata."""
    return attrs.field(default=default, validator=validator, metadata={"help": help})


MAX_TOKEN_ID = 2**31 - 1
"""The KV cache keeps token ids as signed integers of 32 bits."""


def is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold, also NaN or an infinity."""
    return is_finite(value) or isinstance(plain_number(value), float)


def as_token_ids(
    values: Iterable[int], name: str, error: Callable[[str, str], Exception]
) -> tuple[int, ...]:
    """The token ids as plain integers. Raises ``error``, naming the value, unless they are some."""
    try:
        token_ids = tuple(values)
    except TypeError:
        raise error(f"{name} must be a sequence of token ids, got {values!r}", name) from None
    if are_token_ids(token_ids):
        return token_ids
    checked = integer(0, MAX_TOKEN_ID, error=error).checked
    return tuple(checked(f"{name}[{index}]", value) for index, value in enumerate(token_ids))


def are_token_ids(values: Collection[Any]) -> bool:
    """Whether all values are integers of Python from 0 to `MAX_TOKEN_ID`.

    Checked in C: a prompt may have a hundred thousand tokens, and every step has some hundred.
    """
    is_plain = set(map(type, values)) <= {int}
    return is_plain and min(values, default=0) >= 0 and max(values, default=0) <= MAX_TOKEN_ID
