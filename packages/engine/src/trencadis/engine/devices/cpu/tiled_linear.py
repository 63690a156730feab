"""Linear layers of bf16 or integers as a kernel of our own, for processors with AVX2 or AVX-512.

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

from trencadis.engine.devices.cpu.byte_linear import (
    ByteKernel,
    byte_products,
    layer_words,
    load_byte_library,
    part_of,
    rounded_rows,
)
from trencadis.engine.devices.cpu.native_calls import (
    address_of,
    data_address,
    is_recording,
    note,
)
from trencadis.engine.devices.cpu.native_kernel import WAYS, NoKernel, fastest, load_kernel
from trencadis.engine.devices.cpu.weight_tiles import (
    SCALE_TYPES,
    UNITS,
    byte_tiles,
    has_byte_order,
    integer_tiles,
    integers_of,
    scales_and_shifts,
    tiled,
)
from trencadis.engine.models.packed_weight import PackedWeight, QuantizedLinear
from trencadis.engine.models.rounded_weights import rounded_int4, rounded_int8

_SOURCE = Path(__file__).with_name("tiled_linear.cpp")

BITS = {torch.bfloat16: 16, torch.int8: 8, torch.uint8: 4}
"""Of each weight, by the type of the weights: a byte has two weights of 4 bits."""

TOLERANCE = 0.02
"""Largest difference to the product in fp32 in a trial, beside the largest value."""

_TRIED_INPUTS = 96
_TRIED = (1, 14, 29)
"""Rows of the trials: a decode of one sequence, a whole block of the kernel, and several blocks."""

_TIMED_ROWS, _TIMED_INPUTS, _TIMED_OUTPUTS = 28, 512, 256
"""Of the product that decides how a kernel multiplies: less than a millisecond."""

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: tuple[Any, ...] = (
    *(_POINTER, _POINTER, _INTEGER),
    *(_POINTER, _POINTER, *[_INTEGER] * 5),
)

_LIBRARY = torch.library.Library("trencadis", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "tiled_linear(Tensor rows, Tensor tiles, Tensor? scales, Tensor? shifts, Tensor? bias, "
    "int outputs) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "tiled_linears(Tensor rows, Tensor[] tiles, Tensor?[] scales, Tensor?[] shifts, "
    "Tensor?[] biases, int[] outputs) -> Tensor[]"
)


@attrs.frozen
class _Kernel:
    """A compiled kernel, and whether it multiplies bf16 widened to fp32, or pairs of bf16.

    ``columns``: outputs of a tile.
    """

    compute: Callable[..., None]
    widens: bool
    columns: int


_KERNELS: dict[torch.dtype, _Kernel] = {}
"""The kernels of this process by the type of the weights: they are the same for all models."""


def load_linear_kernel(
    directory: Path | None = None,
    *,
    trusted: bool = False,
    weights: torch.dtype = torch.bfloat16,
    widens: bool | None = None,
) -> bool:
    """Load the kernel that `TiledLinear` needs, or `IntegerLinear` for ``weights`` of int8, or
    of uint8 for 4 bits.

    It is tried first: see `load_kernel`. Raises `NoKernel` on a processor without AVX2; for bf16
    also on one with products of tiles (AMX), which are faster.

    ``widens``: whether bf16 is widened to fp32 and multiplied by the instruction for fp32, not by
    that for pairs of bf16. None: what takes less time here. Intel's processors compute twice as
    much in the first way, AMD's (Zen 4) in the second, and those without AVX512-BF16 have the
    first alone. Sums are of fp32 in both. What was measured once holds for the process: a model
    that is loaded keeps its results when another one is. Returns what was chosen.
    """
    definitions = (f"BITS={BITS[weights]}",)
    library = load_kernel(_SOURCE, definitions, directory, trusted=trusted)
    compute = library.tiled_linears
    compute.argtypes, compute.restype = _ARGUMENTS, None
    if widens is None and weights in _KERNELS:
        widens = _KERNELS[weights].widens
    found = (True, False) if library.has_pairs() else (True,)
    kernels = {
        WAYS[way]: _Kernel(compute, way, library.columns())
        for way in found
        if widens is None or widens is way
    }
    if not kernels:
        raise NoKernel("this processor has no products of pairs of bf16")
    for kernel in kernels.values():
        _try(kernel, weights)
    kind = "bf16" if weights is torch.bfloat16 else f"int{BITS[weights]}"
    what = f"Linear layers with weights of {kind}: the kernel"
    _KERNELS[weights] = fastest(what, kernels, _timed(weights, library.columns()))
    return _KERNELS[weights].widens


_BYTE_KERNELS: dict[torch.dtype, ByteKernel] = {}
"""Those of `load_byte_kernel` in this process, by the type of the weights."""


def load_byte_kernel(
    weights: torch.dtype, directory: Path | None = None, *, trusted: bool = False
) -> None:
    """Load the kernel that `ByteLinear` needs for ``weights`` of int8, or of uint8 for 4 bits.

    It is tried first, beside the product of the rounded rows. Raises `NoKernel` on a processor
    without AVX512-VNNI.
    """
    kernel = load_byte_library(weights, directory, trusted=trusted)
    _try(kernel, weights)
    _BYTE_KERNELS[weights] = kernel


class TiledLinear(nn.Module):
    """A linear layer whose weight is in the kernel's order. Of bf16, with an even number of inputs.

    ``tiles``: see `weight_tiles.tiled`.
    """

    tiles: torch.Tensor
    scales: torch.Tensor | None
    shifts: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(self, linear: nn.Linear | QuantizedLinear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        names = ("tiles", "scales", "shifts", "order")
        for name, tensor in zip(names, self._packed(linear), strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.bias = linear.bias

    def _packed(self, linear: Any) -> _Tensors:
        tiles = tiled(linear.weight.detach(), _KERNELS[torch.bfloat16].columns)
        return tiles, None, None, None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # The kernel gets addresses. A program is checked once, when it is traced.
        if rows.dtype is not torch.bfloat16 or rows.shape[-1] != self.in_features:
            raise ValueError(
                f"rows of {rows.shape[-1]} inputs of {rows.dtype}, for a layer of "
                f"{self.in_features} inputs of torch.bfloat16"
            )
        if self.order is not None:
            rows = rows[..., self.order]
        # Only tracing needs the registered operator.
        compute = _compute if type(rows) is torch.Tensor else torch.ops.trencadis.tiled_linear
        weight = (self.tiles, self.scales, self.shifts)
        out: torch.Tensor = compute(rows, *weight, self.bias, self.out_features)
        return out


class IntegerLinear(TiledLinear):
    """A linear layer of integers of 8 or 4 bits. Inputs and outputs are bf16.

    ``tiles``, ``scales`` and ``shifts``: see `integer_tiles`.
    """

    @staticmethod
    def fits(weight: PackedWeight) -> bool:
        """Whether the kernel multiplies this weight: integers in groups of whole `UNITS`."""
        return (
            weight.has_integers
            and weight.scales.dtype in SCALE_TYPES
            and weight.shape[1] % (UNITS[weight.steps.dtype] * weight.groups) == 0
        )

    def _packed(self, linear: Any) -> _Tensors:
        weight: PackedWeight = linear.packed
        columns = _KERNELS[weight.steps.dtype].columns
        tiles, scales, shifts = integer_tiles(weight, columns)
        return tiles, scales, shifts, weight.order


class ByteLinear(IntegerLinear):
    """A linear layer of integers whose inputs are rounded to int8: see `byte_linear`.

    ``tiles``: see `byte_tiles`.
    """

    @staticmethod
    def fits(weight: PackedWeight) -> bool:
        """Whether the kernel multiplies this weight: see `part_of`."""
        return IntegerLinear.fits(weight) and part_of(weight.shape[1], weight.groups) > 0

    def _packed(self, linear: Any) -> _Tensors:
        weight: PackedWeight = linear.packed
        columns = _BYTE_KERNELS[weight.steps.dtype].columns
        scales, shifts = scales_and_shifts(weight, columns)
        return byte_tiles(weight, columns), scales, shifts, weight.order


class TiledEmbedding(nn.Module):
    """An embedding that reads the rows of an output head of integers, to which it is tied."""

    tiles: torch.Tensor
    scales: torch.Tensor
    shifts: torch.Tensor | None

    def __init__(self, head: IntegerLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        for name in ("tiles", "scales", "shifts"):
            self.register_buffer(name, getattr(head, name), persistent=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Vectors ``[..., hidden size]`` of ``token_ids`` ``[...]``."""
        columns = self.scales.shape[2]
        tile, column = token_ids // columns, token_ids % columns
        steps = integers_of(self.tiles, token_ids)
        scales = self.scales[tile, :, column]
        vectors = steps.view(*scales.shape, -1) * scales[..., None].float()
        if self.shifts is not None:
            vectors += self.shifts[tile, :, column, None]
        return vectors.flatten(-2).to(self.dtype)


_Tensors = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Tiles, scales, shifts, order."""


def _compute(
    rows: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor | None,
    shifts: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
) -> torch.Tensor:
    return _product(_kernel_of(tiles), rows, tiles, scales, shifts, bias, outputs)


def _compute_together(
    rows: torch.Tensor,
    tiles: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None],
    shifts: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[int],
) -> list[torch.Tensor]:
    return _products(_kernel_of(tiles[0]), rows, tiles, scales, shifts, biases, outputs)


def _kernel_of(tiles: torch.Tensor) -> _Kernel | ByteKernel:
    if has_byte_order(tiles):
        return _BYTE_KERNELS[tiles.dtype]
    # Words of 4 bits.
    return _KERNELS[torch.uint8 if tiles.dtype is torch.int32 else tiles.dtype]


def _product(
    kernel: _Kernel | ByteKernel,
    rows: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor | None,
    shifts: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
) -> torch.Tensor:
    (out,) = _products(kernel, rows, (tiles,), (scales,), (shifts,), (bias,), (outputs,))
    return out


def _products(
    kernel: _Kernel | ByteKernel,
    rows: torch.Tensor,
    tiles: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None],
    shifts: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[int],
) -> list[torch.Tensor]:
    """The results of layers that have the same input and the same type of weights."""
    if isinstance(kernel, ByteKernel):
        return byte_products(kernel, rows, tiles, scales, shifts, biases, outputs)
    rows = rows.contiguous()
    *batch, inputs = rows.shape
    num_rows, threads = rows.numel() // inputs, torch.get_num_threads()
    outs = [rows.new_empty((*batch, count)) for count in outputs]
    layers = layer_words(tiles, scales, shifts, biases, outs)
    # What the kernel needs beside its results, so that it allocates nothing.
    groups = 1 if scales[0] is None else scales[0].shape[1]
    copies = threads if num_rows == 1 else num_rows
    scratch = sums = None
    if kernel.widens:
        scratch = rows.new_empty(copies, inputs, dtype=torch.float32)
    elif num_rows > 1:
        scratch = torch.empty_like(rows)
    if any(shift is not None for shift in shifts):
        sums = rows.new_empty(copies, groups, dtype=torch.float32)
    sizes = (num_rows, inputs, groups, threads, int(kernel.widens))
    kernel.compute(
        *(rows.data_ptr(), (_INTEGER * len(layers))(*layers), len(outs)),
        *(data_address(scratch), data_address(sums), *sizes),
    )
    if is_recording():
        note(
            address_of(kernel.compute),
            (
                *(data_address(rows), layers, len(outs)),
                *(data_address(scratch), data_address(sums), *sizes),
            ),
            (*outs, *(needed for needed in (scratch, sums) if needed is not None)),
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
    shifts: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
) -> torch.Tensor:
    del tiles, scales, shifts, bias
    return rows.new_empty((*rows.shape[:-1], outputs))


def _shapes(
    rows: torch.Tensor,
    tiles: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None],
    shifts: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[int],
) -> list[torch.Tensor]:
    del tiles, scales, shifts, biases
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
    """The input of two or more layers with the same type and groups, and the layers, in order.

    Between them no operator writes to a tensor: that could be their input, by a view of it.
    """
    found: list[tuple[fx.Node, list[fx.Node]]] = []
    groups: dict[tuple[fx.Node, torch.dtype, int, bool], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is torch.ops.trencadis.tiled_linear.default:
            rows, *weights = node.all_input_nodes
            if all(weight.op == "placeholder" for weight in weights):
                scales = node.args[2]
                of_scales = scales.meta["val"].shape[1] if isinstance(scales, fx.Node) else 1
                tiles = weights[0].meta["val"]
                key = (rows, tiles.dtype, of_scales, has_byte_order(tiles))
                if key not in groups:
                    groups[key] = []
                    found.append((rows, groups[key]))
                groups[key].append(node)
        elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            groups.clear()
    return [(rows, nodes) for rows, nodes in found if len(nodes) > 1]


def _try(kernel: _Kernel | ByteKernel, weights: torch.dtype) -> None:
    """Raise `NoKernel` where the kernel's result is not that of PyTorch."""
    takes_bytes = isinstance(kernel, ByteKernel)
    inputs = 2 * _TRIED_INPUTS if takes_bytes else _TRIED_INPUTS  # parts of 64
    weight, bias = _random(45, inputs), _random(45)
    example = _example(weight, weights, kernel.columns, takes_bytes=takes_bytes)
    tiles, scales, shifts, weight = example
    for num_rows in _TRIED:
        rows = _random(num_rows, inputs)
        groups = 1 if scales is None else scales.shape[1]
        read = rounded_rows(rows, groups) if takes_bytes else rows
        expected = F.linear(read.float(), weight, bias.float())
        result = _product(kernel, rows, tiles, scales, shifts, bias, len(weight)).float()
        error = ((result - expected).abs().max() / expected.abs().max()).item()
        if not error <= TOLERANCE:
            raise NoKernel(f"its result for {num_rows} rows is off by {error:.3g}")


def _timed(weights: torch.dtype, columns: int) -> Callable[[_Kernel], object]:
    """What decides how a kernel multiplies: the product of two blocks of rows."""
    weight, rows = _random(_TIMED_OUTPUTS, _TIMED_INPUTS), _random(_TIMED_ROWS, _TIMED_INPUTS)
    tiles, scales, shifts, _ = _example(weight, weights, columns)
    return lambda kernel: _product(kernel, rows, tiles, scales, shifts, None, _TIMED_OUTPUTS)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def _example(
    weight: torch.Tensor, weights: torch.dtype, columns: int, *, takes_bytes: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Tiles, scales and shifts of a weight, and the weight as they have it, in fp32."""
    if weights is torch.bfloat16:
        return tiled(weight, columns), None, None, weight.float()
    packed = rounded_int8(weight) if weights is torch.int8 else rounded_int4(weight)
    zeros = torch.full(packed.scales.shape, 3, dtype=torch.int16)
    packed = PackedWeight(packed.steps, packed.scales, zeros)
    tiles, scales, shifts = integer_tiles(packed, columns)
    if takes_bytes:
        tiles = byte_tiles(packed, columns)
    return tiles, scales, shifts, packed.unpacked()
