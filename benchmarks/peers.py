"""The engines that benchmarks compare with, each in an environment of its own.

``nox -s peers`` makes the environments; an engine whose environment is not there is left out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENVIRONMENTS = Path(__file__).parents[1] / ".nox"

OURS_OF_GGUF = {"compile-q8": "Q8_0", "compile-q4": "Q4_0"}
"""This engine with the files that the others are given."""

OURS = ("eager", "compile", "int8", "int4", *OURS_OF_GGUF)
VLLM = ("vllm", "vllm-all-cores")
"""By default vLLM computes on all cores but one, which its scheduler keeps: of two cores on one."""

VLLM_PACKED = {"vllm-int8": 8, "vllm-int4": 4}
"""Bits of linear layers' weights; with 8 bits their inputs have 8, too. On all cores."""

LLAMA = {"llama": "BF16", "llama-q8": "Q8_0", "llama-q4": "Q4_0"}
OPENVINO = {"openvino-q8": "Q8_0", "openvino-q4": "Q4_0"}
"""The types of the matrices in GGUF, by name of llama.cpp and of OpenVINO."""

OF_GGUF = LLAMA | OPENVINO | OURS_OF_GGUF


def python_of(engine: str) -> str | None:
    """The interpreter that has this engine, or None."""
    if engine in OURS or engine == "transformers":
        return sys.executable
    family = engine.partition("-")[0]
    name = "llama-cpp" if family == "llama" else family
    python = ENVIRONMENTS / f"peers-{name}" / "bin" / "python"
    return str(python) if python.exists() else None


def found(engines: list[str]) -> list[str]:
    """The engines whose environment is there; says which are not."""
    missing = [name for name in engines if python_of(name) is None]
    if missing:
        print(f"without {', '.join(missing)}: `nox -s peers` makes the environments")
    return [name for name in engines if name not in missing]


def environ_of(engine: str) -> dict[str, str]:
    """The variables of a process with this engine: no number of threads, and no other engine's."""
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    if engine in OURS or engine == "transformers":
        return environ
    environ.pop("PYTHONPATH", None)
    python = Path(str(python_of(engine)))
    environ["PATH"] = f"{python.parent}{os.pathsep}{environ.get('PATH', '')}"
    if engine.startswith("vllm"):
        environ |= _vllm_environ(engine, python)
    return environ


def _vllm_environ(engine: str, python: Path) -> dict[str, str]:
    """What vLLM's documentation advises for speed: its OpenMP library, loaded before others."""
    environ = {}
    library = python.parents[1] / "lib" / "libiomp5.so"
    if library.exists():
        environ["LD_PRELOAD"] = str(library)
    if engine != "vllm":
        cores = sorted(os.sched_getaffinity(0))
        environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    return environ
