"""Break a package in places that are drawn at random, and see whether its tests notice.

    python tools/drawn_mutants.py kvcache --count 60 --seed 1    # as a table, with the survivors
    python tools/drawn_mutants.py engine --count 60 --seed 1 --files 6 --jobs 2

Beside the lists of `mutants`, which somebody chose: nobody knows which places are drawn. The same
source and seed give the same ones. A survivor is a place to look at: the tests may miss something,
or no caller can see the change. ``--files N`` runs the N test files that name most of what the
changed module defines, and not all: for a package whose tests take minutes. ``--lines FILE``,
a file of ``tests_by_line.py``, runs the tests that run the changed line, the quickest first, one
process at a time; ``--seconds`` bounds what they take together, so that a survivor may need more.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked_tests import FAILED, PASSED, TIMED_OUT, import_the_rest, outcome
from mutants import ROOT, Mutation, fails

Record = dict[str, Any]
"""What `tests_by_line.py` writes of a package."""

COMPARED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*"}
QUIET = re.compile(r"\b(logger|logging|warnings)\.|_log_|__repr__|__str__")
"""Calls whose absence no caller is promised to see."""

GUARDS = {"strict", "frozen", "slots", "kw_only", "eq", "order", "hash", "repr", "daemon"}
"""Arguments against mistakes of who changes the code, or of how a value is shown: not changed."""


@dataclass(frozen=True)
class Change:
    """A piece of a module's source, and what takes its place."""

    module: str
    line: int
    start: int
    end: int
    new: str

    def applied(self, source: bytes) -> bytes:
        """The changed source."""
        return source[: self.start] + self.new.encode() + source[self.end :]


class Places(ast.NodeVisitor):
    """Every change of one module."""

    def __init__(self, module: str, source: bytes) -> None:
        self._module, self._source = module, source
        lengths = [len(line) for line in source.splitlines(keepends=True)]
        self._starts = [sum(lengths[:number]) for number in range(len(lengths))]
        self.changes: list[Change] = []
        self.visit(ast.parse(source))

    def _at(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._at(node)
        return self._source[start:end].decode()

    def _change(self, node: ast.expr | ast.stmt, new: str) -> None:
        start, end = self._at(node)
        self.changes.append(Change(self._module, node.lineno, start, end, new))

    def visit_Compare(self, node: ast.Compare) -> None:
        new = COMPARED.get(type(node.ops[0]))
        if new and len(node.ops) == 1:
            self._change(node, f"({self._text(node.left)} {new} {self._text(node.comparators[0])})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        new = COMPUTED.get(type(node.op))
        is_text = any(isinstance(x, ast.JoinedStr) for x in (node.left, node.right))
        if new and not is_text:
            self._change(node, f"({self._text(node.left)} {new} {self._text(node.right)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        self._change(node, f"({word.join(f'({self._text(x)})' for x in node.values)})")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in self._text(node.test):
            self._change(node.test, f"not ({self._text(node.test)})")
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._change(node.test, f"not ({self._text(node.test)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._change(node, str(not node.value))
        elif isinstance(node.value, int):
            self._change(node, str(node.value + 1))

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in GUARDS:
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not QUIET.search(self._text(node)):
            self._change(node, "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, (ast.Add, ast.Sub)):
            sign = "-=" if isinstance(node.op, ast.Add) else "+="
            self._change(node, f"{self._text(node.target)} {sign} {self._text(node.value)}")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._change(node, "break")

    def visit_Raise(self, node: ast.Raise) -> None:
        self._change(node, "pass")  # what its message says is not looked at

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not QUIET.search(node.name):
            for child in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
                self.visit(child)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)  # type: ignore[arg-type]

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Texts are not looked at."""


def drawn(package: str, count: int, seed: int) -> list[Change]:
    """Changes of a package, each place as probable as every other."""
    directory = ROOT / "packages" / package / "src" / "trencadis" / package
    changes = [
        change
        for file in sorted(directory.rglob("*.py"))
        for change in Places(str(file.relative_to(directory)), file.read_bytes()).changes
    ]
    return random.Random(f"{package} {seed}").sample(changes, min(count, len(changes)))


def named_most(package: str, module: str, count: int) -> list[Path]:
    """The test files that name most of what a module defines."""
    source = ROOT / "packages" / package / "src" / "trencadis" / package / module
    names = {
        node.name
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and not node.name.startswith("__")
    } | {source.stem}
    patterns = [re.compile(rf"\b{name}\b") for name in sorted(names)]
    score = {
        file: sum(bool(pattern.search(text)) for pattern in patterns)
        + 3 * (source.stem.lstrip("_") in file.stem)
        for file in sorted((ROOT / "packages" / package / "tests").rglob("test_*.py"))
        for text in [file.read_text()]
    }
    return sorted((file for file in score if score[file]), key=score.__getitem__, reverse=True)[
        :count
    ]


def tests_of(package: str, change: Change, record: Record) -> dict[str, float]:
    """The tests that run the changed lines, with what each takes.

    Of a line that the import runs, those that run a line with a name which it defines. Where none
    is seen to, those of the files that name what the module defines, else all.
    """
    source = ROOT / "packages" / package / "src" / "trencadis" / package / change.module
    lines = record["tests"].get(change.module, {})
    tree = ast.parse(source.read_bytes())
    first, last = statement_of(tree, change.line)
    of_lines = ({change.line}, range(first, last + 1), lines_that_use(tree, first))
    found = ([test for line in of for test in lines.get(str(line), [])] for of in of_lines)
    tests = next(filter(None, found), [])
    seconds = record["seconds"]
    if not tests:
        files = {str(file.relative_to(ROOT)) for file in named_most(package, change.module, 8)}
        tests = [test for test in seconds if test.partition("::")[0] in files]
    return {test: seconds[test] for test in tests or seconds}


def statement_of(tree: ast.Module, line: int) -> tuple[int, int]:
    """The first and last line of the smallest statement around a line, without what it contains."""
    around = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or 0
            if node.lineno <= line <= last:
                around.append((node.lineno, last))
    return min(around, key=lambda span: span[1] - span[0], default=(line, line))


def lines_that_use(tree: ast.Module, line: int) -> set[int]:
    """The lines of a module with a name that the assignment at a line defines."""
    names = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.lineno == line
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    return {
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id in names)
        or (isinstance(node, ast.Attribute) and node.attr in names)
    }


def quickest(seconds: dict[str, float], limit_s: float) -> dict[str, float]:
    """The quickest tests that take ``limit_s`` together."""
    total, chosen = 0.0, {}
    for test, duration in sorted(seconds.items(), key=lambda item: item[1]):
        total += duration
        if chosen and total > limit_s:
            break
        chosen[test] = duration
    return chosen


def outcome_by_line(package: str, change: Change, record: Record, limit_s: float) -> str:
    """What comes of the tests that run the changed lines, in one process after another."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = Path(name)
        shutil.copytree(ROOT / "packages" / package / "src", copy / "src")
        file = copy / Mutation(package, "", 0, change.module, "", "", "").path
        source = change.applied(file.read_bytes())
        try:
            compile(source, str(file), "exec")
        except SyntaxError:
            return FAILED
        file.write_bytes(source)
        tests = quickest(tests_of(package, change, record), limit_s)
        return outcome(copy, tests, 30 + 6 * sum(tests.values()))


def is_killed(package: str, change: Change, num_files: int) -> bool:
    """Whether a test fails."""
    directory = ROOT / "packages" / package
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = Path(name)
        shutil.copytree(directory / "src", copy / "src")
        file = copy / Mutation(package, "", 0, change.module, "", "", "").path
        source = change.applied(file.read_bytes())
        try:
            compile(source, str(file), "exec")
        except SyntaxError:
            return True  # nobody could write it
        file.write_bytes(source)
        tests: list[Path] = named_most(package, change.module, num_files or 1)
        runs = [[test] for test in tests] if num_files else [tests, [directory / "tests"]]
        return any(fails(copy, paths, may_be_none=True) for paths in runs if paths)


def lines_of(package: str, results: Sequence[tuple[Change, bool]]) -> Iterator[str]:
    """The table of a package, then its survivors."""
    num_killed = sum(was_killed for _, was_killed in results)
    yield f"{package}: {num_killed} of {len(results)} killed ({num_killed / len(results):.1%})"
    for change, was_killed in results:
        if not was_killed:
            source = ROOT / "packages" / package / "src" / "trencadis" / package / change.module
            text = source.read_bytes()[change.start : change.end].decode()
            yield f"- {change.module}:{change.line}: {text!r} -> {change.new!r}"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package")
    parser.add_argument("--count", type=int, default=60, help="changes; default: 60")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=0, help="test files to run; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="default: the cores")
    parser.add_argument("--lines", type=Path, help="a file of tests_by_line.py")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of tests, by --lines; default: 60"
    )
    args = parser.parse_args()
    changes = drawn(args.package, args.count, args.seed)
    results: list[tuple[Change, bool]] = []
    if args.lines:
        record = json.loads(args.lines.read_text())
        import_the_rest()
        num_timed_out = 0
        for change in changes:
            state = outcome_by_line(args.package, change, record, args.seconds)
            results.append((change, state != PASSED))
            num_timed_out += state == TIMED_OUT
            print(f"{change.module}:{change.line} {state}", file=sys.stderr, flush=True)
        print("\n".join(lines_of(args.package, results)))
        print(f"{num_timed_out} of the killed were ended by the limit of time")
        return
    with ThreadPoolExecutor(args.jobs) as pool:
        killed = pool.map(lambda change: is_killed(args.package, change, args.files), changes)
        for change, was_killed in zip(changes, killed, strict=True):
            results.append((change, was_killed))
            state = "killed" if was_killed else "SURVIVED"
            print(f"{change.module}:{change.line} {state}", file=sys.stderr, flush=True)
    print("\n".join(lines_of(args.package, results)))


if __name__ == "__main__":
    main()
