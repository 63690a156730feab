"""The core's own time of a decode step with 1, 2 and 4 ranks whose execution is empty.

    python benchmarks/rank_steps.py

32 sequences decode, the model is random and tiny, and every rank answers at once
(`empty_rank`): what is left is the core's. The same core in one process is the first row. The rows
take turns; shown are medians over the rounds of a round's median step, by the clock and by the CPU
time of the core's process, and what each rank is sent in a step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import attrs
import torch
from core_step import make_model
from empty_rank import EmptyExecutor

from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.runner.ranks import rank_processes
from trencadis.engine.runner.ranks.rank_executor import RankExecutor

SEQUENCES, PROMPT, OUTPUT = 32, 32, 90


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    rank_processes._MODULE = "empty_rank"
    with tempfile.TemporaryDirectory() as model:
        make_model(model)
        config = EngineConfig(
            model=model,
            dtype="float32",
            max_model_len=PROMPT + OUTPUT,
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=512,
            block_size=16,
            num_blocks=1 + SEQUENCES * 8,
            enable_prefix_caching=False,
            warmup="none",
            device="cpu",
        )
        cores = {0: EngineCore(config, EmptyExecutor(config))}
        for number in options.ranks:
            of_ranks = attrs.evolve(config, tensor_parallel_size=number)
            cores[number] = EngineCore(of_ranks, RankExecutor(of_ranks))
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        for core in cores.values():
            core.warm_up()
            decode(core)
        rounds = [
            {number: decode(core) for number, core in cores.items()} for _ in range(options.rounds)
        ]
        show(rounds)
        for core in cores.values():
            core.close()


def decode(core: EngineCore) -> tuple[float, float, float, float]:
    """Seconds of a decode step, of the clock and of the CPU; messages and bytes to a rank."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    for number in range(SEQUENCES):
        prompt = tuple(range(3 + number, 3 + number + PROMPT))
        core.add(f"{number}", GenerateRequest(prompt, params))
    while core.stats.num_waiting_reqs:
        core.step()
    core.step()
    sent = counted(core)
    seconds, began = [], time.process_time()
    while core.has_work:
        started = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - started)
    count = len(seconds)
    cpu = (time.process_time() - began) / count
    messages, num_bytes = (
        (after - before) / count for before, after in zip(sent, counted(core), strict=True)
    )
    return statistics.median(seconds), cpu, messages, num_bytes


def counted(core: EngineCore) -> tuple[int, int]:
    """Messages and bytes to a rank so far."""
    if not isinstance(core.executor, RankExecutor):
        return 0, 0
    return core.executor.processes.num_messages, core.executor.processes.num_bytes


def show(rounds: list[dict[int, tuple[float, float, float, float]]]) -> None:
    """Print the table, with ratios to one process of the same round."""
    print("ranks        step by the clock   CPU of the core   messages   bytes to a rank")
    for number in rounds[0]:
        cells = []
        for column in range(2):
            ratio = statistics.median(each[number][column] / each[0][column] for each in rounds)
            micros = statistics.median(each[number][column] for each in rounds) * 1e6
            cells.append(f"{micros:6.0f} µs ({ratio:.2f})")
        messages, num_bytes = (
            statistics.median(each[number][column] for each in rounds) for column in (2, 3)
        )
        name = f"{number}" if number else "no process"
        print(f"{name:<12} {cells[0]:>17} {cells[1]:>17} {messages:>10.2f} {num_bytes:>17.0f}")


if __name__ == "__main__":
    main()
