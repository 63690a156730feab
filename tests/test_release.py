"""Each package states its version once, keeps a changelog of one form, and carries the licence."""

from __future__ import annotations

import datetime
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))

PREAMBLE = """\
# Changelog of trencadis-{package}

Versions follow semantic versioning.
Before 1.0 a minor version may change the interface.

## Unreleased
"""
RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+) \((\d{4}-\d{2}-\d{2})\)")


def project(package: str) -> dict[str, Any]:
    text = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]


def changelog(package: str) -> str:
    return (ROOT / "packages" / package / "CHANGELOG.md").read_text(encoding="utf-8")


def releases(package: str) -> list[tuple[tuple[int, ...], datetime.date]]:
    """Version and date of each released heading, in the order of the file."""
    _, *released = re.findall(r"^## (.+)$", changelog(package), re.MULTILINE)
    found = []
    for heading in released:
        match = RELEASE.fullmatch(heading)
        assert match, f"packages/{package}/CHANGELOG.md: write '## X.Y.Z (DATE)', not {heading!r}"
        *version, date = match.groups()
        found.append((tuple(map(int, version)), datetime.date.fromisoformat(date)))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_changelog_has_the_common_form(package: str) -> None:
    text = changelog(package)
    assert text.startswith(PREAMBLE.format(package=package))
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    released = releases(package)
    assert released == sorted(released, reverse=True), "newest release first"
    versions = [version for version, _ in released]
    assert len(set(versions)) == len(versions), "one heading per version"


@pytest.mark.parametrize("package", PACKAGES)
def test_metadata_module_and_changelog_agree_on_the_version(package: str) -> None:
    version = project(package)["version"]
    assert import_module(f"trencadis.{package}").__version__ == version
    newest, _ = releases(package)[0]
    assert ".".join(map(str, newest)) == version


@pytest.mark.parametrize("package", PACKAGES)
def test_package_carries_the_licence_of_the_repository(package: str) -> None:
    # A copy: an sdist cannot refer to a file outside its own directory.
    assert project(package)["license-files"] == ["LICENSE"]
    copy = ROOT / "packages" / package / "LICENSE"
    assert copy.read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("package", PACKAGES)
def test_commands_print_their_name_and_version(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, target in project(package).get("scripts", {}).items():
        module, _, function = target.partition(":")
        with pytest.raises(SystemExit) as exit_:
            getattr(import_module(module), function)(["--version"])
        assert exit_.value.code == 0
        assert capsys.readouterr().out == f"{name} {project(package)['version']}\n"


@pytest.mark.parametrize("package", PACKAGES)
def test_unknown_name_is_an_attribute_error(package: str) -> None:
    module = import_module(f"trencadis.{package}")
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def with_dependencies(package: str) -> set[str]:
    """The package and the others of this repository that it needs, directly or not."""
    direct = re.findall(r"\btrencadis-(\w+)", " ".join(project(package)["dependencies"]))
    return {package}.union(*map(with_dependencies, direct))


@pytest.mark.parametrize("package", ["engine", "server"])
def test_the_readme_installs_the_package_from_a_clone_and_from_an_index(package: str) -> None:
    text = (ROOT / "packages" / package / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\$ pip install (\./packages/.*)$", text, re.MULTILINE)
    assert set(re.findall(r"\./packages/(\w+)", command)) == with_dependencies(package)
    assert re.search(rf"`pip install '?trencadis-{package}\b", text)
