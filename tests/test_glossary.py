"""Code and documents use the glossary's terms, and none of the words that it rules out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from structure import packages
from wording import (
    offences,
    phrases_in,
    prose_of,
    terms,
    unused_phrases,
    unused_words,
    variables_named,
    words_in,
)

ROOT = Path(__file__).parent.parent
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
WORDS = unused_words(GLOSSARY)
PHRASES = unused_phrases(GLOSSARY)
PACKAGES = packages(ROOT)
DOCUMENTS = (
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("packages/*/README.md"),
    *ROOT.glob("packages/*/src/**/*.md"),
)


def test_the_terms_of_the_glossary_are_built_where_it_says() -> None:
    built = {
        (short, node.name)
        for short, package in PACKAGES.items()
        for path in package.modules.values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    missing = {
        f"{term}: {package} {name}"
        for term, (package, name) in terms(GLOSSARY).items()
        if (package, name) not in built
    }
    _assert_none(sorted(missing))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_uses_the_terms_of_the_glossary(package: str) -> None:
    paths = sorted(PACKAGES[package].path.rglob("*.py"))
    _assert_none(_offences_in(paths))


def test_documents_use_the_terms_of_the_glossary() -> None:
    _assert_none(_offences_in(sorted(DOCUMENTS)))


def test_the_glossary_reads_as_lists() -> None:
    assert len(terms(GLOSSARY)) > 50
    assert "trunk" in WORDS
    assert "is no" in PHRASES
    assert not {*WORDS, *PHRASES} & set(terms(GLOSSARY))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the Trunk of a beam", [(1, "Trunk")]),
        ("num_seats = 1\nfree_seats", [(1, "seats"), (2, "seats")]),
        ("class RunLedger:", [(1, "Ledger")]),
        ("whoever\n# makes\n    # way", [(1, "whoever"), (2, "makes way")]),
        ("a landscape, an island, trunks, ledgers, Bland", []),
        ("it is passed over", [(1, "passed over")]),
    ],
)
def test_unused_words_are_found_in_text_and_names(text: str, found: list) -> None:
    words = ("trunk", "seats", "ledger", "land", "whoever", "makes way", "passed over")
    assert list(words_in(text, words)) == found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a bool is no integer", [(1, "is no")]),
        ("values that are\n    # no integers", [(1, "are no")]),
        ("there is no block; where\nthere are no more; it is no longer used", []),
        ("The key is Refused, not `refused`", [(1, "Refused")]),
        ("refused_calls, trencadis/refused, {'refused': 1}, x.refused", []),
    ],
)
def test_unused_phrases_are_found_in_prose(text: str, expected: list) -> None:
    assert list(phrases_in(text, ("is no", "are no", "refused"))) == expected


def test_prose_is_comments_and_texts_in_their_lines() -> None:
    source = 'is_no = 1  # first\nx = ("is "\n     "no")\ny = "refused"\n"""A\nlong text."""\n'
    assert [line.strip() for line in prose_of(source).splitlines()][:3] == ["# first", '"is "', ""]
    assert list(phrases_in(prose_of(source), ("a long", "refused"))) == [(5, "A long")]


def test_variables_of_a_name_are_found() -> None:
    source = (
        "one = 1\n"
        "for one in range(3): print(one)\n"
        "x = [one for one, two in pairs]\n"
        "def f(one, *, two): return two\n"
        "g = lambda one: 1\n"
        "thing.one = one\n"
        "every_one = 'one'\n"
    )
    assert variables_named("one", source) == [1, 2, 3, 4, 5]


def _offences_in(paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{offence}"
        for path in paths
        for offence in offences(path, WORDS, PHRASES)
    ]


def _assert_none(found: list[str]) -> None:
    assert not found, "\n".join([f"{len(found)} offences:", *found])
