"""Each package declares what its modules import, as a dependency or in an extra."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent

OF_THE_HOST = {"habana_frameworks", "ray", "sglang", "vllm", "vllm_gaudi"}
"""What is there where a module is imported: a device's software, or the runtime that imports it."""


def imported(source: Path) -> Iterator[tuple[str, str]]:
    """File and first names of what the modules below ``source`` import, with `TYPE_CHECKING`."""
    for file in sorted(source.rglob("*.py")):
        if file.name.endswith("_pb2.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                yield file.name, name


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.mark.parametrize("package", sorted(path.name for path in ROOT.glob("packages/*")))
def test_what_is_imported_is_declared(package: str) -> None:
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text("utf-8"))[
        "project"
    ]
    extras = project.get("optional-dependencies", {}).values()
    declared = {
        normalised(re.split(r"[^\w.-]", requirement)[0])
        for requirements in (project["dependencies"], *extras)
        for requirement in requirements
    }
    owners, offences = packages_distributions(), set()
    for file, name in imported(ROOT / "packages" / package / "src"):
        first, _, rest = name.partition(".")
        if first in sys.stdlib_module_names or first in OF_THE_HOST:
            continue
        if first == "trencadis":
            distributions = {f"trencadis-{rest.partition('.')[0]}"}
        else:
            distributions = {normalised(owner) for owner in owners.get(first, (first,))}
        if not distributions & {*declared, f"trencadis-{package}"}:
            offences.add(f"{file} imports {name}")
    assert not offences
