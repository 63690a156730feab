"""The house stands as drawn: imports between packages run downwards, and public names only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ALLOWED = {
    "bucketing": set(),
    "kvcache": set(),
    "warmup": {"bucketing"},
    "scheduler": {"kvcache"},
    "engine": {"bucketing", "kvcache", "warmup", "scheduler"},
    "server": {"engine"},
}
"""Who may import whom; docs/architecture.md draws it. The engine stands on the ground floor's
values (buckets, block copies, the cache's tensors), which warmup and scheduler pass through it."""

APART = {"kvcache.tensors", "scheduler.thermal", "scheduler.telemetry"}
"""Public although not in their package's ``__init__``: what not every user of the package needs."""

LIGHT = {
    "bucketing": {"attrs", "numpy"},
    "kvcache": {"attrs", "numpy"},
    "warmup": {"attrs", "numpy"},
    "scheduler": {"attrs", "numpy"},
}
"""What the four small libraries may need of others when they are imported."""

OPTIONAL = {
    "bucketing.plot": {"matplotlib"},
    "kvcache.tensors": {"torch"},
    "kvcache.copiers": {"torch"},
    "kvcache.huge_pages": {"torch"},
    "scheduler.telemetry.sidecar": {"grpc", "google"},
}
"""Modules that need an extra, and what it brings; nothing else in the package loads them."""

STANDARD = set(sys.stdlib_module_names)


def modules(package: str) -> list[Path]:
    return sorted((ROOT / "packages" / package / "src" / "trencadis" / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Pairs of imported module and imported name (None for a whole module)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
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


def test_every_package_is_typed_versioned_and_described() -> None:
    for package in ALLOWED:
        home = ROOT / "packages" / package
        for name in ("README.md", "CHANGELOG.md", "pyproject.toml"):
            assert (home / name).stat().st_size > 0, f"packages/{package}/{name}"
        assert (home / "src" / "trencadis" / package / "py.typed").exists()
        assert not (home / "src" / "trencadis" / "__init__.py").exists(), "a PEP 420 namespace"
