"""CONTRIBUTING.md leads to every module and session: paths exist, and every room stands in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from structure import packages

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
def test_every_room_is_named(package: str) -> None:
    """A room is a subfolder or a module of the package's folder."""
    rooms = {
        path.name if path.suffix else f"{path.name}/"
        for path in source(package).iterdir()
        if (path.suffix == ".py" and path.name != "__init__.py") or (path / "__init__.py").exists()
    }
    named = {path.split("/", 1)[1] for path in named_paths() if path.startswith(f"{package}/")}
    assert not {
        room for room in rooms if not any(name == room or name.startswith(room) for name in named)
    }


def test_every_session_of_nox_is_listed() -> None:
    noxfile = (ROOT / "noxfile.py").read_text()
    sessions = re.findall(r"^@nox\.session.*\n(?:@nox\..*\n)*def (\w+)", noxfile, re.MULTILINE)
    assert len(sessions) == noxfile.count("\n@nox.session")
    listed = re.findall(r"^python -m nox -s ([\w ]+?) +#", TEXT, re.MULTILINE)
    assert sorted(sessions) == sorted(" ".join(listed).split())
