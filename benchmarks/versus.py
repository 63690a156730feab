"""This engine beside others on the CPU: same weights, dtype, prompts and greedy decoding.

    python benchmarks/versus.py                                    # this one, and transformers
    python benchmarks/versus.py --vllm-python .nox/peers/bin/python # and vLLM
    python benchmarks/versus.py --engines eager compile --rounds 3

Each engine is a process of its own that stays loaded; within a round they take turns, so that a
change of the machine's speed meets all. The first round is not counted. Prints medians, the spread
of the rounds, and the ratio to vLLM (to transformers, if vLLM is not measured); ``--plot FILE.png``
draws them.

The imports of each engine are in its function, because no environment has all of them.

``nox -s peers`` makes the environment for vLLM, and tells its interpreter.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

ENGINES = ("eager", "compile", "int8", "transformers", "vllm")
MAX_MODEL_LEN = 1024
SETTLE_SECONDS = 1.0
"""Pause before each load: threads of the engine before may still wait for work, in a loop."""

VLLM_MEMORY = 0.3
"""Share of the host's memory: the other engines need theirs."""


class Load(NamedTuple):
    """Requests that arrive at once; lengths in tokens."""

    requests: int
    prompt: int
    output: int

    def __str__(self) -> str:
        if self.output == 1:
            return f"prefill of {self.prompt}"
        return f"{self.requests} × {self.prompt} in, {self.output} out"


LOADS = (Load(32, 128, 64), Load(32, 256, 128), Load(1, 32, 64), Load(1, 256, 1))

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], int]
"""Generates so many tokens for each prompt; returns how many in all."""


def main() -> None:
    options = _options()
    if options.worker:
        work(options.worker, options.model)
        return
    from trencadis.engine import default_model

    model = options.model or default_model()
    names = [name for name in options.engines if name != "vllm" or options.vllm_python]
    workers: dict[str, Worker] = {}
    try:
        for name in names:
            python = options.vllm_python if name == "vllm" else sys.executable
            workers[name] = Worker(name, python, model)
        seconds = measure(workers, options.rounds)
    finally:
        for worker in workers.values():
            worker.close()
    show(seconds, {name: worker.start_s for name, worker in workers.items()})
    if options.plot:
        plot(seconds, options.plot)


def measure(workers: dict[str, Worker], rounds: int) -> dict[Load, dict[str, list[float]]]:
    seconds: dict[Load, dict[str, list[float]]] = {
        load: {name: [] for name in workers} for load in LOADS
    }
    for number in range(rounds + 1):
        for load in LOADS:
            for name, worker in workers.items():
                time.sleep(SETTLE_SECONDS)
                taken_s = worker.run(load, seed=number)
                if number:
                    seconds[load][name].append(taken_s)
    return seconds


class Worker:
    """A process with one engine, which answers each load with the seconds that it took."""

    def __init__(self, name: str, python: str, model: str) -> None:
        self.name = name
        environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        if name == "vllm":  # from its own environment alone
            environ.pop("PYTHONPATH", None)
            environ["PATH"] = os.path.dirname(python) + os.pathsep + environ.get("PATH", "")  # noqa: PTH120
        command = [python, __file__, "--worker", name, "--model", model]
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        self._read()  # "ready"
        self.start_s = time.perf_counter() - began

    def run(self, load: Load, seed: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([*load, seed]) + "\n")
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


def work(name: str, model: str) -> None:
    """Load an engine, then answer the loads on standard input."""
    import random

    generate = {"transformers": _transformers, "vllm": _vllm}.get(name)
    run = generate(model) if generate else _ours(model, name)
    print('versus: "ready"', flush=True)
    for line in sys.stdin:
        requests, prompt, output, seed = json.loads(line)
        rng = random.Random(seed)
        prompts = [[rng.randrange(100, 40_000) for _ in range(prompt)] for _ in range(requests)]
        began = time.perf_counter()
        num_tokens = run(prompts, output)
        taken_s = time.perf_counter() - began
        assert num_tokens == requests * output, f"{name}: {num_tokens} tokens"
        print(f"versus: {taken_s}", flush=True)


def _ours(model: str, name: str) -> Generate:
    from trencadis.engine import LLM, SamplingParams

    llm = LLM(
        model,
        device="cpu",
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        compile=name in ("compile", "int8"),
        quantization="int8" if name == "int8" else "none",
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, output: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        results = llm.generate(prompts, params)
        return sum(len(result.completions[0].token_ids) for result in results)

    return generate


def _transformers(model: str) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def generate(prompts: Prompts, output: int) -> int:
        ids = torch.tensor(prompts)
        out = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
        )
        return (out.shape[1] - ids.shape[1]) * len(prompts)

    return generate


def _vllm(model: str) -> Generate:
    import vllm

    llm = vllm.LLM(
        model,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        enable_prefix_caching=False,
        disable_log_stats=True,
        gpu_memory_utilization=VLLM_MEMORY,
    )

    def generate(prompts: Prompts, output: int) -> int:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        results = llm.generate(inputs, params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    return generate


def show(seconds: dict[Load, dict[str, list[float]]], start_s: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    peer = _peer(start_s)
    table = Table("load", *start_s)
    for load, of_engines in seconds.items():
        cells = []
        for taken in of_engines.values():
            values = [t if load.output == 1 else load.requests * load.output / t for t in taken]
            unit, digits = ("s", 3) if load.output == 1 else ("tok/s", 1)
            median, low, high = statistics.median(values), min(values), max(values)
            cell = f"{median:.{digits}f} {unit} ({low:.{digits}f} to {high:.{digits}f})"
            if peer in of_engines:
                cell += f", {_speed(taken, of_engines[peer]):.2f} ×"
            cells.append(cell)
        table.add_row(str(load), *cells)
    table.add_row("start", *(f"{value:.0f} s" for value in start_s.values()))
    console = Console(width=160)
    console.print(table)
    console.print(
        f"× is the speed relative to {peer}, per round; medians. bf16, {os.cpu_count()} cores "
        f"({platform.machine()}), {time.strftime('%Y-%m-%d')}"
    )


def plot(seconds: dict[Load, dict[str, list[float]]], path: str) -> None:
    """The speed of each engine relative to the peer, with the spread of the rounds."""
    from matplotlib.figure import Figure

    names = list(next(iter(seconds.values())))
    peer = _peer(names)
    if peer not in names:
        raise SystemExit("--plot draws speeds relative to vLLM or transformers: measure one")
    colours = ("#90cdf4", "#2b6cb0", "#2f855a", "#cbd5e0", "#4a5568")
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, (name, colour) in enumerate(zip(names, colours, strict=False)):
        of_loads = [of_engines[name] for of_engines in seconds.values()]
        peers = [of_engines[peer] for of_engines in seconds.values()]
        ratios = [
            [b / a for a, b in zip(*rounds, strict=True)]
            for rounds in zip(of_loads, peers, strict=True)
        ]
        heights = [statistics.median(of_load) for of_load in ratios]
        where = [place + (number + 0.5) * width - 0.4 for place in range(len(of_loads))]
        below = [height - min(of_load) for height, of_load in zip(heights, ratios, strict=True)]
        above = [max(of_load) - height for height, of_load in zip(heights, ratios, strict=True)]
        axes.bar(where, heights, width, yerr=(below, above), color=colour, label=name)
        for x, height, error in zip(where, heights, above, strict=True):
            top = height + error
            axes.annotate(f"{height:.2f}", (x, top), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(seconds)), [str(load) for load in seconds])
    axes.set_ylabel(f"speed, {peer} = 1")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=80, format="png")


def _peer(names: Collection[str]) -> str:
    return "vllm" if "vllm" in names else "transformers"


def _speed(taken: Sequence[float], of_peer: Sequence[float]) -> float:
    """How many times as fast as the peer: the median of the rounds."""
    return statistics.median(b / a for a, b in zip(taken, of_peer, strict=True))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a checkpoint; the small default model if not given")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", metavar="FILE.png", help="draw the speeds (needs matplotlib)")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
