"""Decodes JSON with pauses, in which other threads run.

``json.loads`` holds the interpreter until its end: half a second for 4 MB of keys. A thread that
merely lets others have it does not suffice: an event loop gives it up in each call of the system,
such as ``send``, and would wait for it after each of a hundred. So this decoder works for about a
millisecond and then pauses. The values are those of ``json.loads``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from trencadis.engine import InvalidRequest

MAX_VALUES = 131_072
"""Most values of a long body, without whole numbers in lists (token ids). Each takes microseconds.
8,192 messages of five content parts have fewer."""

_VALUES_PER_PAUSE = 256
"""About a millisecond."""

_SPACE = re.compile(r"[ \t\n\r]*")
_AFTER_NUMBER = ", \t\n\r"
_WHOLE_NUMBERS = re.compile(r"(?:-?[0-9]{1,18}[ \t\n\r]*,[ \t\n\r]*){1,4096}")
"""A part of a list: less than a millisecond of ``json.loads``."""


def decoded(body: bytes, pause: Callable[[], None]) -> Any:
    """The value of a text in JSON. ``pause`` is called after each millisecond or so.

    Raises ``json.JSONDecodeError``, `InvalidRequest` for more than `MAX_VALUES`, and as
    ``json.loads`` ``ValueError`` for other encodings and numbers of too many digits, and
    ``RecursionError``.
    """
    return _Decoder(body.decode(json.detect_encoding(body), "surrogatepass"), pause).whole()


class _Decoder:
    """Methods take a position in the text and return a value with the position after it."""

    def __init__(self, text: str, pause: Callable[[], None]) -> None:
        self._text = text
        self._pause = pause
        self._scalar = json.JSONDecoder().raw_decode
        self._num_values = 0
        self._keys: dict[str, str] = {}

    def whole(self) -> Any:
        """The value of the whole text."""
        value, end = self._value(self._after_space(0))
        if (end := self._after_space(end)) != len(self._text):
            raise self._error("Extra data", end)
        return value

    def _value(self, start: int) -> tuple[Any, int]:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise InvalidRequest(
                f"the body has more than {MAX_VALUES} values, besides whole numbers in lists: send "
                "less in one request"
            )
        if self._num_values % _VALUES_PER_PAUSE == 0:
            self._pause()
        first = self._text[start : start + 1]
        if first == "[":
            return self._array(start + 1)
        if first == "{":
            return self._object(start + 1)
        return self._scalar(self._text, start)

    def _array(self, start: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        position = self._after_space(start)
        if self._text.startswith("]", position):
            return values, position + 1
        while True:
            position = self._whole_numbers(position, values)
            value, end = self._value(position)
            values.append(value)
            is_last, position = self._separator(end, "]")
            if is_last:
                return values, position

    def _whole_numbers(self, start: int, values: list[Any]) -> int:
        """Append the whole numbers from here on, without the last one of the list."""
        while (run := _WHOLE_NUMBERS.match(self._text, start)) is not None:
            try:
                values += json.loads(f"[{run[0].rstrip(_AFTER_NUMBER)}]")
            except json.JSONDecodeError:  # such as 01: the scanner of values says where
                break
            start = run.end()
            if len(run[0]) >= _VALUES_PER_PAUSE:
                self._pause()
        return start

    def _object(self, start: int) -> tuple[dict[str, Any], int]:
        fields: dict[str, Any] = {}
        position = self._after_space(start)
        if self._text.startswith("}", position):
            return fields, position + 1
        while True:
            if not self._text.startswith('"', position):
                raise self._error("Expecting property name enclosed in double quotes", position)
            key, end = self._scalar(self._text, position)
            colon = self._after_space(end)
            if not self._text.startswith(":", colon):
                raise self._error("Expecting ':' delimiter", colon)
            value, end = self._value(self._after_space(colon + 1))
            fields[self._keys.setdefault(key, key)] = value
            is_last, position = self._separator(end, "}")
            if is_last:
                return fields, position

    def _separator(self, start: int, closing: str) -> tuple[bool, int]:
        """Whether a container ends here, and the position after that, or of the next value."""
        position = self._after_space(start)
        if self._text.startswith(closing, position):
            return True, position + 1
        if not self._text.startswith(",", position):
            raise self._error("Expecting ',' delimiter", position)
        return False, self._after_space(position + 1)

    def _after_space(self, start: int) -> int:
        space = _SPACE.match(self._text, start)
        return start if space is None else space.end()

    def _error(self, reason: str, position: int) -> json.JSONDecodeError:
        return json.JSONDecodeError(reason, self._text, position)
