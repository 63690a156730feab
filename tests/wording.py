"""Reads ``docs/glossary.md``: its terms, where they are built, and the words that are not used."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

UNUSED = "Words that are not used"
"""The heading of the glossary's list of words that are used neither in prose nor in names."""

UNUSED_IN_PROSE = "Phrases that are not used"
"""The heading of its last list. Names may have these words."""

Definitions = dict[str, list[str]]
"""For each term the package and the name in which it is built."""


def terms(glossary: str) -> Definitions:
    """The terms of a glossary's lists. Raises `ValueError` for a term that stands twice."""
    found: Definitions = {}
    for line in glossary.partition(UNUSED)[0].splitlines():
        if not line.startswith("- "):
            continue
        entry = re.fullmatch(r"- \*\*(.+?)\*\*: .+ \(`(\w+)\.(\w+)`\)", line)
        if entry is None:
            raise ValueError(f"a line of the glossary is not '- **term**: meaning (`a.B`)': {line}")
        term, *place = entry.groups()
        if term in found:
            raise ValueError(f"{term} stands twice in the glossary")
        found[term] = place
    return found


def unused_words(glossary: str) -> tuple[str, ...]:
    """The words and phrases that are not used, in names neither."""
    return _words_of(glossary.partition(UNUSED)[2].partition(UNUSED_IN_PROSE)[0])


def unused_phrases(glossary: str) -> tuple[str, ...]:
    """The phrases of the last list."""
    return _words_of(glossary.partition(UNUSED_IN_PROSE)[2])


def _words_of(text: str) -> tuple[str, ...]:
    """The words of a list of ``- words: what to write instead``."""
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    return tuple(word for line in lines for word in _left_side(line).split(", "))


def _left_side(line: str) -> str:
    entry = re.fullmatch(r"- ([^:]+): .+", line)
    if entry is None:
        raise ValueError(f"a line of the glossary is not '- words: other words': {line}")
    return entry[1]


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


def phrases_in(text: str, phrases: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Lines, from 1, with the phrases in them: as whole words, not within names or backticks.

    "There is no ..." and "is no longer" are plain English.
    """
    gap = r"(?:\s|#|f?\")+"
    listed = "|".join(gap.join(map(re.escape, phrase.split())) for phrase in phrases)
    pattern = rf"(?<![\w`.{{/-])(?:{listed})(?![\w`/=(-]|{gap}longer\b|[\"'][:,\]])"
    for match in re.finditer(pattern, text, re.IGNORECASE) if phrases else ():
        if not re.search(rf"\bthere{gap}$", text[: match.start()], re.IGNORECASE):
            yield text.count("\n", 0, match.start()) + 1, re.sub(gap, " ", match[0])


def prose_of(source: str) -> str:
    """Comments and texts of Python code, in their lines. A text without a space is a name."""
    kept = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    lines = [""] * (source.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kept and " " in token.string:
            for number, line in enumerate(token.string.split("\n"), token.start[0]):
                lines[number - 1] += f" {line}"
    return "\n".join(lines)


def variables_named(name: str, source: str) -> list[int]:
    """Lines in which a variable or a parameter has this name."""
    return sorted(
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.arg) and node.arg == name)
    )


def offences(path: Path, words: tuple[str, ...], phrases: tuple[str, ...] = ()) -> Iterator[str]:
    """The unused words in a file, as ``line: word``; in the glossary, without its last lists."""
    text = path.read_text()
    if path.name == "glossary.md":
        text = text.partition(UNUSED)[0]
    for line, word in words_in(text, words):
        yield f"{line}: {word}"
    is_code = path.suffix == ".py"
    for line, phrase in phrases_in(prose_of(text) if is_code else text, phrases):
        yield f"{line}: {phrase}"
    if is_code:
        for line in variables_named("one", text):
            yield f"{line}: a variable is named one"
