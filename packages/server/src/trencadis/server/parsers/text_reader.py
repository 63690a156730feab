"""Reads a text that arrives in deltas, so that a parser does not depend on where they are cut.

The methods that may need more text are generators: they yield where the next delta is needed, and
return their result. Each character is looked at a bounded number of times, so a parser's time is
linear in the text, whatever the deltas are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A result that may need further deltas; it yields for each."""

SPACE = " \t\r\n"

_MAX_DROPPED = 64
"""Most whitespace characters that are dropped before a marker. More would have to be held back."""

_SPACES = re.compile(f"[{SPACE}]*")
_NAME = re.compile(r"[\w.:/-]*")
MAX_NAME = 128
"""Longest name of a tool, in characters."""


class TextReader:
    """The text of one answer: `feed` adds a delta, `end` says that none follows."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._ended = False
        self._recorded: list[str] | None = None

    @property
    def at_end(self) -> bool:
        """Whether the whole text was read."""
        return self._ended and self._position == len(self._text)

    def feed(self, text: str) -> None:
        """Add a delta."""
        # What is still unread is short: readers take all but the beginning of a marker.
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """No delta follows."""
        self._ended = True

    def record(self, before: str = "") -> None:
        """Keep what is read from here on, for `recorded`; ``before`` is what was read before it."""
        self._recorded = [before]

    def forget(self) -> None:
        """Stop to keep what is read."""
        self._recorded = None

    def recorded(self) -> str:
        """What was read since `record`; "" if nothing is kept."""
        return "".join(self._recorded or ())

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while self._position == len(self._text) and not self._ended:
            yield
        return self._text[self._position : self._position + 1]

    def accept(self, *literals: str) -> Reading[str]:
        """Read one of these, if the text goes on with it; returns it, or ""."""
        while True:
            rest = self._text[self._position : self._position + max(map(len, literals))]
            for literal in literals:
                if rest.startswith(literal):
                    return self._take(self._position + len(literal))
            if self._ended or not any(literal.startswith(rest) for literal in literals):
                return ""
            yield

    def take(self, count: int) -> Reading[str]:
        """Read so many characters, or fewer at the end."""
        while len(self._text) - self._position < count and not self._ended:
            yield
        return self._take(min(self._position + count, len(self._text)))

    def skip(self, pattern: re.Pattern[str] = _SPACES) -> Reading[None]:
        """Read all characters that come next and match ``pattern``, which may match nothing."""
        while (yield from self.peek()):
            found = pattern.match(self._text, self._position)
            if found is None or found.end() == self._position:
                return
            self._take(found.end())

    def name(self) -> Reading[str]:
        """Read a name of letters, digits and ``_.:/-``; "" for none or one that is too long."""
        parts: list[str] = []
        length = 0
        while (yield from self.peek()):
            found = _NAME.match(self._text, self._position)
            part = self._take(found.end() if found else self._position)
            length += len(part)
            if not part or length > MAX_NAME:
                break
            parts.append(part)
        return "".join(parts) if length <= MAX_NAME else ""

    def scan(self, step: Callable[[str, int], tuple[int, bool]]) -> Reading[list[str]]:
        """Read what ``step`` accepts of the unread text; returns the pieces.

        ``step(text, position)`` returns the position after what it accepts, and whether it is done.
        """
        pieces: list[str] = []
        while (yield from self.peek()):
            position, done = step(self._text, self._position)
            pieces.append(self._take(position))
            if done:
                break
        return pieces

    def pass_on(
        self, step: Callable[[str, int], tuple[int, bool]], out: Callable[[str], None]
    ) -> Reading[None]:
        """As `scan`, with each piece passed on to ``out`` once it is read."""
        while (yield from self.peek()):
            position, done = step(self._text, self._position)
            if position > self._position:
                out(self._take(position))
            if done:
                return

    def until(self, markers: Sequence[str], out: Callable[[str], None]) -> Reading[tuple[str, str]]:
        """Pass text on to ``out`` up to a marker; returns whitespace before it, and the marker.

        Neither is passed on, and no beginning of a marker is before it is known to be none. At the
        end of the text the marker is "".
        """
        pattern = _pattern(tuple(markers))
        while True:
            found = pattern.search(self._text, self._position)
            if found is not None:
                self._pass_text(self._space_before(found.start()), out)
                space = self._take(found.start())
                return space, self._take(found.end())
            if self._ended:
                self._pass_text(len(self._text), out)
                return "", ""
            self._pass_text(self._space_before(self._partial(markers)), out)
            yield

    def rest(self, out: Callable[[str], None]) -> Reading[None]:
        """Pass all further text on."""
        while (yield from self.peek()):
            self._pass_text(len(self._text), out)

    def _pass_text(self, end: int, out: Callable[[str], None]) -> None:
        if end > self._position:
            out(self._take(end))

    def _take(self, end: int) -> str:
        text = self._text[self._position : end]
        self._position = end
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def _space_before(self, position: int) -> int:
        low = max(self._position, position - _MAX_DROPPED)
        return low + len(self._text[low:position].rstrip(SPACE))

    def _partial(self, markers: Sequence[str]) -> int:
        """Where the unread text ends in the beginning of a marker; its end if it does not."""
        end = len(self._text)
        longest = max(map(len, markers)) - 1
        for start in range(max(self._position, end - longest), end):
            begun = [marker for marker in markers if marker[0] == self._text[start]]
            if begun and any(marker.startswith(self._text[start:]) for marker in begun):
                return start
        return end


@lru_cache(maxsize=64)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))
