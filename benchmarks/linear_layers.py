"""The CPU's linear layers of bf16: the engine's kernel beside oneDNN with packed weights.

    OMP_NUM_THREADS=1 python benchmarks/linear_layers.py

The kernel multiplies pairs of bf16, or bf16 widened to fp32: the ratio is to the faster way. All
are called in turns, with enough weights that none stays in the caches from call to call. Times are
of the processor, which other load on the machine moves less than those of a clock; the least of
each is shown.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from trencadis.engine.devices.cpu.onednn_linear import OneDNNLinear
from trencadis.engine.devices.cpu.tiled_linear import TiledLinear, load_linear_kernel

SHAPES = {
    "a decoder layer of SmolLM2-135M": (
        *((576, 576), (576, 192), (576, 192), (576, 576)),
        *((576, 1536), (576, 1536), (1536, 576)),
    ),
    "4,096 to 4,096": ((4096, 4096),),
    "14,336 to 4,096": ((14336, 4096),),
}
ROWS = (1, 8, 32, 256)
WEIGHT_BYTES = 80 << 20
ROUNDS = 7


def main() -> None:
    table = Table("weights", "rows", "oneDNN", "pairs of bf16", "fp32", "ratio", "GFLOP/s")
    for name, shapes in SHAPES.items():
        size = sum(2 * inputs * outputs for inputs, outputs in shapes)
        copies = max(2, WEIGHT_BYTES // size)
        plain = [nn.Linear(*shape, bias=False).bfloat16() for shape in shapes * copies]
        packed, tiled = ([kind(layer) for layer in plain] for kind in (OneDNNLinear, TiledLinear))
        for rows in ROWS:
            given = {shape[0]: torch.randn(1, rows, shape[0]).bfloat16() for shape in shapes}
            times = [_in_turns(packed, tiled, given) for _ in range(ROUNDS)]
            theirs, *ours = (min(column) / copies for column in zip(*times, strict=True))
            table.add_row(
                name,
                str(rows),
                *(f"{seconds * 1e3:.2f} ms" for seconds in (theirs, *ours)),
                f"{theirs / min(ours):.2f}",
                f"{rows * size / min(ours) / 1e9:.0f}",
            )
    Console(width=110).print(table)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")


def _in_turns(
    packed: Sequence[nn.Module], tiled: Sequence[nn.Module], given: dict[int, torch.Tensor]
) -> list[float]:
    """Seconds of oneDNN, and of each way in which the kernel can multiply."""
    seconds = [_seconds(packed, given)]
    for widens in (False, True):
        load_linear_kernel(widens=widens)
        seconds.append(_seconds(tiled, given))
    return seconds


@torch.inference_mode()
def _seconds(layers: Sequence[nn.Module], given: dict[int, torch.Tensor]) -> float:
    started = time.process_time()
    for layer in layers:
        layer(given[layer.in_features])
    return time.process_time() - started


if __name__ == "__main__":
    main()
