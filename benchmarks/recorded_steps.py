"""Decode steps that replay their native calls, beside the same steps computed by programs.

    python benchmarks/recorded_steps.py
    python benchmarks/recorded_steps.py --quantization int8 --rounds 7

Two engines with ``--compile`` in one process, of the small default model in bf16, take turns: one
does not record. Prints the time of a step, the median of the rounds, by number of sequences. The
prompts have 32 tokens; the first round is not counted. Both must generate the same tokens.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time

from rich.console import Console
from rich.table import Table

from trencadis.engine import LLM, SamplingParams, default_model
from trencadis.engine.devices import CPUDevice

SEQUENCES = (1, 2, 4, 8, 16, 32)
PROMPT, OUTPUT = 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quantization", default="none", choices=("none", "int8"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    recording = engine(options.quantization)
    records = CPUDevice.record_layers
    CPUDevice.record_layers = lambda self, run, programs, own: run  # type: ignore[method-assign]
    engines = {"programs": engine(options.quantization), "recorded": recording}
    CPUDevice.record_layers = records  # type: ignore[method-assign]
    table = Table("sequences", *engines, "programs / recorded (rounds)")
    for count in SEQUENCES:
        steps: dict[str, list[float]] = {name: [] for name in engines}
        for seed in range(options.rounds + 1):
            tokens = []
            for name, llm in engines.items():
                step_ms, generated = generate(llm, count, seed)
                tokens.append(generated)
                if seed:
                    steps[name].append(step_ms)
            assert tokens[0] == tokens[1], "the engines generate different tokens"
        ratios = sorted(a / b for a, b in zip(*steps.values(), strict=True))
        medians = [f"{statistics.median(of_engine):.1f} ms" for of_engine in steps.values()]
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        table.add_row(str(count), *medians, ratio)
    console = Console(width=100)
    console.print(table)
    console.print(f"{os.cpu_count()} cores ({platform.machine()}), {time.strftime('%Y-%m-%d')}")


def engine(quantization: str) -> LLM:
    return LLM(
        default_model(),
        device="cpu",
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=32,
        compile=True,
        quantization=quantization,
        enable_prefix_caching=False,
    )


def generate(llm: LLM, count: int, seed: int) -> tuple[float, list[list[int]]]:
    """Milliseconds of a decode step, prefill apart, and the tokens."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(100, 40_000) for _ in range(PROMPT)] for _ in range(count)]
    seconds = []
    results = []
    for output in (1, 1 + OUTPUT):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        began = time.perf_counter()
        results = llm.generate(prompts, params)
        seconds.append(time.perf_counter() - began)
    tokens = [list(result.completions[0].token_ids) for result in results]
    return (seconds[1] - seconds[0]) / OUTPUT * 1e3, tokens


if __name__ == "__main__":
    main()
