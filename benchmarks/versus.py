"""This engine beside others on the CPU: same weights, dtype, prompts and greedy decoding.

    nox -s peers                                   # environments of the others, once
    python benchmarks/versus.py                    # all engines whose environments are there
    python benchmarks/versus.py --engines eager compile --rounds 3

Each engine is a process of its own that stays loaded. They take turns with each run of a load, so
that a change of the machine's speed meets all; of its runs in a round, the median counts. A round
of one run of each load warms the engines up. Prints medians, the spread of the rounds, and the
ratio to vLLM (to transformers, if vLLM is not measured); ``--plot FILE.png`` draws them.

vLLM is measured twice: as it starts by default, where it keeps one core free of computation for its
scheduler, and with threads on all cores (``vllm-all-cores``). Ratios are to the one that is faster
with a load. Weights of 8 and 4 bits have peers in ``llama-q8``, ``vllm-int8`` (both with inputs of
8 bits, too) and ``openvino-q8``, and in those of 4 bits; ``compile-q8`` and ``compile-q4`` are this
engine with llama.cpp's file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compressed_checkpoint import write_compressed
from peers import (
    LLAMA,
    OF_GGUF,
    OPENVINO,
    OURS,
    VLLM,
    VLLM_PACKED,
    environ_of,
    found,
    python_of,
)
from rich.console import Console
from rich.table import Table

from trencadis.engine import default_model

ENGINES = (*OURS, "transformers", *VLLM, *VLLM_PACKED, *LLAMA, *OPENVINO)
SETTLE_SECONDS = 2.0
"""Pause after vLLM and OpenVINO: their threads look for work in a loop after the last."""

COLOURS = (
    *("#90cdf4", "#2b6cb0", "#2f855a", "#9ae6b4"),
    *("#38a169", "#22543d", "#cbd5e0", "#a0aec0", "#4a5568", "#718096", "#1a202c"),
    *("#f6ad55", "#c05621", "#7b341e", "#d6bcfa", "#6b46c1"),
)
"""Of the engines in a plot, in their order."""


class Load(NamedTuple):
    """Requests that arrive at once; lengths in tokens. ``runs``: how often, in each round."""

    requests: int
    prompt: int
    output: int
    runs: int = 1

    def __str__(self) -> str:
        if self.output == 1:
            return f"prefill of {self.prompt}"
        return f"{self.requests} × {self.prompt} in, {self.output} out"


LOADS = (Load(32, 128, 64, 3), Load(32, 256, 128, 3), Load(1, 32, 64, 15), Load(1, 256, 1, 15))
"""The cores and the memory of a shared machine change within seconds ("Near and far cores" in
docs/performance.md), so that one run tells little, and of a short load nothing."""


def main() -> None:
    options = _options()
    model = options.model or default_model()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers: dict[str, Worker] = {}
        for name in found(options.engines):
            files = _files_of(name, model, directory)
            workers[name] = stack.enter_context(contextlib.closing(Worker(name, files)))
        seconds = measure(workers, options.rounds)
    show(seconds, {name: worker.start_s for name, worker in workers.items()})
    if options.plot:
        plot(seconds, options.plot)


def measure(
    workers: dict[str, Worker], rounds: int, loads: Sequence[Load] = LOADS
) -> dict[Load, dict[str, list[float]]]:
    seconds: dict[Load, dict[str, list[float]]] = {
        load: {name: [] for name in workers} for load in loads
    }
    for number in range(rounds + 1):
        for load in loads:
            seeds = range(100 * number, 100 * number + (load.runs if number else 1))
            taken = [take_turns(workers, load, seed) for seed in seeds]
            for name, of_rounds in seconds[load].items():
                if number:
                    of_rounds.append(statistics.median(run[name] for run in taken))
    return seconds


def take_turns(workers: dict[str, Worker], load: Load, seed: int) -> dict[str, float]:
    """The seconds of one run of a load by each engine, with the same prompts."""
    taken = {}
    for name, worker in workers.items():
        taken[name] = worker.run(load, seed)
        if name.startswith(("vllm", "openvino")):
            time.sleep(SETTLE_SECONDS)
    return taken


class Worker:
    """A process with one engine, which answers each load with the seconds that it took."""

    def __init__(
        self, name: str, model: str, max_model_len: int = 1024, state_dtype: str = "auto"
    ) -> None:
        """Start the process. llama.cpp and OpenVINO want a GGUF file.

        ``state_dtype``: of the sums of layers with a state, in this engine and vLLM.
        """
        self.name = name
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [
                *(str(python_of(name)), Path(__file__).with_name("versus_engines.py"), name, model),
                *("--max-model-len", str(max_model_len), "--state-dtype", state_dtype),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ_of(name),
        )
        self._read()  # "ready"
        self.start_s = time.perf_counter() - began

    def run(self, load: Load, seed: int) -> float:
        """The seconds of a load, with prompts of this seed."""
        assert self._process.stdin is not None
        request = [load.requests, load.prompt, load.output, seed]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("versus: "):
                return json.loads(line.removeprefix("versus: "))
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _files_of(name: str, model: str, directory: Path) -> str:
    """The model in the format that an engine is measured with."""
    if name in OF_GGUF:
        return _as_gguf(model, directory, OF_GGUF[name])
    if name in VLLM_PACKED:
        write_compressed(model, directory / name, VLLM_PACKED[name])
        return str(directory / name)
    return model


def _as_gguf(model: str, directory: Path, matrices: str) -> str:
    from gguf import GGMLQuantizationType  # noqa: PLC0415  only where llama.cpp is measured
    from llama_gguf import write_gguf  # noqa: PLC0415

    path = directory / f"{matrices}.gguf"
    write_gguf(model, path, GGMLQuantizationType[matrices])
    return str(path)


def show(seconds: dict[Load, dict[str, list[float]]], start_s: dict[str, float]) -> None:
    table = Table("engine", *map(str, seconds), "start")
    for name, start in start_s.items():
        cells = [_cell(load, name, of_engines) for load, of_engines in seconds.items()]
        table.add_row(name, *cells, f"{start:.0f} s")
    console = Console(width=160)
    console.print(table)
    console.print(
        "× is the speed relative to the faster vLLM (without vLLM to transformers), per round; "
        f"medians. {os.cpu_count()} cores ({platform.machine()}), {time.strftime('%Y-%m-%d')}"
    )


def _cell(load: Load, name: str, of_engines: Mapping[str, Sequence[float]]) -> str:
    """Median and range of the rounds, and the median of their ratios to the peer."""
    taken, peer = of_engines[name], _peer(of_engines)
    values = [t if load.output == 1 else load.requests * load.output / t for t in taken]
    unit, digits = ("s", 3) if load.output == 1 else ("tok/s", 1)
    median, low, high = statistics.median(values), min(values), max(values)
    cell = f"{median:.{digits}f} {unit} ({low:.{digits}f} to {high:.{digits}f})"
    return cell if peer is None else f"{cell}, {_speed(taken, of_engines[peer]):.2f} ×"


def plot(seconds: dict[Load, dict[str, list[float]]], path: str) -> None:
    """The speed of each engine relative to the peer, with the spread of the rounds."""
    from matplotlib.figure import Figure  # noqa: PLC0415  not needed without --plot

    names = list(next(iter(seconds.values())))
    peers = [_peer(of_engines) for of_engines in seconds.values()]
    if None in peers:
        raise SystemExit("--plot draws speeds relative to vLLM or transformers: measure one")
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        ratios = [
            [b / a for a, b in zip(of_engines[name], of_engines[str(peer)], strict=True)]
            for of_engines, peer in zip(seconds.values(), peers, strict=True)
        ]
        heights = [statistics.median(of_load) for of_load in ratios]
        where = [place + (number + 0.5) * width - 0.4 for place in range(len(ratios))]
        below = [height - min(of_load) for height, of_load in zip(heights, ratios, strict=True)]
        above = [max(of_load) - height for height, of_load in zip(heights, ratios, strict=True)]
        axes.bar(where, heights, width, yerr=(below, above), color=colour, label=name)
        for x, height, error in zip(where, heights, above, strict=True):
            top = height + error
            axes.annotate(f"{height:.2f}", (x, top), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(seconds)), [str(load) for load in seconds])
    axes.set_ylabel("speed, the faster vLLM = 1")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=80, format="png")


def _peer(of_engines: Mapping[str, Sequence[float]]) -> str | None:
    """What a load's speeds are relative to: the faster vLLM, or transformers."""
    of_vllm = [name for name in VLLM if name in of_engines]
    if of_vllm:
        return min(of_vllm, key=lambda name: statistics.median(of_engines[name]))
    return "transformers" if "transformers" in of_engines else None


def _speed(taken: Sequence[float], of_peer: Sequence[float]) -> float:
    """How many times as fast as the peer: the median of the rounds."""
    return statistics.median(b / a for a, b in zip(taken, of_peer, strict=True))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a checkpoint; the small default model if not given")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", metavar="FILE.png", help="draw the speeds (needs matplotlib)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
