"""Modules that import a runtime, beside a directory with the few names of it that they import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def imported_beside(runtime: str) -> Iterator[ModuleType]:
    """``trencadis.scheduler.RUNTIME`` with the runtime of ``RUNTIME_host``; both go in the end."""
    before, directory = set(sys.modules), str(Path(__file__).parent / f"{runtime}_host")
    name = f"trencadis.scheduler.{runtime}"
    sys.path.insert(0, directory)
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(directory)
        for module in set(sys.modules) - before:
            if module.partition(".")[0] == runtime or module == name:
                del sys.modules[module]
