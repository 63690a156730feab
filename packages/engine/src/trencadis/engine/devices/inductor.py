"""Compiles programs with PyTorch's compiler, Inductor, and caches them between starts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import fx

from trencadis.engine.devices.processor import processor
from trencadis.engine.devices.program_store import ProgramStore
from trencadis.engine.errors import CompileError
from trencadis.engine.models.decoder_layers import depends_on_symbols

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

_HEADER_BYTES = 512 << 20
"""Free space from which on headers are precompiled: 150 MB, removed when no program needs them."""

_MOST_WRAPPERS = 100
"""Functions that may lie between a program and the code that was generated for it."""

_SETTINGS = {
    # A packed weight has no strides to compare; all other inputs are the engine's own.
    "size_asserts": False,
    "alignment_asserts": False,
    # Not the number of threads at the time of compilation, which may be adapted to a busy machine.
    "cpp.dynamic_threads": True,
    # Inductor would compile and load a test for each instruction set of the processor: a
    # fifth of a first start's time. It still does for AMX and for bf16 and VNNI of AVX-512. A set
    # that the compiler does not know is a `CompileError`.
    "cpp.vec_isa_ok": True,
}


_MOST_ALONE = 1 << 14
"""Numbers of a tensor up to which one thread is faster than several that have to be started."""


class InductorPrograms:
    """Compiles traced modules. ``compiled`` counts those that were not in the cache.

    Inductor's own cache is keyed by operations, shapes, dtypes, versions and processor
    (``torch/_inductor/codecache.py``), so a stored entry of another version is never used.
    """

    def __init__(self) -> None:
        self.compiled = 0
        self._store: ProgramStore | None = None
        self._is_warm = False

    def keep(self, directory: Path, *, trusted: bool) -> None:
        """Cache programs in ``directory``; see `ProgramStore`."""
        self._store = ProgramStore(directory, trusted=trusted)
        # Inductor reads it from the environment.
        os.environ[_CACHE_VARIABLE] = str(self._store.workplace)

    def is_kept(self, module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """Whether `compile` would find this program in the cache."""
        return self._store is not None and self._store.has(_key(module, inputs))

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A program for exactly the shapes of ``inputs``, which may have symbols as sizes.

        It does not check them.

        Raises `CompileError`.
        """
        store = self._store
        if store is None:
            return self._compile(module, inputs)
        key = _key(module, inputs)
        known, compiled = store.present(), self.compiled
        # What was stored needs no headers, and Inductor would compile them all the same.
        headers = None if store.fetch(key) else store.headers
        try:
            program = self._compile(module, inputs, headers)
        finally:
            if self._is_warm:
                self.drop_headers()
        # A program that holds for some sizes alone does not say so when it comes from a cache.
        if self.compiled > compiled and not depends_on_symbols(inputs):
            store.keep(key, store.present() - known)
        return program

    def drop_headers(self) -> None:
        """Remove precompiled headers: now, and from now on after each program that needed them."""
        self._is_warm = True
        if self._store is not None:
            for header in _precompiled_in(self._store.headers):
                header.unlink(missing_ok=True)

    def _compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], headers: Path | None = None
    ) -> Callable[..., Any]:
        # Imported here, because the import takes two seconds and is only needed to compile.
        import torch._inductor as inductor  # noqa: PLC0415
        from torch._dynamo.utils import counters  # noqa: PLC0415
        from torch._inductor.exc import CppCompileError, InductorError  # noqa: PLC0415

        if has_symbols := _has_symbols(inputs):
            _share_symbols(module)
        precompiles = _has_header_functions()
        settings = {**_settings(module), "cpp_cache_precompile_headers": precompiles}
        found = counters["inductor"]["fxgraph_cache_hit"]
        try:
            with _precompiled_headers(headers) if precompiles else nullcontext():
                program = inductor.standalone_compile(
                    module,
                    list(inputs),
                    dynamic_shapes="from_graph" if has_symbols else "from_example_inputs",
                    options={"config_patches": settings},
                )
        except (CppCompileError, InductorError, ImportError, OSError) as error:
            raise CompileError(_in_short(error)) from error
        if counters["inductor"]["fxgraph_cache_hit"] == found:
            self.compiled += 1
        return program


def generated_code(program: Callable[..., Any]) -> dict[str, Any] | None:
    """The names of the Python module that Inductor generated for a program, if it can be found.

    It is behind functions of PyTorch's compiler that check and pass on the arguments.
    """
    waiting: list[Any] = [program]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen or len(seen) > _MOST_WRAPPERS:
            continue
        seen.add(id(function))
        if type(function).__name__ == "CompiledFxGraph":
            call = getattr(function, "current_callable", None)
            return getattr(getattr(call, "__func__", call), "__globals__", None)
        behind = [getattr(function, name, None) for name in ("compiled_fn", "_compiled_fn")]
        for cell in getattr(function, "__closure__", None) or ():
            with suppress(ValueError):  # a cell without content
                behind.append(cell.cell_contents)
        waiting += filter(callable, behind)
    return None


def cpp_compiler_missing() -> str | None:
    """The C++ compiler, if it is missing, in words for an error message; else None."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler: install g++, or set CXX to the one to use"
    return None


def _has_header_functions() -> bool:
    """Whether this release of PyTorch has the functions that `_precompiled_headers` replaces."""
    from torch._inductor import codecache  # noqa: PLC0415

    names = ("_get_cpp_prefix_header", "_precompile_header", "_HEADER_DIR", "_HEADER_LOCK_DIR")
    has_all = all(hasattr(codecache, name) for name in names)
    return has_all and hasattr(codecache._precompile_header, "cache_clear")


@contextmanager
def _precompiled_headers(directory: Path | None) -> Generator[None, None, None]:
    """Within this context Inductor precompiles C++ headers in ``directory``, or none with None.

    All kernels include the same ones, which take most of a compiler's time. By itself Inductor
    keeps them below /tmp, in a directory that another user may have made, and precompiles them for
    programs that it has in its cache, too.
    """
    from torch._inductor import codecache  # noqa: PLC0415

    headers = codecache._get_cpp_prefix_header
    if directory is None or not _can_precompile(directory):
        codecache._get_cpp_prefix_header = lambda device: None
    elif str(directory) != codecache._HEADER_DIR or not any(_precompiled_in(directory)):
        codecache._HEADER_DIR = str(directory)
        codecache._HEADER_LOCK_DIR = str(directory / "locks")
        codecache._precompile_header.cache_clear()
    try:
        yield
    finally:
        codecache._get_cpp_prefix_header = headers


def _precompiled_in(directory: Path) -> Iterator[Path]:
    """The precompiled headers of g++ and of clang++."""
    return directory.rglob("*.[gp]ch")


def _can_precompile(directory: Path) -> bool:
    """Whether Inductor has what it needs: space, here and for its own files, and a hash command."""
    directory.mkdir(exist_ok=True)
    places = (directory, Path(tempfile.gettempdir()))
    free = min(shutil.disk_usage(place).free for place in places)
    return free >= _HEADER_BYTES and shutil.which("openssl") is not None


def _has_symbols(inputs: Sequence[Any]) -> bool:
    return any(isinstance(size, torch.SymInt) for tensor in inputs for size in tensor.shape)


def _share_symbols(module: fx.GraphModule) -> None:
    """Let the compiler note what it takes for granted with the symbols of the module's inputs.

    It looks for their environment at the results; without one, it makes another of its own
    (``torch/_inductor/standalone_compile.py``).
    """
    (output,) = module.graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]


def _in_short(error: Exception) -> str:
    """The line of an error that says the most: what the C++ compiler has written may be long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = (line for line in lines if "error:" in line or "No space" in line)
    return f"{type(error).__name__}: {next(telling, lines[0] if lines else '')}"


def _settings(module: fx.GraphModule) -> dict[str, Any]:
    """Those of a program. With ``cpp.dynamic_threads`` each loop would start threads, be it for the
    numbers of one token (``decide_parallel_depth`` in ``torch/_inductor/codegen/cpp.py``)."""
    operations = [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "aten"
    ]
    tensors = [x.meta.get("val") for node in operations for x in (node, *node.all_input_nodes)]
    if all(isinstance(x, torch.Tensor) and _is_few(x.numel()) for x in tensors):
        return {**_SETTINGS, "cpp.dynamic_threads": False, "cpp.threads": 1}
    return _SETTINGS


def _is_few(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size <= _MOST_ALONE


def _key(module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Identifies the traced layer, its shapes, the processor, PyTorch's version and settings."""
    shapes = (f"{tuple(x.shape)} {x.dtype} {x.device}" for x in inputs)
    settings = str(sorted(_settings(module).items()))
    return "\n".join((torch.__version__, processor(), settings, module.code, *shapes))
