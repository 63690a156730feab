"""Run chosen tests with a changed copy of a package, in a process that has imported the rest.

Importing PyTorch and transformers takes longer than most tests. They are imported once, and each
run begins as a copy of that process, where nothing of Trencadís is imported yet.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from mutants import ROOT

IMPORTED_ONCE = ("hypothesis", "numpy", "torch", "transformers", "aiohttp", "pydantic", "attrs")
PASSED, FAILED, TIMED_OUT = "survived", "killed", "killed by the limit"


class _Selection:
    """A plugin of pytest that runs only the tests that are given, quick files first."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds
        self._of_file: dict[str, float] = {}
        for test, duration in seconds.items():
            file = test.partition("::")[0]
            self._of_file[file] = self._of_file.get(file, 0) + duration

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._seconds]
        # The tests of a file stay together, because they share its fixtures.
        items[:] = sorted(chosen, key=lambda x: self._of_file[x.nodeid.partition("::")[0]])


def import_the_rest() -> None:
    """Import what tests need beside Trencadís, where it is installed."""
    for name in IMPORTED_ONCE:
        with suppress(ImportError):
            importlib.import_module(name)


def outcome(copy: Path, seconds: Mapping[str, float], limit_s: float) -> str:
    """What comes of the tests of ``seconds`` (ids, with what each takes) on the source of ``copy``.

    They end at the first failure, or after ``limit_s``.
    """
    child = os.fork()
    if not child:
        os._exit(_run(copy, seconds))
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _end_group(child)  # what a test started and left
            return PASSED if os.waitstatus_to_exitcode(status) == 0 else FAILED
        time.sleep(0.02)
    _end_group(child)
    os.waitpid(child, 0)
    return TIMED_OUT


def _end_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _run(copy: Path, seconds: Mapping[str, float]) -> int:
    os.setpgid(0, 0)
    os.chdir(ROOT)
    with (copy / "output.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    source = str(copy / "src")
    sys.path.insert(0, source)
    os.environ["PYTHONPATH"] = os.pathsep.join((source, os.environ.get("PYTHONPATH", "")))
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(copy / "hypothesis")
    files = sorted({test.partition("::")[0] for test in seconds})
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", f"--rootdir={ROOT}"]
    code = pytest.main([*options, *files], plugins=[_Selection(seconds)])
    sys.stdout.flush()
    return int(code)
