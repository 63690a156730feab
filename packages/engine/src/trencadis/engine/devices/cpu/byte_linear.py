"""Products of rows that are rounded to int8 with packed weights of integers, by AVX512-VNNI.

A product of bytes computes twice as many weights as one of pairs of bf16. A row is rounded in parts
of 64 or 32 inputs, each with a step of its own, so that a large input costs those near it alone:
one step for the whole row costs the small default model 2.8 % of perplexity, parts of 64 0.3 %.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F

from trencadis.engine.devices.cpu.native_calls import Address, address_of, is_recording, note
from trencadis.engine.devices.cpu.native_kernel import load_kernel
from trencadis.engine.models.packed_weight import INT4_ZERO, PackedWeight
from trencadis.kvcache import ceil_div

_SOURCE = Path(__file__).with_name("byte_linear.cpp")

SCALE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""As the kernels of linear layers know them."""

_PARTS = (64, 32)
"""Inputs of a part of a row, the first that divides a group of the weight."""

_MOST_INPUTS = 1 << 17
"""Of a layer: the sum of so many products is an integer of 32 bits."""

_TINY = 1e-30
"""Where no step of a part is larger, its numbers count as 0."""

_QUAD = 4
"""Inputs of an output that are beside each other."""

_CHUNK = 1024
"""Outputs whose weights are packed at a time: what packing takes beside its result."""

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: tuple[Any, ...] = (_POINTER, _POINTER, _INTEGER, _POINTER, *[_INTEGER] * 5)


@attrs.frozen
class ByteKernel:
    """A compiled kernel. ``columns``: outputs of a tile. ``most_rows``: of so few, each thread has
    its own copy in the scratch memory."""

    compute: Callable[..., None]
    columns: int
    most_rows: int


def load_byte_library(
    weights: torch.dtype, directory: Path | None = None, *, trusted: bool = False
) -> ByteKernel:
    """Load the kernel for ``weights`` of int8, or of uint8 for 4 bits: see `load_kernel`.

    Raises `NoKernel` on a processor without AVX512-VNNI.
    """
    definitions = (f"BITS={4 if weights is torch.uint8 else 8}",)
    library = load_kernel(_SOURCE, definitions, directory, trusted=trusted)
    compute = library.byte_linears
    compute.argtypes, compute.restype = _ARGUMENTS, None
    return ByteKernel(compute, library.columns(), library.most_rows())


def part_of(inputs: int, groups: int) -> int:
    """Inputs of a part of a row that a weight in such groups multiplies; 0 for none."""
    if inputs > _MOST_INPUTS:
        return 0
    return next((part for part in _PARTS if inputs // groups % part == 0), 0)


def rounded_rows(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """fp32 ``[..., inputs]``: what the kernel multiplies in place of ``rows``."""
    parts = rows.float().view(*rows.shape[:-1], -1, part_of(rows.shape[-1], groups))
    steps = parts.abs().amax(-1, keepdim=True) / 127
    return ((parts / steps.clamp_min(_TINY)).round() * steps).view(rows.shape)


def has_byte_order(tiles: torch.Tensor) -> bool:
    """Whether tiles are in the order of `byte_tiles`."""
    return tiles.dtype is not torch.bfloat16 and tiles.shape[-1] == _QUAD


def byte_tiles(weight: PackedWeight, columns: int) -> torch.Tensor:
    """The integers in the order of the kernel.

    int8 ``[tiles, inputs / 4, 2, columns / 2, 4]``: of half of the outputs the weights of four
    inputs each; or uint8 ``[tiles, inputs / 8, 2, columns / 2, 4]``, those of the next four inputs
    in the upper bits.
    """
    outputs, inputs = weight.shape
    is_int4 = weight.steps.dtype is torch.uint8
    quads, unit = (2, 2 * _QUAD) if is_int4 else (1, _QUAD)
    tiles = weight.steps.new_empty(
        (ceil_div(outputs, columns), inputs // unit, 2, columns // 2, _QUAD)
    )
    for rows, of_rows in zip(
        torch.split(weight.steps, _CHUNK), torch.split(tiles, _CHUNK // columns), strict=True
    ):
        padded = F.pad(rows, (0, 0, 0, -len(rows) % columns))
        if is_int4:
            padded = torch.stack((padded & 15, padded >> 4), dim=-1)
        divided = padded.view(-1, 2, columns // 2, inputs // unit, quads, _QUAD)
        of_quads = divided.permute(0, 3, 1, 2, 4, 5)
        if is_int4:
            of_rows.copy_(of_quads[..., 0, :] | of_quads[..., 1, :] << 4)
        else:
            of_rows.copy_(of_quads[..., 0, :])
    return tiles


def integers_of(tiles: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """int8 ``[..., inputs]``: the integers of ``outputs`` ``[...]`` in such tiles."""
    half = tiles.shape[3]
    tile, column = outputs // (2 * half), outputs % (2 * half)
    quads = tiles[tile, :, column // half, column % half]
    if tiles.dtype is torch.uint8:
        quads = torch.stack((quads & 15, quads >> 4), dim=-2).to(torch.int8) - INT4_ZERO
    return quads.flatten(outputs.dim())


def layer_words(
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None],
    shifts: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor],
) -> list[int | Address]:
    """A ``Layer`` of the sources for each weight, whose results are ``outs`` ``[..., outputs]``."""
    words: list[int | Address] = []
    for weight, scale, shift, bias, out in zip(weights, scales, shifts, biases, outs, strict=True):
        addresses = (weight, scale, shift, bias, out)
        words += (Address(0 if each is None else each.data_ptr()) for each in addresses)
        words += (out.shape[-1], 0 if scale is None else SCALE_TYPES[scale.dtype])
    return words


def byte_products(
    kernel: ByteKernel,
    rows: torch.Tensor,
    tiles: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None],
    shifts: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[int],
) -> list[torch.Tensor]:
    """The results of layers that have the same input, and weights of one type and as many groups.

    ``rows`` is bf16 ``[..., inputs]``. ``scales`` and ``shifts``: see `IntegerLinear`.
    """
    rows = rows.contiguous()
    *batch, inputs = rows.shape
    num_rows, threads = rows.numel() // inputs, torch.get_num_threads()
    groups = 1 if scales[0] is None else scales[0].shape[1]
    part = part_of(inputs, groups)
    outs = [rows.new_empty((*batch, count)) for count in outputs]
    layers = layer_words(tiles, scales, shifts, biases, outs)
    # What the kernel needs beside its results, so that it allocates nothing.
    copies = num_rows * threads if num_rows <= kernel.most_rows else num_rows
    scratch = rows.new_empty((copies, inputs // _QUAD + 2 * (inputs // part)), dtype=torch.int32)
    sizes = (num_rows, inputs, groups, part, threads)
    kernel.compute(
        *(rows.data_ptr(), (_INTEGER * len(layers))(*layers), len(outs), scratch.data_ptr()),
        *sizes,
    )
    if is_recording():
        note(
            address_of(kernel.compute),
            (
                *(Address(rows.data_ptr()), layers, len(outs), Address(scratch.data_ptr())),
                *sizes,
            ),
            (*outs, scratch),
        )
    return outs
