"""Output tokens per second, next to transformers' ``generate``: same weights, dtype and prompts.

    nox -s bench                       # the small default model
    python benchmarks/throughput.py --model PATH_OR_HUB_ID --dtype float32

Both are timed in turn within each round, so that changes in the machine's speed affect both. The
ratio is computed per round; medians are printed.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable

import attrs
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from trencadis.engine import LLM, SamplingParams, default_model


@attrs.frozen
class Load:
    """Requests that arrive at once; lengths in tokens."""

    requests: int
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.requests} × {self.prompt} in, {self.output} out"


LOADS = (Load(32, 128, 64), Load(1, 32, 64))


def main() -> None:
    options = _options()
    transformers_logging.disable_progress_bar()
    source = options.model or default_model()
    peer = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, options.dtype)).eval()
    llm = LLM(
        source,
        dtype=options.dtype,
        max_model_len=256,
        max_num_seqs=32,
        max_num_batched_tokens=options.max_num_batched_tokens,
        compile=options.compile,
    )
    table = Table("load", "this engine", "transformers", "ratio (median)", "ratios")
    for load in LOADS:
        ours, theirs = _measure(load, llm, peer, options.rounds)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        table.add_row(
            str(load),
            f"{statistics.median(ours):.1f} tok/s",
            f"{statistics.median(theirs):.1f} tok/s",
            f"{statistics.median(ratios):.2f}",
            " ".join(f"{ratio:.2f}" for ratio in ratios),
        )
    console = Console(width=110)
    console.print(table)
    console.print(
        f"{options.dtype}, {torch.get_num_threads()} threads on {_processor()}, "
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )


def _measure(
    load: Load, llm: LLM, peer: torch.nn.Module, rounds: int
) -> tuple[list[float], list[float]]:
    """Tokens per second of both, per round; the first round is not counted."""
    torch.manual_seed(0)
    ids = torch.randint(100, 40_000, (load.requests, load.prompt))
    params = SamplingParams(temperature=0.0, max_tokens=load.output, min_tokens=load.output)

    def ours() -> None:
        results = llm.generate(ids.tolist(), params)
        assert all(len(result.completions[0].token_ids) == load.output for result in results)

    def theirs() -> None:
        out = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=load.output,
            min_new_tokens=load.output,
            do_sample=False,
        )
        assert out.shape[1] == load.prompt + load.output

    pairs = [(_rate(load, ours), _rate(load, theirs)) for _ in range(rounds + 1)]
    return [a for a, _ in pairs[1:]], [b for _, b in pairs[1:]]


def _rate(load: Load, run: Callable[[], None]) -> float:
    gc.collect()
    started = time.perf_counter()
    run()
    return load.requests * load.output / (time.perf_counter() - started)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:  # noqa: PTH123
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return f"{os.cpu_count()} × {names[0] if names else platform.processor()}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint; the small default model if not given")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument(
        "--compile", action="store_true", help="compile this engine's layers; the peer stays eager"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
