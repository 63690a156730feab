"""CPU time of sampling one step: the host's sampler beside the device's, in one run.

    python benchmarks/sampler.py                     # 32 rows, 128,256 tokens
    python benchmarks/sampler.py --root ../other     # and beside another checkout's host sampler

The device's sampler runs its static shapes on the CPU here, so its time says nothing of an
accelerator: it says why the CPU keeps the host's. Logits are normal numbers of deviation 2.5, with
50 tokens raised by 14: most of the probability is on a few tokens, as in a language model's.
``top_p, flat`` has temperature 2, where the nucleus is thousands of tokens.

Each round measures both, each after a run that warms it up; medians of the rounds and the median of
the ratios are shown. It is CPU time, which other load on the machine moves less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from trencadis.engine import SamplingParams
from trencadis.engine.runner.step import RowRequest, SampleSettings

ROOT = Path(__file__).resolve().parent.parent
WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(),
    "top_p": SamplingParams(top_p=0.9),
    "top_p, flat": SamplingParams(top_p=0.9, temperature=2.0),
    "top_k and top_p": SamplingParams(top_k=50, top_p=0.9),
    "penalty": SamplingParams(temperature=0.0, repetition_penalty=1.1),
}


def make_logits(rows: int, vocabulary: int) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 2.5
    logits[:, :50] += 14.0
    return logits


def make_requests(params: SamplingParams, rows: int) -> list[RowRequest]:
    histories = [(*range(seed, 500 + seed), 1, 2) for seed in range(rows)]
    return [
        RowRequest(502, (SampleSettings.of(params, seed, history, 500),))
        for seed, history in enumerate(histories)
    ]


def host_sampler(params: SamplingParams, rows: int) -> Callable[[torch.Tensor], object]:
    """The host's `sample`; another checkout has to make its rows in the same way."""
    sampler: Any = import_module("trencadis.engine.runner.sampler")
    requests = make_requests(params, rows)
    return lambda logits: sampler.sample(logits, requests)


def device_sampler(
    params: SamplingParams, rows: int, vocabulary: int
) -> Callable[[torch.Tensor], object]:
    # By name, because another checkout may have no such module.
    module: Any = import_module("trencadis.engine.runner.device_sampler")
    sampler = module.DeviceSampler(
        import_module("trencadis.engine.devices").CPUDevice(), vocabulary
    )
    requests = make_requests(params, rows)

    def sample(logits: torch.Tensor) -> object:
        words = torch.from_numpy(sampler.words(requests, rows))
        pending = sampler.launch(logits, words, requests)
        return pending.read(pending.outputs)

    return sample


def seconds(call: Callable[[torch.Tensor], object], logits: torch.Tensor) -> float:
    call(logits)
    began = time.process_time()
    call(logits)
    return time.process_time() - began


@torch.inference_mode()
def measure(rows: int, vocabulary: int, *, device: bool) -> list[float]:
    """Seconds of CPU time of every way: the host's, and the device's where asked for."""
    logits = make_logits(rows, vocabulary)
    found = []
    for params in WAYS.values():
        found.append(seconds(host_sampler(params, rows), logits))
        if device:
            found.append(seconds(device_sampler(params, rows, vocabulary), logits))
    return found


def measure_elsewhere(root: Path, rows: int, vocabulary: int) -> list[float]:
    sources = os.pathsep.join(str(path) for path in sorted(root.glob("packages/*/src")))
    env = {**os.environ, "PYTHONPATH": sources}
    command = [sys.executable, __file__, "--measure", f"{rows},{vocabulary}"]
    result = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return [float(word) for word in result.stdout.split()[-len(WAYS) :]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of sampling one step on this CPU")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, help="another checkout, to compare with")
    parser.add_argument("--measure", metavar="ROWS,VOCABULARY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(*measure(*map(int, options.measure.split(",")), device=False))
        return
    shape = options.rows, options.vocabulary
    rounds = [measure(*shape, device=True) for _ in range(options.rounds)]
    others = [
        measure_elsewhere(options.root.resolve(), *shape)
        for _ in range(options.rounds if options.root else 0)
    ]
    for index, name in enumerate(WAYS):
        pairs = [(row[2 * index], row[2 * index + 1]) for row in rounds]
        host, on_device = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(there / here for here, there in pairs)
        line = f"{name:<16} host {host * 1e3:7.1f} ms  device {on_device * 1e3:7.1f} ms"
        line += f"  device/host {ratio:5.1f}"
        if others:
            other = statistics.median(row[index] for row in others)
            ratio = statistics.median(
                row[index] / pair[0] for row, pair in zip(others, pairs, strict=True)
            )
            line += f"  other host {other * 1e3:7.1f} ms  other/host {ratio:5.1f}"
        print(line)


if __name__ == "__main__":
    main()
