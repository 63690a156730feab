"""Buckets learned from traffic beside `exp` and `pad`, at equal numbers of graphs.

    python benchmarks/learned_buckets.py [--device gaudi3] [--minutes 10] [--rate 1.0]

The simulator serves the Azure conversation trace of 2023 (`benchmarks/data`) with Llama 3.1 8B. The
first half of the time is served with `exp`, and the shapes of its batches are recorded as a server
with ``--bucketing learn`` does. The grids are then judged on the other half, which no fit has seen:
`exp`, `pad`, and for each a fit to the first half with at most as many buckets in each phase.

Padding is relative to the real size: of prompts in tokens, of decodes in rows times blocks. Warm-up
is the simulator's estimate of compiling and capturing every bucket. All are figures of the
simulator: only the shapes are those that a server would have.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np

from trencadis.bucketing import AxisConfig, BucketGrid, BucketingConfig, TrafficRecorder
from trencadis.engine.runner.learned_grids import fitted_config
from trencadis.engine.runner.recorded_traffic import decode_file
from trencadis.engine.simulated import (
    ModelShape,
    Simulation,
    SimulationConfig,
    Workload,
    report_of,
)
from trencadis.warmup import Phase

DATA = Path(__file__).parent / "data" / "azure_2023.npz"
MAX_MODEL_LEN = 16_384
MOST_SIZES = 64
"""The largest limit of an axis that is tried for a fit."""

LLAMA_8B = ModelShape(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    tied=False,
    dtype_bytes=2,
    max_position_embeddings=131072,
)


@attrs.frozen
class Row:
    """What one grid costs. Padding relative to the real size, times in seconds."""

    name: str
    prompt_buckets: int
    decode_buckets: int
    prompt_padding: float
    decode_padding: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p99_s: float
    tokens_per_s: float
    warmup_s: float


def requests(begin_s: float, end_s: float, rate: float) -> Workload:
    """The conversations that arrive within a part of the trace, ``rate`` times as fast."""
    with np.load(DATA) as arrays:
        arrivals = arrays["conv_arrivals_ms"] / 1000
        part = slice(*np.searchsorted(arrivals, (begin_s * rate, end_s * rate)).tolist())
        prompts = arrays["conv_lengths"][part].astype(np.int64)
        outputs = np.maximum(arrays["conv_outputs"][part].astype(np.int64), 1)
        arrivals = (arrivals[part] - arrivals[part][0]) / rate
    outputs = np.minimum(outputs, 2000)
    return Workload(arrivals, np.minimum(prompts, MAX_MODEL_LEN - outputs), outputs)


class Served:
    """One run of the simulator, with the shapes of all batches before padding."""

    def __init__(self, device: str, buckets: BucketingConfig, workload: Workload) -> None:
        config = SimulationConfig(
            device=device, bucketing=buckets, max_model_len=MAX_MODEL_LEN, max_waiting=100_000
        )
        self.simulation = simulation = Simulation(config, LLAMA_8B, workload)
        self.grids = {Phase.PROMPT: simulation.grids.prompt, Phase.DECODE: simulation.grids.decode}
        self.traffic = {phase: TrafficRecorder(grid.axes) for phase, grid in self.grids.items()}
        self.warmup = simulation.warm_up()
        bucket = simulation.runner._bucket

        def recorded(grid: BucketGrid, shape: tuple[int, ...]) -> object:
            phase = Phase.DECODE if grid is self.grids[Phase.DECODE] else Phase.PROMPT
            self.traffic[phase].record(shape)
            return bucket(grid, shape)

        simulation.runner._bucket = recorded  # type: ignore[assignment, method-assign]
        for _ in simulation.serve():
            pass

    def row(self, name: str) -> Row:
        report = report_of(self.simulation, self.warmup)
        return Row(
            name,
            *(len(grid) for grid in self.grids.values()),
            report.prompt_padding,
            self._decode_padding(),
            report.first_token_s.p50,
            report.first_token_s.p99,
            report.between_tokens_s.p99,
            report.tokens_per_s,
            report.warmup_s,
        )

    def _decode_padding(self) -> float:
        grid, (shapes, counts) = self.grids[Phase.DECODE], self.traffic[Phase.DECODE].shapes()
        buckets = np.array(
            [(grid.find(shape) or grid.fallback(shape)).shape for shape in shapes.tolist()]
        )
        return float(counts @ buckets.prod(axis=1) / (counts @ shapes.prod(axis=1)) - 1)


def learned(train: Served, rival: Served, directory: Path) -> BucketingConfig:
    """The fit to ``train`` with at most as many buckets in each phase as the grids of ``rival``."""
    path = directory / "traffic.json"
    train.traffic[Phase.PROMPT].save(path)
    train.traffic[Phase.DECODE].save(decode_file(path))
    config = fitted_config(BucketingConfig(), path)

    def with_sizes(prompt: int, decode: int) -> BucketingConfig:
        return attrs.evolve(
            config,
            prompt_query=AxisConfig(limit=prompt),
            decode_blocks=AxisConfig(limit=decode),
        )

    def most(phase: Phase, config_of: Callable[[int], BucketingConfig]) -> int:
        allowed = len(rival.grids[phase])
        low, high = 1, MOST_SIZES
        while low < high:
            middle = (low + high + 1) // 2
            if _num_buckets(train, phase, config_of(middle)) <= allowed:
                low = middle
            else:
                high = middle - 1
        return low

    return with_sizes(
        most(Phase.PROMPT, lambda size: with_sizes(size, 1)),
        most(Phase.DECODE, lambda size: with_sizes(1, size)),
    )


def _num_buckets(train: Served, phase: Phase, buckets: BucketingConfig) -> int:
    """Buckets of a phase under the limits of a simulation."""
    config = attrs.evolve(train.simulation.config, bucketing=buckets)
    grids = Simulation(config, LLAMA_8B, train.simulation.workload).grids
    return len(grids.prompt if phase is Phase.PROMPT else grids.decode)


def main() -> None:
    """Print the table as Markdown."""
    options = _options()
    began, seconds = time.process_time(), options.minutes * 60
    train = Served(
        options.device, BucketingConfig(strategy="exp"), requests(0, seconds, options.rate)
    )
    held_out = requests(seconds, 2 * seconds, options.rate)
    print(
        "| buckets | prompt + decode | padding of prompts | of decodes | TTFT p50 | p99 "
        "| ITL p99 | warm-up |\n|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    for strategy in ("exp", "pad"):
        rival = Served(options.device, BucketingConfig(strategy=strategy), held_out)
        show(rival.row(f"`{strategy}`"))
        with tempfile.TemporaryDirectory() as directory:
            buckets = learned(train, rival, Path(directory))
            show(Served(options.device, buckets, held_out).row(f"learned, as many as `{strategy}`"))
    print(f"\n{len(held_out):,} requests held out, {time.process_time() - began:.0f} s of CPU")


def show(row: Row) -> None:
    print(
        f"| {row.name} | {row.prompt_buckets:,} + {row.decode_buckets:,} "
        f"| {row.prompt_padding:.1%} | {row.decode_padding:.1%} | {row.ttft_p50_s * 1e3:.0f} ms "
        f"| {row.ttft_p99_s * 1e3:.0f} ms | {row.itl_p99_s * 1e3:.1f} ms | {row.warmup_s:.0f} s |",
        flush=True,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="gaudi3")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=1.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
