"""Compiles programs with PyTorch's compiler, Inductor, and caches them between starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from trencadis.engine.devices.program_store import ProgramStore

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

_SETTINGS = {
    # A packed weight has no strides to compare; all other inputs are the engine's own.
    "size_asserts": False,
    "alignment_asserts": False,
    # Not the number of threads at the time of compilation, which may be adapted to a busy machine.
    "cpp.dynamic_threads": True,
}


class InductorPrograms:
    """Compiles traced modules. ``compiled`` counts those that were not in the cache.

    Inductor's own cache is keyed by operations, shapes, dtypes, versions and processor
    (``torch/_inductor/codecache.py``), so a stored entry of another version is never used.
    """

    def __init__(self) -> None:
        self.compiled = 0
        self._store: ProgramStore | None = None

    def keep(self, directory: Path) -> None:
        """Cache programs in ``directory``. Inductor reads it from the environment."""
        self._store = ProgramStore(directory)
        os.environ[_CACHE_VARIABLE] = str(self._store.workplace)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A program for exactly the shapes of ``inputs``. It does not check them."""
        store = self._store
        if store is None:
            return self._compile(module, inputs)
        key = _key(module, inputs)
        store.fetch(key)
        known, compiled = store.present(), self.compiled
        program = self._compile(module, inputs)
        if self.compiled > compiled:
            store.keep(key, store.present() - known)
        return program

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Imported here, because the import takes two seconds and is only needed to compile.
        import torch._inductor as inductor  # noqa: PLC0415
        from torch._dynamo.utils import counters  # noqa: PLC0415

        found = counters["inductor"]["fxgraph_cache_hit"]
        program = inductor.standalone_compile(
            module,
            list(inputs),
            dynamic_shapes="from_example_inputs",
            options={"config_patches": dict(_SETTINGS)},
        )
        if counters["inductor"]["fxgraph_cache_hit"] == found:
            self.compiled += 1
        return program


def cpp_compiler_missing() -> str | None:
    """The C++ compiler, if it is missing, in words for an error message; else None."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler: install g++, or set CXX to the one to use"
    return None


def _key(module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Identifies the traced layer, its shapes and the version of PyTorch."""
    shapes = (f"{tuple(x.shape)} {x.dtype} {x.device}" for x in inputs)
    return "\n".join((torch.__version__, module.code, *shapes))
