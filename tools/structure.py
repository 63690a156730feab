"""Print how the packages are built: rooms, arrows between them, floors and circles.

    python tools/structure.py                        # one row for each package
    python tools/structure.py --package engine       # its rooms by floor, its arrows, its circles
    python tools/structure.py --package engine.models
    python tools/structure.py --modules              # what each module is, also of one package
    python tools/structure.py --drawing              # the floors as tests/house.py has them
    python tools/structure.py --root ../other-clone  # the same of another checkout

Needs the standard library alone. ``tests/test_house.py`` holds the same figures to a drawing.

A *room* is what a reader sees in a package's folder: a subfolder, or a module. The package's own
``__init__.py`` is not a room: it only re-exports. An *arrow* is a pair of rooms: the first imports
the second. Imports in functions and under ``if TYPE_CHECKING`` count as well. A *circle* is a set
of rooms, or of modules, that reach each other (a strongly connected component); those between the
rooms of a subpackage count, too. *Floors* are the number of rooms on the longest path of arrows;
the rooms of a circle share a floor.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

NAMESPACE = "trencadis"
ROOT = Path(__file__).resolve().parent.parent

Arrows = Mapping[str, frozenset[str]]
"""For each node the nodes that it points to."""


@dataclass(frozen=True, order=True)
class Import:
    """One import inside a package; modules are named as Python names them."""

    importer: str
    imported: str
    path: Path
    line: int
    name: str | None = None
    """What is taken from the imported module; None where that is the module itself."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.importer} imports {self.imported}"


@dataclass(frozen=True)
class Folder:
    """A package, or a subpackage: ``name`` is dotted and full, ``path`` is its folder."""

    name: str
    path: Path

    @cached_property
    def modules(self) -> Mapping[str, Path]:
        """Every module in and below the folder with its file; a package stands for its __init__."""
        found = {}
        for path in sorted(self.path.rglob("*.py")):
            parts = path.relative_to(self.path).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            found[".".join((self.name, *parts))] = path
        return found

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Imports of the folder's modules by each other."""
        return tuple(
            found
            for module, path in self.modules.items()
            for found in imports_of(module, path, self.modules)
        )

    @cached_property
    def rooms(self) -> frozenset[str]:
        return frozenset(self.room(module) for module in self.modules if module != self.name)

    def room(self, module: str) -> str:
        """The room that a module is in; empty for the folder's own ``__init__``."""
        return module.removeprefix(self.name).removeprefix(".").partition(".")[0]

    def walk(self) -> Iterator[Folder]:
        """This folder and every subpackage below it."""
        yield self
        for room in sorted(self.rooms):
            if (self.path / room).is_dir():
                yield from Folder(f"{self.name}.{room}", self.path / room).walk()

    @cached_property
    def module_arrows(self) -> Arrows:
        """Which module imports which, without the folder's own ``__init__``."""
        pairs = ((found.importer, found.imported) for found in self.imports)
        return _arrows(
            self.modules.keys() - {self.name}, (pair for pair in pairs if self.name not in pair)
        )

    @cached_property
    def room_arrows(self) -> Arrows:
        """Which room imports from which, without what the folder's own ``__init__`` imports."""
        pairs = ((self.room(found.importer), self.room(found.imported)) for found in self.imports)
        return _arrows(self.rooms, (pair for pair in pairs if all(pair)))

    @cached_property
    def inward(self) -> tuple[Import, ...]:
        """Imports from the folder's own ``__init__``: the package that imports itself."""
        return tuple(found for found in self.imports if found.imported == self.name)

    @cached_property
    def exports(self) -> frozenset[str]:
        """The rooms that the folder's own ``__init__`` imports from."""
        return frozenset(
            self.room(found.imported) for found in self.imports if found.importer == self.name
        ) - {""}

    @cached_property
    def floors(self) -> tuple[frozenset[str], ...]:
        """Rooms by floor, lowest first: each on the lowest that has all its imports below it."""
        height = heights(self.room_arrows)
        return tuple(
            frozenset(room for room in self.rooms if height[room] == floor)
            for floor in range(1, max(height.values(), default=0) + 1)
        )


def packages(root: Path) -> dict[str, Folder]:
    """The packages of a checkout, by short name."""
    found = {
        path.name: Folder(f"{NAMESPACE}.{path.name}", path)
        for path in sorted(root.glob(f"packages/*/src/{NAMESPACE}/*/"))
        if (path / "__init__.py").exists()
    }
    return dict(sorted(found.items(), key=lambda item: len(item[1].modules)))


@cache
def import_statements(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """All import statements of a file's text, which is parsed once, however many ask."""
    nodes = ast.walk(ast.parse(source))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def imports_of(module: str, path: Path, modules: Mapping[str, Path]) -> Iterator[Import]:
    """The imports in one file that reach ``modules``, relative ones included."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in import_statements(path.read_text()):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    yield Import(module, alias.name, path, node.lineno)
        else:
            source = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join((*above, *filter(None, [node.module])))
            for alias in node.names:
                if f"{source}.{alias.name}" in modules:
                    yield Import(module, f"{source}.{alias.name}", path, node.lineno)
                elif source in modules:
                    yield Import(module, source, path, node.lineno, alias.name)


def circles(arrows: Arrows) -> list[frozenset[str]]:
    """Sets of two and more nodes that reach each other."""
    return [component for component in _components(arrows) if len(component) > 1]


def heights(arrows: Arrows) -> dict[str, int]:
    """Nodes on the longest path that starts at each node; those of a circle share theirs."""
    height: dict[str, int] = {}
    for component in _components(arrows):
        below = {target for node in component for target in arrows[node]} - component
        floor = 1 + max((height[target] for target in below), default=0)
        height.update(dict.fromkeys(component, floor))
    return height


def _components(arrows: Arrows) -> list[frozenset[str]]:
    """Strongly connected components, each after all that it points to (Tarjan, 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_nodes: list[str] = []
    components: list[frozenset[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        open_nodes.append(node)
        for target in sorted(arrows[node]):
            if target not in order:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in open_nodes:
                lowest[node] = min(lowest[node], order[target])
        if lowest[node] == order[node]:
            start = open_nodes.index(node)
            components.append(frozenset(open_nodes[start:]))
            del open_nodes[start:]

    for node in sorted(arrows):
        if node not in order:
            visit(node)
    return components


def _arrows(nodes: Iterable[str], pairs: Iterable[tuple[str, str]]) -> Arrows:
    targets: dict[str, set[str]] = defaultdict(set)
    for source, target in pairs:
        if source != target:
            targets[source].add(target)
    return {node: frozenset(targets[node]) for node in nodes}


def summary(folders: Mapping[str, Folder]) -> str:
    """One row for each folder."""
    rows: list[tuple[str, ...]] = [
        ("", "modules", "rooms", "arrows", "floors", "room circles", "module circles")
    ]
    for name, folder in folders.items():
        figures = (
            len(folder.modules),
            len(folder.rooms),
            sum(map(len, folder.room_arrows.values())),
            len(folder.floors),
            sum(len(circles(below.room_arrows)) for below in folder.walk()),
            len(circles(folder.module_arrows)),
        )
        rows.append((name, *map(str, figures)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def details(folder: Folder) -> str:
    """The rooms of a folder by floor, its arrows, its circles."""
    lines = [summary({folder.name: folder}), "", "Floors, highest first:"]
    for number, rooms in reversed(list(enumerate(folder.floors, start=1))):
        lines.append(f"  {number:>2}  {', '.join(sorted(rooms))}")
    lines += ["", "Arrows:"]
    for room, targets in sorted(folder.room_arrows.items()):
        lines += [f"  {room} -> {', '.join(sorted(targets))}"] * bool(targets)
    lines += ["", f"Its own __init__ re-exports from: {', '.join(sorted(folder.exports))}"]
    lines += [f"  {found.importer} takes {found.name} from it" for found in folder.inward]
    graphs = {f"rooms of {below.name}": below.room_arrows for below in folder.walk()}
    graphs["modules"] = folder.module_arrows
    for kind, arrows in graphs.items():
        for circle in circles(arrows):
            lines += ["", f"Circle between {kind}: {' <-> '.join(sorted(circle))}"]
    return "\n".join(lines)


def drawing(folder: Folder) -> str:
    """The floors of a folder and of its subpackages, lowest first, as entries of a Python dict."""
    lines = []
    for below in folder.walk():
        lines.append(f'"{below.name.removeprefix(f"{NAMESPACE}.")}": [')
        for rooms in below.floors:
            names = ", ".join(f'"{room}"' for room in sorted(rooms))
            lines.append(f"    {{{names}}},")
        lines.append("],")
    return "\n".join(lines)


def module_list(folder: Folder) -> str:
    """Each module in and below a folder, and what it is."""
    return "\n".join(
        f"{path.relative_to(folder.path.parent).as_posix():<44}  {first_sentence(path.read_text())}"
        for path in folder.modules.values()
        if path.stat().st_size > 0
    )


def first_sentence(source: str) -> str:
    """The first line of a module's docstring; empty where it has none."""
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--package", metavar="NAME", help="the rooms and arrows of a package")
    parser.add_argument("--drawing", action="store_true", help="the floors as Python data")
    parser.add_argument("--modules", action="store_true", help="each module and what it is")
    args = parser.parse_args()
    found = packages(args.root)
    if not found:
        parser.error(f"no packages in {args.root}/packages: --root takes the top of a checkout")
    if args.package is None:
        show = drawing if args.drawing else module_list if args.modules else None
        print("\n".join(map(show, found.values())) if show else summary(found))
        return 0
    folders = {folder.name: folder for top in found.values() for folder in top.walk()}
    folder = folders.get(f"{NAMESPACE}.{args.package.removeprefix(f'{NAMESPACE}.')}")
    if folder is None:
        parser.error(f"no package {args.package!r}: there are {', '.join(sorted(folders))}")
    show = drawing if args.drawing else module_list if args.modules else details
    print(show(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
