"""Judges a package's imports by a drawing: floors of rooms, as ``house.FLOORS`` holds them.

Every function returns offences as text, one for each, and none for a package that is as drawn.
"""

from __future__ import annotations

from collections.abc import Mapping

from house import UNDRAWN_ROOMS
from structure import NAMESPACE, Folder, circles

Drawing = Mapping[str, list[set[str]]]
"""Floors by short name of package or subpackage, lowest first."""


def missing_from_drawing(package: Folder, drawing: Drawing) -> list[str]:
    """Rooms that are not drawn, drawn twice or drawn and not built; subpackages to be drawn."""
    offences = []
    folders = {_short(folder): folder for folder in package.walk()}
    top = _short(package)
    for name, folder in folders.items():
        if name not in drawing:
            if name == top or len(folder.rooms) > UNDRAWN_ROOMS:
                offences.append(f"{name} has {len(folder.rooms)} rooms and no drawing")
            continue
        drawn = [room for floor in drawing[name] for room in floor]
        offences += [
            f"{name}: {room} is not drawn: add it to FLOORS of tests/house.py"
            for room in sorted(folder.rooms - set(drawn))
        ]
        offences += [f"{name}: {room} is drawn only" for room in sorted(set(drawn) - folder.rooms)]
        offences += [f"{name}: {room} is drawn twice" for room in drawn if drawn.count(room) > 1]
    drawn_here = {name for name in drawing if name == top or name.startswith(f"{top}.")}
    return offences + [f"{name} is drawn only" for name in sorted(drawn_here - folders.keys())]


def upward_imports(package: Folder, drawing: Drawing) -> list[str]:
    """Imports that do not lead to a lower floor; rooms that are not drawn are left out."""
    offences = []
    for folder in package.walk():
        floors = drawing.get(_short(folder), [])
        height = {room: number for number, floor in enumerate(floors) for room in floor}
        for found in folder.imports:
            source, target = folder.room(found.importer), folder.room(found.imported)
            if source == target or not {source, target} <= height.keys():
                continue
            if height[source] <= height[target]:
                offences.append(f"{found}, from floor {height[source]} to {height[target]}")
    return list(dict.fromkeys(offences))


def imports_of_itself(package: Folder) -> list[str]:
    """Imports from the package's own ``__init__``, except of its version."""
    return [str(found) for found in package.inward if not (found.name or "").startswith("__")]


def import_circles(package: Folder) -> list[str]:
    """Circles between modules, and between the rooms of the package and of each subpackage."""
    graphs = {"modules": package.module_arrows}
    graphs.update((_short(folder), folder.room_arrows) for folder in package.walk())
    return [
        f"{kind}: {' <-> '.join(sorted(circle))}"
        for kind, graph in graphs.items()
        for circle in circles(graph)
    ]


def _short(folder: Folder) -> str:
    return folder.name.removeprefix(f"{NAMESPACE}.")
