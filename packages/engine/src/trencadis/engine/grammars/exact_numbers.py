"""Rejects schemas whose numbers llguidance would read as other ones.

It keeps numbers as doubles and integers in 64 bits. So ``{"const": 9007199254740993}`` forces the
answer ``9007199254740992``, and a minimum that is rounded down lets a smaller number through. A
bound that is rounded inwards only excludes answers, and is served.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_EXACT = 1 << 53
"""Up to this integer each one is a double."""

_MIN, _MAX = -(1 << 63), (1 << 63) - 1
"""Integers beyond these become these."""

_REMEDY = f"use integers within ±{_EXACT}, at most 15 digits otherwise, or strings"

_STEPS = {"minimum": 0, "exclusiveMinimum": 1, "maximum": 0, "exclusiveMaximum": -1}
"""The bounds, and how far from each the first integer within it is."""

_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)
"""Keywords whose keys are names, not keywords."""


def check_numbers(tokenizer: LLTokenizer, *, schema: str = "", grammar: str = "") -> None:
    """Raise ``ValueError`` for a number of a JSON schema, or of one in a grammar, that is lost."""
    numbers: list[tuple[str, int | float]] = []
    for parsed in [json.loads(schema)] if schema else _schemas_in(grammar):
        for keyword, number, is_of_integer in _numbers_of(parsed):
            if keyword in _STEPS and not _holds(keyword, number, is_of_integer):
                raise ValueError(f"{keyword} {number} would be another bound: {_REMEDY}")
            if keyword not in _STEPS and abs(number) < 1 << 64 and float(number) == _MIN:
                # With this constant, llguidance recurses until its stack overflows.
                raise ValueError(f"{keyword} {number} cannot be written: {_REMEDY}")
            if keyword not in _STEPS or isinstance(number, float):
                numbers.append((keyword, number))
    read = _as_read(tokenizer, [number for _, number in numbers]) if numbers else []
    for (keyword, number), other in zip(numbers, read, strict=True):
        if number != other:
            raise ValueError(f"{keyword} {number} would be {other}: {_REMEDY}")


def _schemas_in(grammar: str) -> Iterator[Any]:
    """The schemas after ``%json`` in a grammar of llguidance."""
    decoder = json.JSONDecoder()
    for keyword in re.finditer(r"%json\s*", grammar):
        # What is not JSON is part of a literal, or an error that llguidance reports.
        with suppress(json.JSONDecodeError):
            yield decoder.raw_decode(grammar, keyword.end())[0]


def _numbers_of(schema: Any) -> Iterator[tuple[str, int | float, bool]]:
    """The numbers that may be read as others: keyword, number, whether it is of an integer."""
    rest = [schema]
    while rest:
        value = rest.pop()
        if isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            is_of_integer = value.get("type") == "integer"
            for key, item in value.items():
                if key in ("const", "enum"):
                    yield from ((key, number, is_of_integer) for number in _numbers_in(item))
                elif key in _STEPS and _is_number(item):
                    yield key, item, is_of_integer
                elif key in _SCHEMAS_BY_NAME and isinstance(item, dict):
                    rest += item.values()
                else:
                    rest.append(item)


def _numbers_in(value: Any) -> Iterator[int | float]:
    """The numbers of a constant that are not small integers."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            rest += item.values()
        elif isinstance(item, list):
            rest += item
        elif isinstance(item, float) or (_is_number(item) and abs(item) > _EXACT):
            yield item


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _holds(keyword: str, bound: float, is_of_integer: bool) -> bool:
    """Whether the bound that llguidance computes lets no number through that this one excludes."""
    if abs(bound) < _EXACT:
        return True
    if not is_of_integer or abs(bound) == float("inf"):
        return False
    step = _STEPS[keyword]
    double = float(max(_MIN, min(_MAX, bound))) + step
    read, first = max(_MIN, min(_MAX, int(double))), int(bound) + step
    # Above _MIN, because with that maximum, too, the stack overflows.
    return read >= first if keyword.endswith("inimum") else first >= read > _MIN


def _as_read(tokenizer: LLTokenizer, numbers: list[int | float]) -> list[int | float]:
    """The numbers as a grammar with these constants forces them."""
    from llguidance import LLMatcher  # noqa: PLC0415

    schema = {"const": numbers, "x-guidance": {"whitespace_flexible": False}}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    read: list[int | float] = json.loads(matcher.compute_ff_bytes())
    return read
