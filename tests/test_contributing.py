"""CONTRIBUTING.md leads to every module and session, and each module says what it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from structure import first_sentence, packages

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PACKAGES = packages(ROOT)


def source(package: str) -> Path:
    return ROOT / "packages" / package / "src" / "trencadis" / package


def named_paths() -> list[str]:
    """Every path in backticks that begins with the name of a package."""
    names = "|".join(path.name for path in (ROOT / "packages").iterdir())
    return re.findall(rf"`((?:{names})/[\w/.]+)`", TEXT)


def test_every_path_exists() -> None:
    paths = named_paths()
    assert len(paths) > 60
    missing = [
        path
        for path in paths
        if "DEVICE" not in path and not (source(path.split("/")[0]).parent / path).exists()
    ]
    assert not missing


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_every_module_says_in_a_sentence_what_it_is(package: str) -> None:
    """``tools/structure.py --modules`` prints these sentences."""
    unsaid = [
        name
        for name, path in PACKAGES[package].modules.items()
        if path.stat().st_size > 0 and not 15 <= len(first_sentence(path.read_text())) <= 100
    ]
    assert not unsaid


def test_every_session_of_nox_says_what_it_is() -> None:
    functions = ast.parse((ROOT / "noxfile.py").read_text()).body
    sessions = {
        each.name: ast.get_docstring(each)
        for each in functions
        if isinstance(each, ast.FunctionDef)
        and any(ast.unparse(mark).startswith("nox.session") for mark in each.decorator_list)
    }
    assert all(sessions.values())
    listed = re.findall(r"^python -m nox -s ([\w ]+?) +#", TEXT, re.MULTILINE)
    assert set(" ".join(listed).split()) <= sessions.keys()
