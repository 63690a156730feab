"""Check the tests by mutation: break a package in one place, and see whether its tests notice.

    python tools/mutants.py                        # all lists, as a table
    python tools/mutants.py kvcache scheduler      # those of two packages
    python tools/mutants.py kvcache --only 3 17    # single mutations, by their number in the list
    python tools/mutants.py seeds                  # those of docs/seeds.md
    python tools/mutants.py --jobs 2 --output table.md

``tests/mutations/PACKAGE*.toml`` lists the mutations as data. Each is applied to a copy of the
package's source; the default tests of that package then run against the copy. A mutation is
*killed* when a test fails. One that survives needs a new test, or, in the list, the reason why no
caller can see it (``harmless``). ``tests/mutations/seeds.toml`` breaks requirements of the seeds,
and ``attacks.toml`` brings defects back that attacks on a server found, each in the package that it
names: only the test of the entry (``row``) runs, and has to fail. The exit status is 1 where fewer
than 90 % of a list are killed, or a survivor has no such reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "mutations"
KEYS = {"module", "effect", "old", "new", "tests", "harmless", "package", "row"}
TARGET = 0.9
"""Share of each list that the package's tests must kill."""

TIMEOUT_S = 600
"""A mutation whose tests run longer hangs, and is killed by that."""


_NO_TESTS = 5
"""What pytest ends with where it has run none."""


class MutationError(ValueError):
    """An entry of a list that cannot be applied."""


@dataclass(frozen=True)
class Mutation:
    """One entry of a list. ``number`` counts from 1 in its file."""

    package: str
    list_name: str
    number: int
    module: str
    effect: str
    old: str
    new: str
    tests: str = ""
    harmless: str = ""
    row: str = ""
    """The only test that runs, as ``docs/seeds.md`` names it."""

    @property
    def name(self) -> str:
        return f"{self.list_name} {self.number}"

    @property
    def path(self) -> Path:
        """The mutated module, relative to the package's directory."""
        return Path("src") / "trencadis" / self.package / self.module

    def apply(self, package_directory: Path) -> None:
        """Change the module below ``package_directory``.

        Raises `MutationError` unless the old text occurs in it once.
        """
        file = package_directory / self.path
        if not file.is_file():
            raise MutationError(f"{self.name}: no module {self.path}")
        source = file.read_text(encoding="utf-8")
        occurrences = source.count(self.old)
        if occurrences != 1:
            raise MutationError(
                f"{self.name}: the old text occurs {occurrences} times in {self.module}, not once: "
                f"{self.old!r}"
            )
        changed = source.replace(self.old, self.new)
        compile(changed, str(file), "exec")
        file.write_text(changed, encoding="utf-8")


def load(file: Path) -> list[Mutation]:
    """The mutations of a list: its name begins with that of the package, or entries name one."""
    package = file.stem.partition("_")[0]
    mutations = []
    for number, entry in enumerate(tomllib.loads(file.read_text("utf-8"))["mutation"], start=1):
        if unknown := entry.keys() - KEYS:
            raise MutationError(f"{file.stem} {number}: unknown keys {sorted(unknown)}")
        fields = {"package": package, **entry}
        mutations.append(Mutation(list_name=file.stem, number=number, **fields))
    return mutations


def load_all(packages: Sequence[str] = ()) -> list[Mutation]:
    """The mutations of the lists of these packages, or of all."""
    mutations = [mutation for file in sorted(LISTS.glob("*.toml")) for mutation in load(file)]
    return [
        mutation
        for mutation in mutations
        if not packages or mutation.list_name.partition("_")[0] in packages
    ]


def is_killed(mutation: Mutation) -> bool:
    """Run the package's default tests against a mutated copy of its source."""
    directory = ROOT / "packages" / mutation.package
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = Path(name)
        shutil.copytree(directory / "src", copy / "src")
        mutation.apply(copy)
        if mutation.row:
            return fails(copy, ["-n0", *_selected(mutation.row)])
        tests = directory / "tests"
        # The file that is named is tried alone first, because it usually decides.
        runs = [[tests / mutation.tests]] if mutation.tests else []
        return any(fails(copy, paths) for paths in [*runs, [tests]])


def _selected(row: str) -> list[str]:
    """The arguments that run the test of a row, or its file where it is a part of other tests."""
    file, _, name = row.partition("::")
    selected = row if name.startswith("test_") else file
    return ["-m", "slow or gaudi or not slow", str(ROOT / "packages" / selected)]


def fails(copy: Path, tests: Iterable[str | Path], *, may_be_none: bool = False) -> bool:
    """Whether a test fails with the package of ``copy``.

    ``may_be_none``: the default tests may have none of ``tests``, which are slow then.
    """
    other_packages = os.environ.get("PYTHONPATH", "")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(copy / "src"), other_packages])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / "hypothesis"),
    }
    options = ("-x", "-q", "-p", "no:cacheprovider", "--no-header")
    command = [sys.executable, "-m", "pytest", *options, *map(str, tests)]
    try:
        run = subprocess.run(  # noqa: S603
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    if may_be_none and run.returncode == _NO_TESTS:
        return False
    if run.returncode not in (0, 1, 2):  # passed, failed, failed to import
        raise MutationError(f"pytest ended with {run.returncode}:\n{run.stdout}")
    return run.returncode != 0


def table(results: Sequence[tuple[Mutation, bool]]) -> str:
    """Killed and surviving mutations of each list, and the survivors, as Markdown."""
    lines = ["| list | mutations | killed | survived |", "|---|--:|--:|--:|"]
    names = list(dict.fromkeys(mutation.list_name for mutation, _ in results))
    for name in names:
        killed = [was_killed for mutation, was_killed in results if mutation.list_name == name]
        lines.append(f"| {name} | {len(killed)} | {sum(killed)} | {len(killed) - sum(killed)} |")
    num_killed = sum(was_killed for _, was_killed in results)
    lines.append(
        f"| all | {len(results)} | {num_killed} ({num_killed / len(results):.0%}) "
        f"| {len(results) - num_killed} |"
    )
    for mutation, was_killed in results:
        if not was_killed:
            reason = mutation.harmless or "NO REASON GIVEN"
            lines += ["", f"- {mutation.name}, `{mutation.module}`: {mutation.effect}. {reason}"]
    return "\n".join(lines) + "\n"


def is_enough(results: Sequence[tuple[Mutation, bool]]) -> bool:
    """Whether each list reaches the target and each survivor is explained."""
    explained = all(was_killed or mutation.harmless for mutation, was_killed in results)
    by_list: dict[str, list[bool]] = {}
    for mutation, was_killed in results:
        by_list.setdefault(mutation.list_name, []).append(was_killed)
    return explained and all(sum(killed) >= TARGET * len(killed) for killed in by_list.values())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", help="lists that are run; default: all")
    parser.add_argument("--only", nargs="+", type=int, default=(), help="numbers in the list")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="default: the cores")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    mutations = [
        mutation
        for mutation in load_all(args.packages)
        if not args.only or mutation.number in args.only
    ]
    if not mutations:
        parser.error("no mutation is listed for this")
    results: list[tuple[Mutation, bool]] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutation, was_killed in zip(mutations, pool.map(is_killed, mutations), strict=True):
            results.append((mutation, was_killed))
            print(f"{mutation.name:24} {'killed' if was_killed else 'SURVIVED'}", flush=True)
    text = table(results)
    print(f"\n{text}")
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    return 0 if is_enough(results) else 1


if __name__ == "__main__":
    sys.exit(main())
