"""Where a JSON value ends in a text that arrives in deltas.

Only the structure is followed: brackets, strings, commas and colons. What a scalar or an escape
means is left to the reader of the value, who gets it as the model wrote it.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from trencadis.server.parsers.text_reader import Reading, TextReader

_SPACES = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_SCALAR = re.compile(r"[-+.\w]*")


class _Next(Enum):
    """What may come next."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    IN_STRING = auto()
    ESCAPED = auto()
    IN_SCALAR = auto()


class JsonScan:
    """Follows one JSON value; a `TextReader` calls `step`.

    ``done``: the value is complete. ``failed``: what comes next is not JSON.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._next = _Next.VALUE
        self._brackets: list[str] = []
        self._in_key = False

    def step(self, text: str, position: int) -> tuple[int, bool]:
        """The position after the part of ``text`` that belongs to the value, and whether it ends
        there: complete, or because no JSON follows."""
        end = len(text)
        while position < end and not (self.done or self.failed):
            if self._next is _Next.IN_STRING:
                position = self._string(text, position)
            elif self._next is _Next.ESCAPED:
                self._next = _Next.IN_STRING
                position += 1
            elif self._next is _Next.IN_SCALAR:
                position = _end_of(_SCALAR, text, position)
                if position < end:
                    self._end_value()
            else:
                position = _end_of(_SPACES, text, position)
                if position < end:
                    position += self._character(text[position])
        return position, self.done or self.failed

    def _string(self, text: str, position: int) -> int:
        position = _end_of(_IN_STRING, text, position)
        if text.startswith("\\", position):  # its character is still to come
            self._next = _Next.ESCAPED
            return position + 1
        if text.startswith('"', position):
            position += 1
            if self._in_key:
                self._next = _Next.COLON
            else:
                self._end_value()
        return position

    def _character(self, character: str) -> int:
        """Follow a character outside of strings and scalars; returns how many were read, 0 or 1."""
        expected = self._next
        if expected in (_Next.VALUE, _Next.VALUE_OR_END):
            return self._begin_value(character)
        if expected in (_Next.KEY, _Next.KEY_OR_END) and character == '"':
            self._next, self._in_key = _Next.IN_STRING, True
        elif expected is _Next.COLON and character == ":":
            self._next = _Next.VALUE
        elif expected is _Next.COMMA_OR_END and character == ",":
            self._next = _Next.KEY if self._brackets[-1] == "}" else _Next.VALUE
        elif expected in (_Next.KEY_OR_END, _Next.COMMA_OR_END) and character == self._brackets[-1]:
            self._brackets.pop()
            self._end_value()
        else:
            self.failed = True
            return 0
        return 1

    def _begin_value(self, character: str) -> int:
        if character == "{":
            self._brackets.append("}")
            self._next = _Next.KEY_OR_END
        elif character == "[":
            self._brackets.append("]")
            self._next = _Next.VALUE_OR_END
        elif character == '"':
            self._next, self._in_key = _Next.IN_STRING, False
        elif character == "]" and self._next is _Next.VALUE_OR_END:
            self._brackets.pop()
            self._end_value()
        elif _SCALAR.fullmatch(character):
            self._next = _Next.IN_SCALAR
        else:
            self.failed = True
            return 0
        return 1

    def _end_value(self) -> None:
        self._next = _Next.COMMA_OR_END
        self.done = not self._brackets


def read_value(reader: TextReader) -> Reading[str | None]:
    """Read a JSON value; returns its text, or None where there is none."""
    scan = JsonScan()
    pieces = yield from reader.scan(scan.step)
    return "".join(pieces) if scan.done else None


def read_string(reader: TextReader) -> Reading[str | None]:
    """Read a JSON string; returns what it means, or None where there is none."""
    if (yield from reader.peek()) != '"':
        return None
    text = yield from read_value(reader)
    try:
        value = None if text is None else json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _end_of(pattern: re.Pattern[str], text: str, position: int) -> int:
    found = pattern.match(text, position)
    return position if found is None else found.end()
