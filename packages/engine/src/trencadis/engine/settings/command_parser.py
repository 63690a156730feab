"""The parser of a command's flags: whole names alone, and an error of one line.

argparse accepts every unambiguous beginning of a flag, so that a new flag could change the meaning
of a command line, and prints the usage of all flags before the error.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

_SIMILAR = 0.7
"""Similarity of two flags, from 0 to 1, above which one may be a misspelling of the other."""


class CommandParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` without abbreviations, whose errors name the nearest flag."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    # argparse declares overloads, which all return what this does.
    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unrecognized(unknown))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exit with 2 after one line on stderr."""
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists the flags)\n")

    def _unrecognized(self, arguments: Sequence[str]) -> str:
        # The value of an unknown flag may have been taken for the model.
        flags = [each.partition("=")[0] for each in arguments if each.startswith("-")]
        return "unrecognized arguments: " + ", ".join(map(self._with_nearest, flags or arguments))

    def _with_nearest(self, flag: str) -> str:
        known = self._option_string_actions
        nearest = difflib.get_close_matches(flag, known, n=1, cutoff=_SIMILAR)
        nearest = nearest or sorted(each for each in known if each.startswith(flag))[:1]
        return f"{flag}: did you mean {nearest[0]}?" if nearest else flag


def described(error: Exception) -> str:
    """The message of an error for a terminal: of a file, its name and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be used: {error.strerror}"
    return str(error)
