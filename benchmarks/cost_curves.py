"""What a decode step costs on the CPU, by batch and context, beside what the machine allows.

    python benchmarks/cost_curves.py --plot docs/cost_curves.png       # compiled, bf16
    python benchmarks/cost_curves.py --engine int8 --batches 1 8 32    # int8 weights

A step decodes one token for each sequence of a batch of equal contexts: the batch is built, run
and sampled, and nothing is scheduled. Beside it stand two lines: the bytes that it has to read
(weights, keys and values) by the bandwidth that a sum over a large array reaches, and its products
by the rate of the engine's own kernel on inputs that stay in the caches.

Then the engine serves 32 sequences, and what a step takes besides its forward pass is shown for
several numbers of requests that wait. Times are medians. Takes about three minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from trencadis.engine import EngineConfig, EngineCore, SamplingParams, default_model
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.devices.cpu.tiled_linear import TiledLinear, load_linear_kernel
from trencadis.engine.models.loader import num_weight_bytes
from trencadis.engine.runner.step import RowRequest, SampleSettings, StepInput
from trencadis.kvcache import CopyPlan
from trencadis.scheduler import ScheduledSequence

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 8192)
MOST_TOKENS = 1 << 16
"""Tokens in the KV cache at once: 1.5 GB for SmolLM2-135M. Larger steps are left out."""

STEP_SECONDS = 1.0
"""Time for the steps of one batch and context, but at least `FEWEST` steps."""

FEWEST = 5
RUNNING = 32
WAITING = (0, 1_000, 10_000)
SERVED_STEPS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)


class Machine(NamedTuple):
    """What the machine reaches: bytes and floating-point operations per second."""

    bandwidth: float
    rate: float


class Work(NamedTuple):
    """What a step has to read and to compute; see `bounds`."""

    weight_bytes: int
    bytes_per_token: int
    products: int
    products_per_token: int

    def bounds(self, machine: Machine, batch: int, context: int) -> tuple[float, float]:
        """Seconds of a step by its bytes, and by its products of two operations each."""
        tokens = batch * context
        read = self.weight_bytes + tokens * self.bytes_per_token
        products = batch * self.products + tokens * self.products_per_token
        return read / machine.bandwidth, 2 * products / machine.rate


class Overhead(NamedTuple):
    """Median seconds of a served step, and of these outside of its forward pass."""

    waiting: int
    step_s: float
    outside_s: float


Steps = dict[tuple[int, int], float]
"""Seconds of a step by batch and context."""


def main() -> None:
    options = _options()
    model = options.model or default_model()
    machine = measure_machine()
    core = start(model, options.engine, max(options.batches), max(options.contexts))
    work = work_of(core)
    steps = measure_steps(core, options.batches, options.contexts)
    core.close()
    del core
    overheads = measure_overheads(model, options.engine, options.waiting)
    show(steps, work, machine, overheads, options.engine)
    if options.plot:
        plot(steps, work, machine, overheads, options.plot)


def start(model: str, engine: str, batch: int, context: int) -> EngineCore:
    core = EngineCore(
        EngineConfig(
            model=model,
            device="cpu",
            dtype="bfloat16",
            max_model_len=context,
            max_num_seqs=batch,
            num_blocks=MOST_TOKENS // 32 + batch + 2,
            kv_cache_memory=1 << 33,
            block_size=32,
            max_waiting=max(WAITING) + RUNNING,
            compile=engine != "eager",
            quantization="int8" if engine == "int8" else "none",
            enable_prefix_caching=False,
        )
    )
    core.warm_up()
    return core


def measure_machine() -> Machine:
    """The bandwidth of a sum, and the rate of products whose inputs stay in the caches."""
    held = torch.ones(1 << 26)
    bandwidth = held.nbytes / _least(held.sum)
    layer, rows = nn.Linear(576, 1536, bias=False).bfloat16(), torch.ones(448, 576).bfloat16()
    try:
        load_linear_kernel()
        computed: nn.Module = TiledLinear(layer)
    except NoKernel:
        computed = layer
    with torch.inference_mode():
        rate = 2 * rows.shape[0] * layer.weight.numel() / _least(lambda: computed(rows))
    return Machine(bandwidth, rate)


def _least(run: Callable[[], object]) -> float:
    times = []
    for _ in range(12):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def work_of(core: EngineCore) -> Work:
    """What the model's linear layers and its attention have to read and to compute."""
    model: Any = core.executor.worker.runner.forward_runner._model
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    linears = [module for module in model.modules() if hasattr(module, "out_features")]
    return Work(
        weight_bytes=num_weight_bytes(model) - sum(weight.nbytes for weight in embeddings),
        bytes_per_token=core.facts.block_bytes // core.config.block_size,
        products=sum(module.in_features * module.out_features for module in linears),
        products_per_token=sum(
            layer.heads * (layer.key_width + layer.value_width) for layer in core.spec.layers
        ),
    )


def measure_steps(core: EngineCore, batches: Sequence[int], contexts: Sequence[int]) -> Steps:
    return {
        (batch, context): decode(core, batch, context)
        for context in contexts
        for batch in batches
        if batch * context <= MOST_TOKENS
    }


def decode(core: EngineCore, batch: int, context: int) -> float:
    """Median seconds of a step whose sequences have ``context`` tokens, the new one included."""
    per_sequence = -(-context // core.config.block_size)
    decodes = tuple(
        ScheduledSequence(
            row,
            context - 1,
            (100 + row,),
            np.arange(1 + row * per_sequence, 1 + (row + 1) * per_sequence, dtype=np.int32),
            samples=True,
        )
        for row in range(batch)
    )
    asked = RowRequest(context, (SampleSettings(GREEDY, 0, 1),))
    step = StepInput(0, (), decodes, CopyPlan(), {decoded.seq_id: asked for decoded in decodes})
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < FEWEST + 2 or time.perf_counter() - began < STEP_SECONDS:
        started = time.perf_counter()
        core.executor.execute(step).wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def measure_overheads(model: str, engine: str, waiting: Sequence[int]) -> list[Overhead]:
    """What steps of `RUNNING` sequences take outside of the forward pass, while others wait."""
    core = start(model, engine, RUNNING, 1024)
    forward = core.executor.worker.runner.forward_runner
    compute, computing = forward.run, [0.0]

    def timed(batch: Any) -> Any:
        began = time.perf_counter()
        result = compute(batch)
        computing[0] += time.perf_counter() - began
        return result

    forward.run = timed  # type: ignore[method-assign]
    rng = random.Random(0)

    def add(count: int, name: str) -> None:
        for number in range(count):
            prompt = tuple(rng.randrange(100, 40_000) for _ in range(64))
            core.add(f"{name}-{number}", prompt, GREEDY)

    add(RUNNING, "running")
    while core.stats.num_generation_tokens < 2 * RUNNING:
        core.step()
    found, added = [], 0
    for count in waiting:
        add(count - added, f"waiting-{count}")
        added = count
        steps, outside = [], []
        for _ in range(SERVED_STEPS):
            computing[0] = 0.0
            began = time.perf_counter()
            core.step()
            steps.append(time.perf_counter() - began)
            outside.append(steps[-1] - computing[0])
        found.append(Overhead(count, statistics.median(steps), statistics.median(outside)))
    core.abort_all()
    core.close()
    return found


def show(
    steps: Steps, work: Work, machine: Machine, overheads: Sequence[Overhead], engine: str
) -> None:
    console = Console(width=120)
    table = Table("batch", "context", "step", "bytes", "products", "step / bound", "tokens/s")
    for (batch, context), step_s in steps.items():
        by_bytes, by_products = work.bounds(machine, batch, context)
        table.add_row(
            *(str(batch), f"{context:,}", f"{step_s * 1e3:.1f} ms"),
            *(f"{by_bytes * 1e3:.1f} ms", f"{by_products * 1e3:.1f} ms"),
            *(f"{step_s / max(by_bytes, by_products):.1f}", f"{batch / step_s:.0f}"),
        )
    console.print(table)
    console.print(
        f"{engine}; {machine.bandwidth / 1e9:.1f} GB/s, {machine.rate / 1e9:.0f} GFLOP/s, "
        f"{torch.get_num_threads()} threads, {os.cpu_count()} cores ({platform.machine()}), "
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )
    table = Table("waiting", f"step of {RUNNING}", "outside of the forward pass", "share")
    for waiting, step_s, outside_s in overheads:
        table.add_row(
            f"{waiting:,}",
            *(f"{step_s * 1e3:.1f} ms", f"{outside_s * 1e3:.2f} ms", f"{outside_s / step_s:.1%}"),
        )
    console.print(table)


def plot(
    steps: Steps, work: Work, machine: Machine, overheads: Sequence[Overhead], path: str
) -> None:
    """Step times with the two lines, by batch and by context, and what is outside the pass."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    by_batch, by_context, outside = figure.subplots(1, 3)
    colours = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1")
    contexts = sorted({context for _, context in steps})
    batches = sorted({batch for batch, _ in steps})
    chosen = [batch for batch in (1, 8, 32) if batch in batches] or batches[:3]
    lines: list[tuple[Any, str, list[tuple[int, int]], int]] = [
        (by_batch, f"context {context:,}", [key for key in steps if key[1] == context], 0)
        for context in contexts
    ] + [
        (by_context, f"batch {batch}", [key for key in steps if key[0] == batch], 1)
        for batch in chosen
    ]
    drawn: dict[int, int] = {}
    for axes, label, keys, axis in lines:
        colour = colours[drawn.setdefault(id(axes), 0) % len(colours)]
        drawn[id(axes)] += 1
        where = [key[axis] for key in keys]
        bounds = [work.bounds(machine, *key) for key in keys]
        axes.plot(where, [steps[key] * 1e3 for key in keys], "o-", color=colour, label=label)
        axes.plot(where, [bound[0] * 1e3 for bound in bounds], "--", color=colour, linewidth=1)
        axes.plot(where, [bound[1] * 1e3 for bound in bounds], ":", color=colour, linewidth=1)
    panels = ((by_batch, "sequences", batches), (by_context, "tokens of context", contexts))
    for axes, name, ticks in panels:
        axes.set(xscale="log", yscale="log", xlabel=name, ylabel="step, ms")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    by_batch.set_title("-- bytes read, ·· products", fontsize=9)
    where = range(len(overheads))
    outside.bar(where, [overhead.outside_s * 1e3 for overhead in overheads], color=colours[0])
    outside.set_xticks(where, [f"{overhead.waiting:,}" for overhead in overheads])
    for place, overhead in enumerate(overheads):
        share = f"{overhead.outside_s / overhead.step_s:.1%}"
        outside.annotate(share, (place, overhead.outside_s * 1e3), ha="center", va="bottom")
    outside.set(xlabel="requests that wait", ylabel=f"ms outside of the pass, {RUNNING} sequences")
    outside.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=80, format="png")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a checkpoint; the small default model if not given")
    parser.add_argument("--engine", default="compile", choices=("eager", "compile", "int8"))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--waiting", type=int, nargs="+", default=list(WAITING))
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curves")
    return parser.parse_args()


if __name__ == "__main__":
    main()
