"""Linear layers of bf16 as a kernel of our own, where the processor has vectors of 512 bits.

oneDNN prepares its products for many rows; a decode step has few. The kernel reads a weight once,
in order, and keeps the sums of all rows in registers. Each row is computed alike in every batch.

A call costs as much as the product of one row by a small weight. In a program, layers that have the
same input, such as those of queries, keys and values, are computed by one call (`group_linears`).
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import fx, nn

from trencadis.engine.devices.cpu.native_calls import Address, address_of, is_recording, note
from trencadis.engine.devices.cpu.native_kernel import WAYS, NoKernel, fastest, load_kernel
from trencadis.kvcache import ceil_div

_SOURCE = Path(__file__).with_name("tiled_linear.cpp")
_COLUMNS = 32
"""Outputs of a tile."""

_CHUNK = 1024
"""Outputs whose weights are packed at a time: what packing takes beside its result."""

_TINY = torch.finfo(torch.float32).tiny

_TOLERANCE = 0.02
"""Largest difference to the product in fp32 in a trial, beside the largest value."""

_TRIED = (1, 14, 29)
"""Rows of the trials: a decode of one sequence, a whole block of the kernel, and several blocks."""

_TIMED_ROWS, _TIMED_INPUTS, _TIMED_OUTPUTS = 28, 512, 256
"""Of the product that decides how a kernel multiplies: less than a millisecond."""

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: tuple[Any, ...] = (
    *(_POINTER, _POINTER, _INTEGER),
    *(_POINTER, *[_INTEGER] * 4),
)

_LIBRARY = torch.library.Library("trencadis", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "tiled_linear(Tensor rows, Tensor tiles, Tensor? scales, Tensor? bias, int outputs) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "tiled_linears(Tensor rows, Tensor[] tiles, Tensor?[] scales, Tensor?[] biases, int[] outputs)"
    " -> Tensor[]"
)


@attrs.frozen
class _Kernel:
    """A compiled kernel, and whether it multiplies bf16 widened to fp32, or pairs of bf16."""

    compute: Callable[..., None]
    widens: bool


_KERNELS: dict[torch.dtype, _Kernel] = {}
"""The kernels of this process by the type of the weights: they are the same for all models."""


def load_linear_kernel(
    directory: Path | None = None,
    *,
    trusted: bool = False,
    weights: torch.dtype = torch.bfloat16,
    widens: bool | None = None,
) -> None:
    """Load the kernel that `TiledLinear` needs, or `Int8Linear` for ``weights`` of int8.

    It is tried first: see `load_kernel`. Raises `NoKernel` on a processor without vectors of 512
    bits, or with products of tiles, which are faster.

    ``widens``: whether bf16 is widened to fp32 and multiplied by the instruction for fp32, not by
    that for pairs of bf16. None: what takes less time here. Intel's processors compute twice as
    much in the first way, AMD's (Zen 4) in the second, and those without AVX512-BF16 have the
    first alone. Sums are of fp32 in both. What was measured once holds for the process: a model
    that is loaded keeps its results when another one is.
    """
    definitions = (f"INT8={int(weights is torch.int8)}",)
    library = load_kernel(_SOURCE, definitions, directory, trusted=trusted)
    compute = library.tiled_linears
    compute.argtypes, compute.restype = _ARGUMENTS, None
    if widens is None and weights in _KERNELS:
        widens = _KERNELS[weights].widens
    found = (True, False) if library.has_pairs() else (True,)
    kernels = {WAYS[way]: _Kernel(compute, way) for way in found if widens is None or widens is way}
    if not kernels:
        raise NoKernel("this processor has no products of pairs of bf16")
    for kernel in kernels.values():
        _try(kernel, weights)
    what = f"Linear layers with weights of {str(weights).removeprefix('torch.')}: the kernel"
    _KERNELS[weights] = fastest(what, kernels, _timed(weights))


class TiledLinear(nn.Module):
    """A linear layer whose weight is in the kernel's order. Of bf16, with an even number of inputs.

    ``tiles`` is ``[tiles, inputs / 2, 32, 2]``: the weights of two inputs for 32 outputs at a time.
    """

    tiles: torch.Tensor
    scales: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        tiles, scales = self._packed(linear.weight.detach())
        self.register_buffer("tiles", tiles, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = linear.bias

    def _packed(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _tiled(weight), None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # The kernel gets addresses. A program is checked once, when it is traced.
        if rows.dtype is not torch.bfloat16 or rows.shape[-1] != self.in_features:
            raise ValueError(
                f"rows of {rows.shape[-1]} inputs of {rows.dtype}, for a layer of "
                f"{self.in_features} inputs of torch.bfloat16"
            )
        # Only tracing needs the registered operator.
        compute = _compute if type(rows) is torch.Tensor else torch.ops.trencadis.tiled_linear
        out: torch.Tensor = compute(rows, self.tiles, self.scales, self.bias, self.out_features)
        return out


class Int8Linear(TiledLinear):
    """A linear layer whose weight is rounded to integers of 8 bits, with a scale for each output.

    ``tiles`` is int8 ``[tiles, inputs / 2, 2, 2, 16]``: of 16 outputs the weights of one input,
    then those of the next. ``scales`` is fp32 ``[outputs]``. Inputs and outputs stay bf16.
    """

    def _packed(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _quantized(weight)


def _tiled(weight: torch.Tensor) -> torch.Tensor:
    outputs, inputs = weight.shape
    tiles = weight.new_empty(ceil_div(outputs, _COLUMNS), inputs // 2, _COLUMNS, 2)
    for rows, of_rows in zip(
        torch.split(weight, _CHUNK), torch.split(tiles, _CHUNK // _COLUMNS), strict=True
    ):
        padded = F.pad(rows, (0, 0, 0, -len(rows) % _COLUMNS))
        of_rows.copy_(padded.view(-1, _COLUMNS, inputs // 2, 2).permute(0, 2, 1, 3))
    return tiles


def _quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded to -127 to 127 of each output's largest value."""
    outputs, inputs = weight.shape
    half = _COLUMNS // 2
    tiles = weight.new_empty(
        (ceil_div(outputs, _COLUMNS), inputs // 2, 2, 2, half), dtype=torch.int8
    )
    scales = weight.new_empty(outputs, dtype=torch.float32)
    chunks = (
        torch.split(weight, _CHUNK),
        torch.split(scales, _CHUNK),
        torch.split(tiles, _CHUNK // _COLUMNS),
    )
    for rows, of_outputs, of_rows in zip(*chunks, strict=True):
        of_outputs.copy_(rows.abs().amax(1)).div_(127)
        steps = rows.float().div_(of_outputs.clamp_min(_TINY)[:, None]).round_()
        padded = F.pad(steps.to(torch.int8), (0, 0, 0, -len(rows) % _COLUMNS))
        of_rows.copy_(padded.view(-1, 2, half, inputs // 2, 2).permute(0, 3, 1, 4, 2))
    return tiles, scales


def _compute(
    rows: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
) -> torch.Tensor:
    return _product(_KERNELS[tiles.dtype], rows, tiles, scales, bias, outputs)


def _compute_together(
    rows: torch.Tensor,
    tiles: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[int],
) -> list[torch.Tensor]:
    return _products(_KERNELS[tiles[0].dtype], rows, tiles, scales, biases, outputs)


def _product(
    kernel: _Kernel,
    rows: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
) -> torch.Tensor:
    (out,) = _products(kernel, rows, (tiles,), (scales,), (bias,), (outputs,))
    return out


def _products(
    kernel: _Kernel,
    rows: torch.Tensor,
    tiles: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[int],
) -> list[torch.Tensor]:
    """The results of layers that have the same input and the same type of weights."""
    rows = rows.contiguous()
    *batch, inputs = rows.shape
    num_rows, threads = rows.numel() // inputs, torch.get_num_threads()
    outs = [rows.new_empty((*batch, count)) for count in outputs]
    layers: list[int] = []
    for weight, scale, bias, out, count in zip(tiles, scales, biases, outs, outputs, strict=True):
        layers += (
            *(weight.data_ptr(), 0 if scale is None else scale.data_ptr()),
            *(0 if bias is None else bias.data_ptr(), out.data_ptr(), count),
        )
    # What the kernel needs beside its results, so that it allocates nothing.
    if kernel.widens:
        copies = threads if num_rows == 1 else num_rows
        scratch: torch.Tensor | None = rows.new_empty(copies, inputs, dtype=torch.float32)
    else:
        scratch = torch.empty_like(rows) if num_rows > 1 else None
    kernel.compute(
        *(rows.data_ptr(), (_INTEGER * len(layers))(*layers), len(outs)),
        *(None if scratch is None else scratch.data_ptr(), num_rows, inputs),
        *(threads, int(kernel.widens)),
    )
    if is_recording():
        addresses = [x if place % 5 == 4 else Address(x) for place, x in enumerate(layers)]
        needed = () if scratch is None else (scratch,)
        note(
            address_of(kernel.compute),
            (
                *(Address(rows.data_ptr()), addresses, len(outs)),
                *(Address(scratch.data_ptr() if scratch is not None else 0), num_rows, inputs),
                *(threads, int(kernel.widens)),
            ),
            (*outs, *needed),
        )
    return outs


_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "tiled_linear", _compute, "CompositeExplicitAutograd"
)


_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "tiled_linears", _compute_together, "CompositeExplicitAutograd"
)


def _shape(
    rows: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
) -> torch.Tensor:
    del tiles, scales, bias
    return rows.new_empty((*rows.shape[:-1], outputs))


def _shapes(
    rows: torch.Tensor,
    tiles: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[int],
) -> list[torch.Tensor]:
    del tiles, scales, biases
    return [rows.new_empty((*rows.shape[:-1], count)) for count in outputs]


torch.library.register_fake("trencadis::tiled_linear", _shape, lib=_LIBRARY)
torch.library.register_fake("trencadis::tiled_linears", _shapes, lib=_LIBRARY)


def group_linears(module: fx.GraphModule) -> None:
    """Let one operator compute the layers of a traced module that have the same input.

    Their weights are inputs of the module. Changes ``module`` in place.
    """
    graph = module.graph
    for rows, nodes in _layers_of_one_input(graph):
        columns = zip(*(node.args[1:] for node in nodes), strict=True)
        with graph.inserting_before(nodes[0]):
            together = graph.call_function(
                torch.ops.trencadis.tiled_linears.default, (rows, *map(list, columns))
            )
            outs = [
                graph.call_function(operator.getitem, (together, place))
                for place in range(len(nodes))
            ]
        for node, out in zip(nodes, outs, strict=True):
            out.meta = dict(node.meta)
            node.replace_all_uses_with(out)
            graph.erase_node(node)
    module.recompile()


def _layers_of_one_input(graph: fx.Graph) -> list[tuple[fx.Node, list[fx.Node]]]:
    """The input of two or more layers with the same type of weights, and the layers, in order.

    Between them no operator writes to a tensor: that could be their input, by a view of it.
    """
    found: list[tuple[fx.Node, list[fx.Node]]] = []
    groups: dict[tuple[fx.Node, torch.dtype], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is torch.ops.trencadis.tiled_linear.default:
            rows, *weights = node.all_input_nodes
            if all(weight.op == "placeholder" for weight in weights):
                key = (rows, weights[0].meta["val"].dtype)
                if key not in groups:
                    groups[key] = []
                    found.append((rows, groups[key]))
                groups[key].append(node)
        elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            groups.clear()
    return [(rows, nodes) for rows, nodes in found if len(nodes) > 1]


def _try(kernel: _Kernel, weights: torch.dtype) -> None:
    """Raise `NoKernel` where the kernel's result is not that of PyTorch."""
    weight, bias = _random(45, 70), _random(45)
    tiles, scales = _packed(weight, weights)
    for num_rows in _TRIED:
        rows = _random(num_rows, 70)
        expected = F.linear(rows.float(), weight.float(), bias.float())
        result = _product(kernel, rows, tiles, scales, bias, len(weight)).float()
        error = ((result - expected).abs().max() / expected.abs().max()).item()
        if not error <= _TOLERANCE:
            raise NoKernel(f"its result for {num_rows} rows is off by {error:.3g}")


def _timed(weights: torch.dtype) -> Callable[[_Kernel], object]:
    """What decides how a kernel multiplies: the product of two blocks of rows."""
    weight, rows = _random(_TIMED_OUTPUTS, _TIMED_INPUTS), _random(_TIMED_ROWS, _TIMED_INPUTS)
    tiles, scales = _packed(weight, weights)
    return lambda kernel: _product(kernel, rows, tiles, scales, None, _TIMED_OUTPUTS)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def _packed(weight: torch.Tensor, weights: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _quantized(weight) if weights is torch.int8 else (_tiled(weight), None)
