"""Reads ``docs/glossary.md``: its terms, where they are built, and the words that are not used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

UNUSED = "Words that are not used"
"""The heading of the glossary's last table."""

Definitions = dict[str, tuple[tuple[str, str], ...]]
"""For each term the packages and names in which it is built."""


def terms(glossary: str) -> Definitions:
    """The terms of a glossary's tables. Raises `ValueError` for a term that stands twice."""
    found: Definitions = {}
    for term, _, places in _rows(glossary.partition(UNUSED)[0], columns=3):
        if term in found:
            raise ValueError(f"{term} stands twice in the glossary")
        found[term] = tuple(re.findall(r"(\w+) `(\w+)`", places))
    return found


def unused_words(glossary: str) -> tuple[str, ...]:
    """The words and phrases of the last table."""
    rows = _rows(glossary.partition(UNUSED)[2], columns=2)
    return tuple(word for words, _ in rows for word in words.split(", "))


def _rows(text: str, columns: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        is_head = cells[0] in ("term", "not") or set(cells[0]) == {"-"}
        if line.startswith("|") and not is_head:
            if len(cells) != columns:
                raise ValueError(f"{len(cells)} columns instead of {columns}: {line}")
            yield cells


def words_in(text: str, words: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Lines, from 1, with the unused words in them; phrases may go on in the next line.

    A word is found in names, too: ``seats`` in ``num_seats`` and in ``FreeSeats``.
    """
    phrases = "|".join(r"[\s#]+".join(map(re.escape, word.split())) for word in words)
    lower = rf"(?<![a-z])(?:{phrases})(?![a-z])"
    camel = "|".join(re.escape(word.capitalize()) for word in words if " " not in word)
    pattern = re.compile(rf"(?i:{lower})|(?<=[a-z])(?:{camel})(?![a-z])")
    for match in pattern.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, re.sub(r"[\s#]+", " ", match[0])


def variables_named(name: str, source: str) -> list[int]:
    """Lines in which a variable or a parameter has this name."""
    return sorted(
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.arg) and node.arg == name)
    )


def offences(path: Path, words: tuple[str, ...]) -> Iterator[str]:
    """The unused words in a file, as ``line: word``; in the glossary, without its last table."""
    text = path.read_text()
    if path.name == "glossary.md":
        text = text.partition(UNUSED)[0]
    for line, word in words_in(text, words):
        yield f"{line}: {word}"
    if path.suffix == ".py":
        for line in variables_named("one", text):
            yield f"{line}: a variable is named one"
