"""The processes that a test has started: an engine core, and those that render or prepare."""

from __future__ import annotations

import psutil
import pytest

_of_other_tests: set[psutil.Process] = set()


@pytest.fixture
def own_processes() -> None:
    """`children` are those of this test: others' may not have been collected yet, as a renderer of
    templates."""
    _of_other_tests.clear()
    _of_other_tests.update(_all())


def children() -> list[psutil.Process]:
    """The processes that the test has started and that have not ended."""
    commands = {child: _command(child) for child in _all() - _of_other_tests}
    # multiprocessing's resource tracker stays by design, for the life of this process.
    return [c for c, command in commands.items() if command and "resource_tracker" not in command]


def core_process() -> psutil.Process:
    """The process of the engine core; another one renders chat templates."""
    (core,) = (child for child in _all() - _of_other_tests if "spawn_main" in _command(child))
    return core


def _all() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _command(process: psutil.Process) -> str:
    """The command line; nothing of a process that has ended, collected or not."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie
        return ""
