"""Programs for one shape by PyTorch's own compiler, Inductor, and its cache on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

_SETTINGS = {
    # A packed weight has no strides to compare; all other inputs are the engine's own.
    "size_asserts": False,
    "alignment_asserts": False,
}


class InductorPrograms:
    """Compiles traced modules, and counts those that no cache had.

    Inductor keys its cache by the operations, the shapes and dtypes of the inputs, the versions of
    PyTorch and of the compiler, and the processor (``torch/_inductor/codecache.py``), so that one
    directory may serve many models and survives upgrades.
    """

    def __init__(self) -> None:
        self.compiled = 0

    def keep(self, directory: Path) -> None:
        """Keep programs in ``directory``. A variable of this process is the one way to say so."""
        directory.mkdir(parents=True, exist_ok=True)
        os.environ[_CACHE_VARIABLE] = str(directory)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A callable of ``inputs`` that checks nothing: it runs for exactly their shapes."""
        # Imported here: it takes two seconds, and who does not compile need not wait for it.
        import torch._inductor as inductor  # noqa: PLC0415
        from torch._dynamo.utils import counters  # noqa: PLC0415

        known = counters["inductor"]["fxgraph_cache_hit"]
        program = inductor.standalone_compile(
            module,
            list(inputs),
            dynamic_shapes="from_example_inputs",
            options={"config_patches": dict(_SETTINGS)},
        )
        if counters["inductor"]["fxgraph_cache_hit"] == known:
            self.compiled += 1
        return program


def cpp_compiler_missing() -> str | None:
    """What there is no compiling for the CPU without; None where it is there."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler: install g++, or set CXX to the one to use"
    return None
