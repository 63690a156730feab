"""The packages are built as drawn in ``house.py``.

Between packages, imports run downwards and take public names only. Inside a package, a room (a
subfolder or a module) imports only from lower floors, and nothing imports in a circle.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from drawing import import_circles, imports_of_itself, missing_from_drawing, upward_imports
from house import ALLOWED, APART, CEILING_DIVISION, FLOORS, LIGHT, OPTIONAL, VAGUE_NAMES
from structure import import_statements, packages

ROOT = Path(__file__).parent.parent
PACKAGES = packages(ROOT)

STANDARD = set(sys.stdlib_module_names)


def modules(package: str) -> list[Path]:
    return sorted((ROOT / "packages" / package / "src" / "trencadis" / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Pairs of imported module and imported name (None for a whole module)."""
    for node in import_statements(path.read_text()):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        else:
            assert node.level == 0, f"{path}: relative imports hide the arrow"
            for alias in node.names:
                yield node.module or "", alias.name


def imports_at_load(path: Path) -> Iterator[str]:
    """Modules that are imported with the file itself, not within a function."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("package", ALLOWED)
def test_arrows_run_only_where_the_design_draws_them(package: str) -> None:
    found = {
        module.split(".")[1]
        for path in modules(package)
        for module, _ in imports(path)
        if module.startswith("trencadis.") and module.split(".")[1] != package
    }
    assert found <= ALLOWED[package]


@pytest.mark.parametrize("package", ALLOWED)
def test_no_package_imports_a_private_name_of_another(package: str) -> None:
    for path in modules(package):
        for module, name in imports(path):
            parts = module.split(".")
            if parts[0] != "trencadis" or parts[1] == package:
                continue
            assert not any(part.startswith("_") for part in (*parts, name or "")), path
            assert len(parts) == 2 or ".".join(parts[1:]) in APART, (
                f"{path}: import {name} from trencadis.{parts[1]}, not from {module}"
            )


def extra_of(module: str) -> set[str] | None:
    """What a module may need beyond its package's own needs; None if it is not optional."""
    for name, brings in OPTIONAL.items():
        if f"{module}.".startswith(f"trencadis.{name}."):
            return brings
    return None


@pytest.mark.parametrize("package", LIGHT)
def test_small_libraries_load_nothing_heavy(package: str) -> None:
    source = ROOT / "packages" / package / "src"
    for path in modules(package):
        module = ".".join(path.relative_to(source).with_suffix("").parts)
        extra = extra_of(module)
        loaded = set(imports_at_load(path))
        roots = {name.split(".")[0] for name in loaded} - STANDARD - {"trencadis"}
        assert roots <= LIGHT[package] | (extra or set()), module
        if extra is None:
            assert not [name for name in loaded if extra_of(name) is not None], module


def test_every_package_has_its_floors_drawn() -> None:
    assert set(PACKAGES) == set(ALLOWED)
    assert {name.partition(".")[0] for name in FLOORS} == set(ALLOWED)


@pytest.mark.parametrize("package", ALLOWED)
def test_every_room_of_a_package_is_drawn_and_built(package: str) -> None:
    _assert_none(missing_from_drawing(PACKAGES[package], FLOORS))


@pytest.mark.parametrize("package", ALLOWED)
def test_a_room_imports_only_from_lower_floors(package: str) -> None:
    _assert_none(upward_imports(PACKAGES[package], FLOORS) + imports_of_itself(PACKAGES[package]))


@pytest.mark.parametrize("package", ALLOWED)
def test_nothing_imports_in_a_circle(package: str) -> None:
    _assert_none(import_circles(PACKAGES[package]))


@pytest.mark.parametrize("package", ALLOWED)
def test_no_module_has_a_vague_name(package: str) -> None:
    names = PACKAGES[package].modules
    _assert_none([name for name in names if name.rpartition(".")[2] in VAGUE_NAMES])


@pytest.mark.parametrize("package", ALLOWED)
def test_ceiling_division_is_written_in_one_module(package: str) -> None:
    offences = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in PACKAGES[package].modules.values()
        if path.stem != CEILING_DIVISION
        for node in ast.walk(ast.parse(path.read_text()))
        if _is_ceiling_division(node)
    ]
    _assert_none(offences)


def _is_ceiling_division(node: ast.AST) -> bool:
    """Whether a node is ``-(-a // b)``."""
    return (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.BinOp)
        and isinstance(node.operand.op, ast.FloorDiv)
        and isinstance(node.operand.left, ast.UnaryOp)
        and isinstance(node.operand.left.op, ast.USub)
    )


def _assert_none(offences: Sequence[str]) -> None:
    assert not offences, "\n".join([f"{len(offences)} offences:", *offences])


def test_every_package_is_typed_versioned_and_described() -> None:
    for package in ALLOWED:
        home = ROOT / "packages" / package
        for name in ("README.md", "CHANGELOG.md", "pyproject.toml"):
            assert (home / name).stat().st_size > 0, f"packages/{package}/{name}"
        assert (home / "src" / "trencadis" / package / "py.typed").exists()
        assert not (home / "src" / "trencadis" / "__init__.py").exists(), "a PEP 420 namespace"


@pytest.mark.parametrize("package", ALLOWED)
def test_no_signature_shows_the_environment(package: str) -> None:
    # help() and pydoc print the default of an argument: os.environ has keys and passwords.
    for path in modules(package):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                defaults = (*node.args.defaults, *node.args.kw_defaults)
                shown = [ast.unparse(default) for default in defaults if default is not None]
                assert not any("environ" in default for default in shown), f"{path}: {shown}"
