"""A Python literal in a text that arrives in deltas, passed on as JSON.

Models that write calls as Python write strings, numbers, lists, dictionaries and the names of
constants, and some of these names as JSON has them. Other expressions are none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from trencadis.server.parsers.text_reader import Reading, TextReader

MAX_DEPTH = 64
"""Deepest nesting of lists and dictionaries that is read."""

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_CONSTANTS |= {name: name for name in _CONSTANTS.values()}
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?")
_ESCAPES = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"},
    **{"\\": "\\", "'": "'", '"': '"', "\n": ""},
}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_OPENERS = {"[": "]", "(": ")", "{": "}"}


def pass_literal(reader: TextReader, out: Callable[[str], None], depth: int = 0) -> Reading[bool]:
    """Read a Python literal, and pass it on to ``out`` as JSON, bit by bit.

    False for what is none. What was read until then is passed on; a name or a number unchanged.
    """
    yield from reader.skip()
    character = yield from reader.peek()
    if character in ("'", '"'):
        return (yield from _pass_string(reader, out))
    if character in _OPENERS:
        return depth < MAX_DEPTH and (yield from _pass_container(reader, out, depth + 1))
    return (yield from _pass_scalar(reader, out))


def _pass_scalar(reader: TextReader, out: Callable[[str], None]) -> Reading[bool]:
    text = yield from reader.accept("+")
    text += yield from reader.name()
    if text[-1:] in ("e", "E"):
        text += yield from reader.accept("+")
        text += yield from reader.name()
    value = _CONSTANTS.get(text) or _json_number(text)
    out(value or text)
    return value is not None


def _json_number(text: str) -> str | None:
    if not _NUMBER.fullmatch(text):
        return None
    try:
        number = float(text) if set(text) & set(".eE") else int(text)
        return json.dumps(number, allow_nan=False)
    except ValueError:  # such as 1__0, or 1e999
        return None


def _pass_container(reader: TextReader, out: Callable[[str], None], depth: int) -> Reading[bool]:
    """Pass on a list, a tuple or a dictionary: both of the first are JSON's lists."""
    opener = yield from reader.accept(*_OPENERS)
    closer, is_dictionary = _OPENERS[opener], opener == "{"
    out("{" if is_dictionary else "[")
    is_first = True
    while True:
        yield from reader.skip()
        if (yield from reader.accept(closer)):
            out("}" if is_dictionary else "]")
            return True
        if not is_first:
            out(", ")
        if is_dictionary and not (yield from _pass_key(reader, out)):
            return False
        if not (yield from pass_literal(reader, out, depth)):
            return False
        is_first = False
        yield from reader.skip()
        if not (yield from reader.accept(",")) and (yield from reader.peek()) != closer:
            return False


def _pass_key(reader: TextReader, out: Callable[[str], None]) -> Reading[bool]:
    if (yield from reader.peek()) not in ("'", '"') or not (yield from _pass_string(reader, out)):
        return False
    yield from reader.skip()
    if not (yield from reader.accept(":")):
        return False
    out(": ")
    return True


def _pass_string(reader: TextReader, out: Callable[[str], None]) -> Reading[bool]:
    quote = yield from reader.accept("'", '"')
    out('"')
    if (yield from reader.accept(quote)):
        if not (yield from reader.accept(quote)):
            out('"')
            return True
        quote *= 3
    while True:
        yield from reader.pass_on(_plain_text, lambda text: out(_escaped(text)))
        if (yield from reader.accept(quote)):
            out('"')
            return True
        if (yield from reader.accept("\\")):
            if not (yield from _pass_escape(reader, out)):
                return False
        elif other := (yield from reader.accept("'", '"')):
            out(_escaped(other))
        else:
            return False


def _plain_text(text: str, position: int) -> tuple[int, bool]:
    """A step of `TextReader.pass_on`: up to a quote or a backslash."""
    end = position
    while end < len(text) and text[end] not in "\\'\"":
        end += 1
    return end, end < len(text)


def _pass_escape(reader: TextReader, out: Callable[[str], None]) -> Reading[bool]:
    """Pass on what follows a backslash; an unknown escape is both characters, as in Python."""
    letter = yield from reader.take(1)
    if letter in _ESCAPES:
        out(_escaped(_ESCAPES[letter]))
    elif letter in _HEX_ESCAPES:
        digits = yield from reader.take(_HEX_ESCAPES[letter])
        try:
            out(_escaped(chr(int(digits, 16))))
        except (ValueError, OverflowError):
            out(_escaped(f"\\{letter}{digits}"))
    else:
        out(_escaped(f"\\{letter}"))
    return bool(letter)


def _escaped(text: str) -> str:
    """A part of a JSON string. Halves of characters stay escapes: no text has them."""
    is_text = not any("\ud800" <= character <= "\udfff" for character in text)
    return json.dumps(text, ensure_ascii=not is_text)[1:-1]
