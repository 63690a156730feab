"""The simulator against Intel's published throughput of Llama 3.1 8B on Gaudi 2 and Gaudi 3.

    python benchmarks/gaudi_published.py                # the cost model: an offline batch
    python benchmarks/gaudi_published.py --serve        # also this engine's scheduler (minutes)
    python benchmarks/gaudi_published.py --fit          # where the two shares come from
    python benchmarks/gaudi_published.py --plot docs/gaudi_published.png

The published rows are offline runs of optimum-habana's text generation in FP8, weights and cache
(sources: `packages/engine/tests/data/README.md`): one batch of equal prompts, all there from the
start, no scheduler. `static_batch_s` computes the same. ``--serve`` gives the same batch to a
`Simulation`, with prefill chunks, buckets, graphs, memory and the time of the host in every step,
and once more in the default mode of a Gaudi: 34 programs and two launches, overlapped by the host.
Both read a cache of FP8 and multiply in bf16, as this engine does.

Two shares of the peaks have no source and are the same for all rows. ``--fit`` finds them from the
rows of Llama 2 7B alone; the rows of Llama 3.1 8B are not used. Models of 70B on 2 and 8 cards have
one more such figure, the time of a collective: nine rows give it, six others check it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from trencadis.bucketing import AxisConfig, Bucket, BucketingConfig, write_bucket_file
from trencadis.engine.simulated import (
    CostModel,
    Hardware,
    ModelShape,
    Simulation,
    SimulationConfig,
    SimulationReport,
    Workload,
    find_hardware,
    read_model_shape,
    report_of,
    static_batch_s,
)
from trencadis.warmup import WarmupConfig

DATA = Path(__file__).parent.parent / "packages" / "engine" / "tests" / "data"
BLOCK = 128
"""Tokens per KV block, and the step of optimum-habana's cache buckets (``--bucket_size 128``)."""

PREFILL_TOKENS = 65536
"""Prompt tokens of one step with ``--serve``: more does not fit beside the largest cache."""

Row = dict[str, str]


def published(use: str) -> list[Row]:
    with (DATA / "gaudi_published.csv").open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["use"] == use]


def sizes(row: Row) -> tuple[int, int, int]:
    """Sequences, tokens of each prompt, tokens of each output."""
    return int(row["batch"]), int(row["prompt"]), int(row["output"])


def model_of(row: Row) -> ModelShape:
    fp8 = row["precision"] == "fp8"
    model = read_model_shape(DATA / f"{row['model']}.json")
    return model.quantized(matrices=fp8, kv_cache=fp8, attention=fp8)


def costs_of(row: Row, hardware: Hardware | None = None, block: int = BLOCK) -> CostModel:
    ranks = int(row["ranks"])
    model = model_of(row).divided(ranks)
    return CostModel(model, hardware or find_hardware(row["device"]), block, num_ranks=ranks)


def offline(row: Row, hardware: Hardware | None = None) -> float:
    """Tokens per second of the offline batch."""
    costs = costs_of(row, hardware)
    batch, prompt, output = sizes(row)
    return batch * output / static_batch_s(costs, batch, prompt, output)


def whole_cache(row: Row) -> float:
    """As `offline`, if every decode step reads the cache up to its end."""
    batch, prompt, output = sizes(row)
    costs = costs_of(row, block=prompt + output)
    return batch * output / static_batch_s(costs, batch, prompt, output)


def serve(row: Row, *, default_mode: bool = False) -> SimulationReport:
    """The same batch with the engine's scheduler, buckets, graphs and memory.

    ``default_mode``: programs in place of graphs, and asynchronous scheduling, as on a Gaudi.
    """
    batch, prompt, output = sizes(row)
    workload = Workload(np.zeros(batch), np.full(batch, prompt), np.full(batch, output))
    longest = math.ceil((prompt + output) / BLOCK)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "buckets.txt"
        # Decode: the whole batch, in steps of one block per sequence. The prefix of the cache has
        # the padding block, too.
        decode = [
            Bucket(("batch", "blocks"), (batch, batch * n + 1)) for n in range(1, longest + 1)
        ]
        write_bucket_file(file, decode=decode)
        config = SimulationConfig(
            device=row["device"],
            quantization="inc" if row["precision"] == "fp8" else "none",
            kv_cache_dtype="fp8_inc" if row["precision"] == "fp8" else "auto",
            max_model_len=prompt + output,
            max_num_seqs=batch,
            max_num_batched_tokens=PREFILL_TOKENS + batch,
            max_waiting=batch,
            block_size=BLOCK,
            # The scheduler admits nobody into the last 1 % of the cache.
            num_blocks=batch * longest * 51 // 50,
            gpu_memory_utilization=1.0,
            swap_space=0,
            compile=default_mode,
            async_scheduling=default_mode,
            bucketing=BucketingConfig(
                bucket_file=str(file), prompt_batch=AxisConfig(max=PREFILL_TOKENS // prompt)
            ),
            warmup=WarmupConfig(graph_reserved_mem=0.05, graph_prompt_ratio=0.0),
        )
        simulation = Simulation(config, read_model_shape(DATA / f"{row['model']}.json"), workload)
        warmup = simulation.warm_up()
        for _ in simulation.serve():
            pass
    return report_of(simulation, warmup)


def table(rows: Sequence[Row], *, served: bool) -> str:
    """Markdown: published and simulated tokens per second, and their ratio."""
    heads = ["device", "cards", "in/out", "batch", "published", "offline", "ratio", "whole cache"]
    if served:
        heads += ["served", "ratio", "steps", "host", "default mode", "ratio"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        target, found = float(row["tokens_per_s"]), offline(row)
        cells = [
            row["device"],
            row["ranks"],
            f"{row['prompt']}/{row['output']}",
            row["batch"],
            f"{target:,.0f}",
            f"{found:,.0f}",
            f"{found / target:.2f}",
            f"{whole_cache(row) / target:.2f}",
        ]
        if served:
            report = serve(row)
            cells += [
                f"{report.tokens_per_s:,.0f}",
                f"{report.tokens_per_s / target:.2f}",
                f"{report.steps:,}",
                f"{report.times.host_s / report.times.total_s:.0%}",
            ]
            tokens_per_s = serve(row, default_mode=True).tokens_per_s
            cells += [f"{tokens_per_s:,.0f}", f"{tokens_per_s / target:.2f}"]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fit(rows: Sequence[Row]) -> tuple[float, float, float]:
    """The shares of compute and bandwidth with the least squares of log ratios, and the RMS."""

    def error(shares: tuple[float, float]) -> float:
        total = 0.0
        for row in rows:
            hardware = attrs.evolve(
                find_hardware(row["device"]),
                compute_efficiency=shares[0],
                hbm_efficiency=shares[1],
            )
            total += math.log(offline(row, hardware) / float(row["tokens_per_s"])) ** 2
        return total

    ranges = (np.arange(0.60, 0.765, 0.01), np.arange(0.68, 0.85, 0.01))
    best = min(itertools.product(*(axis.tolist() for axis in ranges)), key=error)
    return (*best, math.sqrt(error(best) / len(rows)))


def fit_collective(rows: Sequence[Row]) -> tuple[float, float]:
    """Seconds of a collective with the least squares of log ratios, and the RMS."""

    def error(seconds: float) -> float:
        total = 0.0
        for row in rows:
            hardware = attrs.evolve(find_hardware(row["device"]), collective_s=seconds)
            total += math.log(offline(row, hardware) / float(row["tokens_per_s"])) ** 2
        return total

    best = min((n * 10e-6 for n in range(13)), key=error)
    return best, math.sqrt(error(best) / len(rows))


def plot(rows: Sequence[Row], path: str) -> None:
    """Bars of the published and the simulated throughput, with their ratio."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, device in zip(figure.subplots(1, 2), ("gaudi2", "gaudi3"), strict=True):
        own = [row for row in rows if row["device"] == device]
        targets = [float(row["tokens_per_s"]) for row in own]
        found = [offline(row) for row in own]
        where = np.arange(len(own))
        axes.bar(where - 0.2, targets, 0.4, color="#9aa0a6", label="published")
        axes.bar(where + 0.2, found, 0.4, color="#2b6cb0", label="simulated")
        for x, target, value in zip(where, targets, found, strict=True):
            axes.annotate(f"{value / target:.2f}", (x + 0.2, value), ha="center", va="bottom")
        axes.set_xticks(where, [f"{r['prompt']}/{r['output']}\n{r['batch']}" for r in own])
        axes.set(title=device, ylabel="output tokens/s")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.suptitle("Llama 3.1 8B in FP8, by input/output tokens and batch; ratio to published")
    figure.savefig(path, dpi=80, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description="The simulator against Intel's published tables")
    parser.add_argument("--serve", action="store_true", help="also with the engine's scheduler")
    parser.add_argument("--fit", action="store_true", help="fit the two shares to Llama 2 7B")
    parser.add_argument("--plot", metavar="FILE.png", help="draw published and simulated figures")
    options = parser.parse_args()
    if options.fit:
        compute, hbm, rms = fit(published("fit"))
        print(f"compute {compute:.2f}, bandwidth {hbm:.2f}: {rms:.1%} RMS on Llama 2 7B")
        print(table(published("fit"), served=False))
        seconds, rms = fit_collective(published("fit_ranks"))
        print(f"\na collective {seconds * 1e6:.0f} us: {rms:.1%} RMS on models of 70B")
        print(table(published("fit_ranks"), served=False))
        print()
    rows = published("check")
    print(table(rows, served=options.serve))
    rows += published("check_ranks")
    print(f"\n{table(published('check_ranks'), served=False)}\n")
    ratios = [offline(row) / float(row["tokens_per_s"]) for row in rows]
    print(f"within 20 %: {sum(abs(ratio - 1) <= 0.2 for ratio in ratios)} of {len(ratios)}")
    if options.plot:
        plot(published("check"), options.plot)


if __name__ == "__main__":
    main()
