"""The sessions of nox name tests that exist: one that was renamed would run, or not, unnoticed."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def constant(name: str) -> Any:
    """A constant of the noxfile, which needs nox to be imported."""
    for node in ast.parse((ROOT / "noxfile.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    pytest.fail(f"the noxfile has no {name}")


def named() -> list[str]:
    """All tests that sessions name, below the root."""
    alone = constant("ALONE_SAMPLE").items()
    return [
        *(ROOT / "tests" / "long_tests.txt").read_text("utf-8").splitlines(),
        *(f"packages/engine/tests/{test}" for test in constant("GAUDI_SAMPLE")),
        *(f"packages/{package}/tests/{test}" for package, tests in alone for test in tests),
    ]


@pytest.mark.parametrize("test", named())
def test_a_test_that_a_session_names_exists(test: str) -> None:
    file, _, function = test.partition("::")
    functions = [
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    name = function.partition("[")[0]
    assert any(each == name if "[" in function else each.startswith(name) for each in functions)


def test_the_table_of_clients_has_those_that_are_tested() -> None:
    """Each with its version, see ``tests_clients``."""
    page = (ROOT / "docs" / "server" / "api.md").read_text("utf-8")
    tested = [re.sub(r"\[.*\]", "", each).split("==") for each in constant("EXAMPLES").values()]
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", page, re.MULTILINE)
    assert rows == [tuple(each) for each in tested]


def test_each_client_has_examples() -> None:
    examples = (ROOT / "tests" / "peers" / "client_examples.py").read_text("utf-8")
    for client in constant("EXAMPLES"):
        assert f"def test_{client}" in examples


def test_a_test_of_vllm_is_listed_once() -> None:
    """With a reason for it to fail, to be skipped, or to need a model that is trained for it."""
    groups = json.loads((ROOT / "tests" / "peers" / "vllm_expected.json").read_text("utf-8"))
    listed = [test for reasons in groups.values() for tests in reasons.values() for test in tests]
    assert len(listed) == len(set(listed)) > 50
    assert all(tests for name, reasons in groups.items() for tests in reasons.values())
