"""Count the project's files and functions that one chat request passes through.

    python tools/request_hops.py                      # the figures
    python tools/request_hops.py --list               # and every function of a decode step
    python tools/request_hops.py --root ../other-clone

Serves one chat request of a tiny random model the real way: the server's app and the front of the
engine in one process, the engine core in its own, on the CPU and in buckets that are warmed up. An
earlier request with another prompt has loaded what is loaded on first use. Both processes are
profiled with ``sys.setprofile`` while the request runs.

A file or function counts once, however often it is entered; comprehensions count as part of their
function, and code that attrs generates does not count. An *entry* is a call, or the resumption of a
coroutine or generator. A decode *step* lasts from one call of ``EngineCore.step`` to the next, and
so includes the core's loop and its messages. Steps that enter the same functions are alike; the
steady decode step is one of the largest set of such steps.

In the list, ``=`` marks pure delegation: the function's only statement calls another function or
gives an attribute. ``xN`` is the number of entries; callers follow ``<``.

Only public names of the packages are used, so that module names may differ below ``--root``.
Needs Python 3.11, the packages' requirements and those of the engine's tests.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEP = "EngineCore.step"
SOURCES = "TRENCADIS_HOPS_SOURCES"
"""Environment: the folders whose files count, and below which names are printed."""
REPORT = "TRENCADIS_HOPS_REPORT"
"""Environment: where the core process writes what it counted."""
WAIT_SECONDS = 60.0

Function = tuple[str, str, int]
"""File, qualified name, first line."""


class Profile:
    """Entries of functions in the project's files, by the callers among them, step by step."""

    def __init__(self, sources: Iterable[str]) -> None:
        self._sources = tuple(sources)
        self._own: dict[CodeType, bool] = {}
        self.recording = False
        self.segments: list[Counter[tuple[CodeType | None, CodeType]]] = [Counter()]
        """Before the first step, in it, between it and the second, in the second, and so on."""

    def hook(self, frame: FrameType, event: str, _: object) -> None:
        """For ``sys.setprofile`` and ``threading.setprofile``."""
        if not self.recording or event not in ("call", "return"):
            return
        if not self._is_own(frame.f_code):
            return
        is_step = frame.f_code.co_qualname == STEP
        if event == "return":
            self.segments += [Counter()] * is_step
            return
        if is_step:
            self.segments.append(Counter())
        caller = frame.f_back
        while caller is not None and not self._is_own(caller.f_code):
            caller = caller.f_back
        self.segments[-1][caller and caller.f_code, frame.f_code] += 1

    def _is_own(self, code: CodeType) -> bool:
        known = self._own.get(code)
        if known is None:
            known = self._own[code] = (
                code.co_filename.startswith(self._sources) and code.co_name != "<module>"
            )
        return known

    def report(self) -> list[list[tuple[Function | None, Function, int]]]:
        """For every segment: caller, function, entries."""
        return [
            [
                (caller and self._function(caller), self._function(called), entries)
                for (caller, called), entries in segment.items()
            ]
            for segment in self.segments
        ]

    def _function(self, code: CodeType) -> Function:
        file = next(
            code.co_filename.removeprefix(f"{source}/")
            for source in self._sources
            if code.co_filename.startswith(source)
        )
        return file, code.co_qualname, code.co_firstlineno


def profile_core() -> None:
    """In the core's process: SIGUSR1 begins the count, a second one writes it and ends it."""
    profile = Profile(os.environ[SOURCES].split(os.pathsep))
    report = Path(os.environ[REPORT])
    threading.setprofile(profile.hook)

    def toggle(*_: object) -> None:
        profile.recording = not profile.recording
        sys.setprofile(profile.hook if profile.recording else None)
        text = "" if profile.recording else json.dumps(profile.report())
        unfinished = report.with_suffix(".unfinished")
        unfinished.write_text(text)
        unfinished.rename(report)

    signal.signal(signal.SIGUSR1, toggle)


if __name__ == "__mp_main__" and REPORT in os.environ:  # what multiprocessing calls this, in a core
    profile_core()


async def measure(model: Path, tokens: int, stream: bool) -> dict[str, Any]:
    """Serve two requests and profile the second."""
    import httpx  # noqa: PLC0415  not for the table

    from trencadis.engine import AsyncEngine, EngineConfig, LogSettings  # noqa: PLC0415
    from trencadis.server import create_app  # noqa: PLC0415

    profile = Profile(os.environ[SOURCES].split(os.pathsep))
    threading.setprofile(profile.hook)
    config = EngineConfig(
        model=str(model), dtype="float32", max_model_len=256, max_num_seqs=4, num_blocks=64
    )
    engine = await AsyncEngine.start(config, LogSettings(level=logging.WARNING))
    try:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://hops") as client:
            await ask(client, "An earlier request", 4, stream)
            await asyncio.to_thread(toggle_core)
            profile.recording = True
            sys.setprofile(profile.hook)
            await ask(client, "How many hops is it?", tokens, stream)
            sys.setprofile(None)
            profile.recording = False
            core = json.loads(await asyncio.to_thread(toggle_core))
    finally:
        await engine.stop()
    return {"front": profile.report(), "core": core}


async def ask(client: Any, content: str, tokens: int, stream: bool) -> None:
    answer = await client.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        },
    )
    answer.raise_for_status()


def toggle_core() -> str:
    """Begin or end the count in the core; returns what it wrote."""
    report = Path(os.environ[REPORT])
    report.unlink(missing_ok=True)
    (core,) = (child.pid for child in multiprocessing.active_children() if child.pid)
    os.kill(core, signal.SIGUSR1)
    deadline = time.monotonic() + WAIT_SECONDS
    while not report.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the core wrote nothing within {WAIT_SECONDS:.0f} s")
        time.sleep(0.05)
    return report.read_text()


class Counts:
    """Entries and callers of the functions in some segments; comprehensions in their function."""

    def __init__(self, segments: Iterable[list[list[Any]]]) -> None:
        self.entries: Counter[tuple[str, str]] = Counter()
        self.callers: dict[tuple[str, str], set[str]] = defaultdict(set)
        for segment in segments:
            for caller, called, entries in segment:
                function = _named(called)
                if caller is not None and _named(caller) == function:
                    continue  # a comprehension, or a recursion
                self.entries[function] += entries
                if caller is not None:
                    self.callers[function].add(_named(caller)[1])
        self.functions = frozenset(self.entries)

    @property
    def files(self) -> frozenset[str]:
        return frozenset(file for file, _ in self.functions)

    def row(self, label: str) -> str:
        entries = sum(self.entries.values())
        return f"{label:<34}{len(self.files):>7}{len(self.functions):>11}{entries:>9}"


def _named(function: list[Any]) -> tuple[str, str]:
    file, name, _ = function
    for part in (".<locals>.<listcomp>", ".<locals>.<genexpr>", ".<locals>.<dictcomp>"):
        name = name.replace(part, "")
    return file, name.replace(".<locals>.<setcomp>", "")


Step = tuple[list[list[Any]], list[list[Any]]]
"""What `EngineCore.step` entered, and what the core entered after it."""


def core_steps(measured: Mapping[str, Any]) -> list[Step]:
    _, *segments = measured["core"]
    return list(zip(segments[::2], segments[1::2], strict=True))


def steady_steps(steps: Iterable[Step]) -> list[Step]:
    """The largest set of steps that enter the same functions."""
    alike: dict[frozenset[tuple[str, str]], list[Step]] = defaultdict(list)
    for step in steps:
        alike[Counts(step).functions].append(step)
    return max(alike.values(), key=len)


@cache
def delegations(path: Path) -> frozenset[str]:
    """Functions of a file whose only statement calls a function or gives an attribute."""
    found = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if _delegates(child):
                    found.add(f"{prefix}{child.name}")
                name = f"{prefix}{child.name}.<locals>."
            elif isinstance(child, ast.ClassDef):
                name = f"{prefix}{child.name}."
            visit(child, name)

    visit(ast.parse(path.read_text()), "")
    return frozenset(found)


def _delegates(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if len(body) != 1 or not isinstance(body[0], (ast.Return, ast.Expr)):
        return False
    value = body[0].value
    if isinstance(value, ast.Await):
        value = value.value
    return isinstance(value, (ast.Call, ast.Attribute))


def table(measured: Mapping[str, Any], tokens: int) -> str:
    """The figures of a measurement."""
    before, *_ = measured["core"]
    prefill, *decodes, last = core_steps(measured)
    steady = steady_steps(decodes)
    front, core = Counts(measured["front"]), Counts(measured["core"])
    both = Counts([*measured["front"], *measured["core"]])
    title = f"One chat request of {tokens} tokens"
    return "\n".join(
        [
            f"{title:<34}{'files':>7}{'functions':>11}{'entries':>9}",
            front.row("front (server, engine's front)"),
            core.row("core (its own process)"),
            both.row("in all"),
            "",
            Counts(steady[0]).row("core, a steady decode step"),
            Counts(steady[0][:1]).row("  within EngineCore.step"),
            f"  {len(steady)} of {len(decodes)} decode steps enter exactly these functions",
            Counts([before]).row("core, before the first step"),
            Counts(prefill).row("core, prefill step"),
            Counts(last).row("core, last step, then idle"),
        ]
    )


def listing(counts: Counts, sources: Iterable[Path]) -> str:
    """The functions by file, with entries and callers."""
    lines = []
    for file in sorted(counts.files):
        path = next(source / file for source in sources if (source / file).exists())
        functions = sorted(name for where, name in counts.functions if where == file)
        lines.append(f"{file}  ({len(functions)})")
        for name in functions:
            mark = "=" if name in delegations(path) else " "
            callers = ", ".join(sorted(counts.callers[file, name])) or "-"
            lines.append(f"  {mark} {name}  x{counts.entries[file, name]}  < {callers}")
    return "\n".join(lines)


def source_folders(root: Path) -> list[Path]:
    return sorted(root.resolve().glob("packages/*/src"))


def run_measurement(root: Path, tokens: int, stream: bool) -> dict[str, Any]:
    """Measure in a process of its own, which imports the packages of ``root``."""
    sources = os.pathsep.join(map(str, source_folders(root)))
    with tempfile.TemporaryDirectory(prefix="trencadis-hops-") as folder:
        environ = {
            **os.environ,
            "PYTHONPATH": sources,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            SOURCES: sources,
            REPORT: str(Path(folder) / "core.json"),
        }
        command = [sys.executable, __file__, "--measure", folder, "--tokens", str(tokens)]
        command += ["--stream"] * stream
        subprocess.run(command, env=environ, check=True)  # noqa: S603
        return dict(json.loads((Path(folder) / "measured.json").read_text()))


def measure_here(folder: Path, tokens: int, stream: bool) -> None:
    """Measure in this process, which was started for it; write the result into ``folder``."""
    tests = runpy.run_path(str(ROOT / "packages" / "engine" / "tests" / "conftest.py"))
    model = tests["save_tiny_model"](folder / "model")
    measured = asyncio.run(measure(model, tokens, stream))
    (folder / "measured.json").write_text(json.dumps(measured))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--tokens", type=int, default=24, help="length of the answer")
    parser.add_argument("--stream", action="store_true", help="a streamed request")
    parser.add_argument("--list", action="store_true", help="list a decode step's functions")
    parser.add_argument("--list-all", action="store_true", help="list all functions, by process")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        measure_here(args.measure, args.tokens, args.stream)
        return 0
    sources = source_folders(args.root)
    if not sources:
        parser.error(f"no packages in {args.root}/packages: --root takes the top of a checkout")
    if args.tokens < 8:
        parser.error(f"--tokens {args.tokens} leaves no steady decode step: give at least 8")
    measured = run_measurement(args.root, args.tokens, args.stream)
    print(table(measured, args.tokens))
    if args.list:
        _, *decodes, _ = core_steps(measured)
        print(f"\nA steady decode step:\n{listing(Counts(steady_steps(decodes)[0]), sources)}")
    if args.list_all:
        for process in ("front", "core"):
            print(f"\n{process}:\n{listing(Counts(measured[process]), sources)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
