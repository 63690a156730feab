"""CPU time of a decode step of the engine core, beside another checkout in the same run.

    python benchmarks/core_step.py                      # this checkout
    python benchmarks/core_step.py --root ../other      # and the ratio to another one

The model is random and tiny (2 layers of 32 wide), so that scheduling, batching, sampling and
reporting are most of the step. Each round starts one process per checkout, in turn; a process runs
on one thread and reports the 20th percentile of 400 decode steps, which other load on the machine
moves least. The other checkout runs its own copy of this file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
BATCHES = (1, 8, 64)
STEPS = 400


def measure(model: str, batch: int) -> float:
    """Seconds of CPU time of one decode step of ``batch`` sequences."""
    torch.set_num_threads(1)
    core = EngineCore(
        EngineConfig(
            model=model,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=batch,
            max_num_batched_tokens=1024,
            block_size=16,
            num_blocks=64 * 36,
            warmup="none",
        )
    )
    core.warm_up()
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + 60, ignore_eos=True)
    for number in range(batch):
        core.add(f"{number}", GenerateRequest(tuple(range(10 + number, 26 + number)), params))
    times = []
    for step in range(STEPS + 40):
        started = time.process_time()
        core.step()
        if step >= 40:
            times.append(time.process_time() - started)
    core.close()
    return statistics.quantiles(times, n=5)[0]


def make_model(directory: str) -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def run(root: Path, model: str) -> list[float]:
    """The times of every batch size, measured in a process with the sources of ``root``."""
    sources = os.pathsep.join(str(path) for path in sorted(root.glob("packages/*/src")))
    env = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
    # Its own file, because the names it calls are those of its own checkout.
    command = [sys.executable, root / "benchmarks/core_step.py", "--measure", model]
    result = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return [float(word) for word in result.stdout.split()[-len(BATCHES) :]]


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of a decode step of the engine core")
    parser.add_argument("--root", type=Path, help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(*(measure(options.measure, batch) for batch in BATCHES))
        return
    with tempfile.TemporaryDirectory() as model:
        make_model(model)
        roots = [ROOT] + ([options.root.resolve()] if options.root else [])
        rounds = [[run(root, model) for root in roots] for _ in range(options.rounds)]
    for index, batch in enumerate(BATCHES):
        times = [[figures[index] for figures in row] for row in rounds]
        own = statistics.median(row[0] for row in times)
        line = f"{batch:>3} sequences  {own * 1e6:8.1f} µs"
        if options.root:
            ratios = [row[0] / row[1] for row in times]
            other = statistics.median(row[1] for row in times)
            shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
            line += (
                f"  other {other * 1e6:8.1f} µs  ratio {statistics.median(ratios):.2f} ({shown})"
            )
        print(line)


if __name__ == "__main__":
    main()
