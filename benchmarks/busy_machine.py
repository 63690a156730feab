"""Throughput on a quiet machine, and beside a process that keeps one core busy.

    nox -s peers                                     # vLLM's environment, once
    python benchmarks/busy_machine.py

32 requests of the small default model, in bf16, as in ``benchmarks/versus.py``: each engine is a
process of its own that stays loaded, and they take turns. Medians of the rounds are printed; the
first round is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

from peers import VLLM, found
from rich.console import Console
from rich.table import Table
from versus import Load, Worker

from trencadis.engine import default_model

LOAD = Load(32, 64, 96)
ENGINES = ("eager", "compile", *VLLM)
Seconds = dict[tuple[str, bool], list[float]]
"""Seconds of each round, by engine and whether a core was busy."""


def main() -> None:
    options = _options()
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(contextlib.closing(Worker(name, default_model())))
            for name in found(list(ENGINES))
        }
        seconds = measure(workers, options.rounds)
    show(seconds)


def measure(workers: Mapping[str, Worker], rounds: int) -> Seconds:
    seconds: Seconds = {(name, busy): [] for name in workers for busy in (False, True)}
    for number in range(rounds + 1):
        for name, worker in workers.items():
            for busy in (False, True):
                with neighbour(busy):
                    taken_s = worker.run(LOAD, seed=number)
                if number:
                    seconds[name, busy].append(taken_s)
    return seconds


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


def show(seconds: Seconds) -> None:
    table = Table("engine", "quiet", "one core busy", "busy / quiet", "rounds")
    for name in dict.fromkeys(name for name, _ in seconds):
        quiet, busy = seconds[name, False], seconds[name, True]
        shares = [a / b for a, b in zip(quiet, busy, strict=True)]
        speeds = [
            f"{LOAD.requests * LOAD.output / statistics.median(taken_s):.0f} tok/s"
            for taken_s in (quiet, busy)
        ]
        rounds = ", ".join(f"{share:.2f}" for share in shares)
        table.add_row(name, *speeds, f"{statistics.median(shares):.2f}", rounds)
    console = Console(width=100)
    console.print(table)
    console.print(
        f"{LOAD}; {os.cpu_count()} cores ({platform.machine()}), {time.strftime('%Y-%m-%d')}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
