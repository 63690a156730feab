"""Throughput on a quiet machine, and beside a process that keeps one core busy.

    python benchmarks/busy_machine.py [--rounds N] [--seconds S]

32 sequences of the small default model decode in bf16: with as many threads as there are cores, and
with threads that follow the free cores (the default). Each figure is from a process of its own; the
rounds take turns, and medians are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from trencadis.engine import EngineConfig, EngineCore, SamplingParams, default_model

SEQUENCES = 32
WARM_UP_STEPS = 40
MODES = ("adapted", "fixed")


def serve(mode: str, seconds: float) -> float:
    """Output tokens per second of a core that decodes for ``seconds``."""
    core = EngineCore(
        EngineConfig(
            model=default_model(),
            device="cpu",
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=512,
            warmup="none",
            cpu_threads=len(os.sched_getaffinity(0)) if mode == "fixed" else None,
        )
    )
    core.warm_up()
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
    for number in range(SEQUENCES):
        core.add(f"{number}", tuple(rng.randrange(100, 40_000) for _ in range(64)), params)
    for _ in range(WARM_UP_STEPS):
        core.step()
    steps, start = 0, time.monotonic()
    while time.monotonic() < start + seconds:
        core.step()
        steps += 1
    return steps * SEQUENCES / (time.monotonic() - start)


@contextlib.contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    """A process that keeps a core busy, or none."""
    if not busy:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def measure(mode: str, busy: bool, seconds: float) -> float:
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, __file__, "--serve", mode, "--seconds", f"{seconds}"]
    with neighbour(busy):
        done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--serve", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        print(serve(options.serve, options.seconds))
        return
    found: dict[tuple[str, bool], list[float]] = {}
    for _ in range(options.rounds):
        for mode in MODES:
            for busy in (False, True):
                rate = measure(mode, busy, options.seconds)
                found.setdefault((mode, busy), []).append(rate)
    table = Table("threads", "quiet", "one core busy", "busy / quiet", "rounds")
    for mode in MODES:
        quiet, busy = (statistics.median(found[mode, state]) for state in (False, True))
        rounds = ", ".join(
            f"{b / a:.2f}" for a, b in zip(found[mode, False], found[mode, True], strict=True)
        )
        table.add_row(
            mode, f"{quiet:.0f} tok/s", f"{busy:.0f} tok/s", f"{busy / quiet:.2f}", rounds
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
