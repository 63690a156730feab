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

from trencadis.engine.devices.cpu.native_calls import (
    Address,
    address_of,
    data_address,
    is_recording,
    note,
)
from trencadis.engine.devices.cpu.native_kernel import load_kernel
from trencadis.engine.devices.cpu.weight_tiles import SCALE_TYPES

_SOURCE = Path(__file__).with_name("byte_linear.cpp")

_PARTS = (64, 32)
"""Inputs of a part of a row, the first that divides a group of the weight."""

_MOST_INPUTS = 1 << 17
"""Of a layer: the sum of so many products is an integer of 32 bits."""

_TINY = 1e-30
"""Where no step of a part is larger, its numbers count as 0."""

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
        words += map(data_address, (weight, scale, shift, bias, out))
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
    scratch = rows.new_empty((copies, inputs // 4 + 2 * (inputs // part)), dtype=torch.int32)
    sizes = (num_rows, inputs, groups, part, threads)
    kernel.compute(
        *(rows.data_ptr(), (_INTEGER * len(layers))(*layers), len(outs), scratch.data_ptr()),
        *sizes,
    )
    if is_recording():
        note(
            address_of(kernel.compute),
            (
                *(data_address(rows), layers, len(outs), data_address(scratch)),
                *sizes,
            ),
            (*outs, scratch),
        )
    return outs
