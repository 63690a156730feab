"""The programs that the type checkers read (``nox -s types``) also run."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "typing"


def test_every_package_has_a_program() -> None:
    packages = Path(__file__).parent.parent.glob("packages/*/pyproject.toml")
    written = {path.stem for path in PROGRAMS.glob("*.py")}
    assert written == {path.parent.name for path in packages} | {"refused"}


@pytest.mark.parametrize("package", ["bucketing", "kvcache", "warmup", "scheduler"])
def test_program_runs(package: str) -> None:
    runpy.run_path(str(PROGRAMS / f"{package}.py"))["main"]()


@pytest.mark.parametrize("package", ["engine", "server"])
def test_program_is_imported(package: str) -> None:
    # It starts an engine with a model, so its functions are not called.
    runpy.run_path(str(PROGRAMS / f"{package}.py"))
