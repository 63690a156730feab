"""What reads and judges the structure of a package is tried on small trees made for it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from drawing import import_circles, imports_of_itself, missing_from_drawing, upward_imports
from house import UNDRAWN_ROOMS
from structure import Folder, circles, heights, packages

TOOL = Path(__file__).parent.parent / "tools" / "structure.py"

SOUND = {
    "__init__.py": "from trencadis.hall import attic, cellar\n",
    "cellar.py": "import os\n",
    "stairs/__init__.py": "",
    "stairs/step.py": "from trencadis.hall.cellar import wine\n",
    "stairs/rail.py": "from trencadis.hall.stairs import step\n",
    "attic.py": "def view():\n    from trencadis.hall.stairs.rail import grip\n",
}
DRAWING = {"hall": [{"cellar"}, {"stairs"}, {"attic"}]}


def hall(root: Path, **changes: str) -> Folder:
    """A package of three rooms, with modules added or replaced; ``__`` stands for a slash."""
    home = root / "packages" / "hall" / "src" / "trencadis" / "hall"
    changed = {f"{name.replace('__', '/')}.py": text for name, text in changes.items()}
    for name, text in {**SOUND, **changed}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    return packages(root)["hall"]


def offences(package: Folder) -> list[str]:
    return [
        *missing_from_drawing(package, DRAWING),
        *upward_imports(package, DRAWING),
        *imports_of_itself(package),
        *import_circles(package),
    ]


def test_a_sound_package_has_no_offences(tmp_path: Path) -> None:
    package = hall(tmp_path)
    assert offences(package) == []
    assert package.rooms == {"cellar", "stairs", "attic"}
    assert [set(floor) for floor in package.floors] == DRAWING["hall"]
    assert package.room_arrows == {"cellar": set(), "stairs": {"cellar"}, "attic": {"stairs"}}
    assert package.exports == {"cellar", "attic"}


@pytest.mark.parametrize(
    "source",
    [
        "from trencadis.hall.attic import view",
        "from trencadis.hall import attic",
        "import trencadis.hall.attic",
        "from .attic import view",
        "from . import attic",
        "def late():\n    from trencadis.hall.attic import view",
        "if TYPE_CHECKING:\n    from trencadis.hall.attic import view",
    ],
)
def test_an_upward_import_is_found_however_it_is_written(tmp_path: Path, source: str) -> None:
    package = hall(tmp_path, cellar=source)
    (found,) = upward_imports(package, DRAWING)
    assert "cellar.py:" in found
    assert "imports trencadis.hall.attic" in found


def test_an_upward_import_out_of_a_subpackage_is_found(tmp_path: Path) -> None:
    package = hall(tmp_path, stairs__lamp="from ..attic import view\n")
    (found,) = upward_imports(package, DRAWING)
    assert "stairs/lamp.py:1" in found


def test_an_import_on_the_same_floor_is_found(tmp_path: Path) -> None:
    package = hall(tmp_path)
    flat = {"hall": [{"cellar", "stairs"}, {"attic"}]}
    (found,) = upward_imports(package, flat)
    assert "trencadis.hall.stairs.step imports trencadis.hall.cellar" in found


def test_the_floors_of_a_subpackage_are_held(tmp_path: Path) -> None:
    package = hall(tmp_path)
    assert upward_imports(package, {**DRAWING, "hall.stairs": [{"step"}, {"rail"}]}) == []
    assert len(upward_imports(package, {**DRAWING, "hall.stairs": [{"rail"}, {"step"}]})) == 1


def test_a_circle_of_modules_is_found(tmp_path: Path) -> None:
    package = hall(tmp_path, stairs__step="from trencadis.hall.stairs import rail\n")
    assert upward_imports(package, DRAWING) == []
    assert import_circles(package) == [
        "modules: trencadis.hall.stairs.rail <-> trencadis.hall.stairs.step",
        "hall.stairs: rail <-> step",
    ]


def test_a_circle_of_rooms_whose_modules_form_none_is_found(tmp_path: Path) -> None:
    package = hall(
        tmp_path,
        stairs__lamp="import trencadis.hall.attic\n",
        attic="import trencadis.hall.stairs.step\n",
    )
    assert import_circles(package) == ["hall: attic <-> stairs"]


def test_a_module_that_is_not_drawn_is_found(tmp_path: Path) -> None:
    package = hall(tmp_path, garage="")
    expected = ["hall: garage is not drawn: add it to FLOORS of tests/house.py"]
    assert missing_from_drawing(package, DRAWING) == expected


def test_a_subpackage_that_is_not_drawn_is_found(tmp_path: Path) -> None:
    package = hall(tmp_path, garage__car="")
    expected = ["hall: garage is not drawn: add it to FLOORS of tests/house.py"]
    assert missing_from_drawing(package, DRAWING) == expected


def test_what_is_drawn_and_not_built_is_found(tmp_path: Path) -> None:
    drawing = {"hall": [*DRAWING["hall"], {"tower"}], "hall.tower": [{"bell"}]}
    found = missing_from_drawing(hall(tmp_path), drawing)
    assert found == ["hall: tower is drawn only", "hall.tower is drawn only"]


def test_what_is_drawn_twice_is_found(tmp_path: Path) -> None:
    drawing = {"hall": [*DRAWING["hall"], {"cellar"}]}
    assert "hall: cellar is drawn twice" in missing_from_drawing(hall(tmp_path), drawing)


def test_a_package_without_a_drawing_is_found(tmp_path: Path) -> None:
    assert missing_from_drawing(hall(tmp_path), {}) == ["hall has 3 rooms and no drawing"]


def test_a_large_subpackage_needs_a_drawing(tmp_path: Path) -> None:
    small = {f"stairs__step_{number}": "" for number in range(UNDRAWN_ROOMS - 2)}
    assert missing_from_drawing(hall(tmp_path, **small), DRAWING) == []
    large = hall(tmp_path, stairs__landing="")
    assert missing_from_drawing(large, DRAWING) == ["hall.stairs has 7 rooms and no drawing"]


def test_a_package_that_imports_itself_is_found_and_its_version_is_free(tmp_path: Path) -> None:
    assert (
        imports_of_itself(hall(tmp_path, cellar="from trencadis.hall import __version__\n")) == []
    )
    (found,) = imports_of_itself(hall(tmp_path, cellar="from trencadis.hall import view\n"))
    assert "trencadis.hall.cellar imports trencadis.hall" in found


def test_floors_count_a_circle_once() -> None:
    arrows = {
        "a": frozenset({"b"}),
        "b": frozenset({"c"}),
        "c": frozenset({"b", "d"}),
        "d": frozenset[str](),
    }
    assert circles(arrows) == [{"b", "c"}]
    assert heights(arrows) == {"d": 1, "b": 2, "c": 2, "a": 3}


def test_the_tool_prints_the_figures_of_another_checkout(tmp_path: Path) -> None:
    hall(tmp_path)
    command = [sys.executable, "-I", str(TOOL), "--root", str(tmp_path)]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table.splitlines()[-1].split() == ["hall", "6", "3", "2", "3", "0", "0"]
    details = subprocess.run(
        [*command, "--package", "hall"], capture_output=True, text=True, check=True
    ).stdout
    assert "  attic -> stairs\n" in details
    data = subprocess.run(
        [*command, "--package", "hall", "--drawing"], capture_output=True, text=True, check=True
    ).stdout
    assert ast.literal_eval(f"{{{data}}}")["hall"] == DRAWING["hall"]
