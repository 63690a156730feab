"""The orders of packed weights in memory, in which the kernels of linear layers read them.

A tile has the weights of some outputs: as many as two vectors of the processor hold. Within a tile
those of a few inputs for all outputs are beside each other: of two, or for 4 bits of eight, for
products of bf16 and sums of fp32; of four for products of bytes (`byte_linear`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trencadis.engine.models.packed_weight import INT4_ZERO, PackedWeight
from trencadis.kvcache import ceil_div

SCALE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""What the kernels call the types of scales."""

CHUNK = 1024
"""Outputs whose weights are packed at a time: what packing takes beside its result."""

_QUAD = 4
"""Inputs of an output that are beside each other for products of bytes."""

UNITS = {torch.int8: 2, torch.uint8: 8}
"""Inputs of an output that are beside each other for sums of fp32, by the type of the steps."""

_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Bits below each of the eight inputs of a word: a pair is at the same place in both halves."""


def tiled(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """bf16 ``[tiles, inputs / 2, columns, 2]``: the weights of two inputs for so many outputs."""
    outputs, inputs = weight.shape
    tiles = weight.new_empty(ceil_div(outputs, columns), inputs // 2, columns, 2)
    for rows, of_rows in zip(
        torch.split(weight, CHUNK), torch.split(tiles, CHUNK // columns), strict=True
    ):
        padded = F.pad(rows, (0, 0, 0, -len(rows) % columns))
        of_rows.copy_(padded.view(-1, columns, inputs // 2, 2).permute(0, 2, 1, 3))
    return tiles


def integer_tiles(
    weight: PackedWeight, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tiles of pairs, scales and shifts.

    int8 ``[tiles, inputs / 2, 2, 2, columns / 2]``: of half of the outputs the weights of one
    input, then those of the next; or int32 ``[tiles, inputs / 8, 2, columns / 2]``, words of eight
    weights of 4 bits. ``scales`` and ``shifts``: see `scales_and_shifts`.
    """
    outputs, inputs = weight.shape
    half, steps = columns // 2, weight.steps
    is_int4 = steps.dtype is torch.uint8
    unit, in_unit = UNITS[steps.dtype], () if is_int4 else (2,)
    tiles = steps.new_empty(
        (ceil_div(outputs, columns), inputs // unit, 2, *in_unit, half),
        dtype=torch.int32 if is_int4 else steps.dtype,
    )
    for rows, of_rows in zip(
        torch.split(steps, CHUNK), torch.split(tiles, CHUNK // columns), strict=True
    ):
        padded = F.pad(rows, (0, 0, 0, -len(rows) % columns))
        units = _words(padded) if is_int4 else padded
        divided = units.view(-1, 2, half, inputs // unit, *in_unit)
        of_rows.copy_(divided.permute(0, 3, 1, *((4, 2) if in_unit else (2,))))
    return tiles, *scales_and_shifts(weight, columns)


def _words(steps: torch.Tensor) -> torch.Tensor:
    """int32 ``[outputs, inputs / 8]`` of steps of 4 bits ``[outputs, inputs / 2]``."""
    # A word has eight steps already, a pair in each byte. Operations on words take a fifth of the
    # time of those on bytes.
    words = steps.contiguous().view(torch.int32)
    lower, upper = words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F
    return _together(lower) | _together(upper) << 16


def _together(words: torch.Tensor) -> torch.Tensor:
    """The lower four bits of each byte in the lower half of a word."""
    halves = (words | words >> 4) & 0x00FF00FF
    return (halves | halves >> 8) & 0xFFFF


def scales_and_shifts(
    weight: PackedWeight, columns: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``[tiles, groups, columns]``; a shift is what zero points, or minimums, add to each weight of
    a group."""
    shifts = None
    # What the kernel takes for 0.
    means = INT4_ZERO if weight.steps.dtype is torch.uint8 else 0
    if weight.zero_points is not None:
        shifts = (means - weight.zero_points).float() * weight.scales.float()
    elif weight.minimums is not None:
        shifts = weight.minimums.float() + means * weight.scales.float()
    if shifts is not None:
        shifts = _of_tiles(shifts, columns)
    return _of_tiles(weight.scales, columns), shifts


def _of_tiles(of_groups: torch.Tensor, columns: int) -> torch.Tensor:
    """``[outputs, groups]`` as ``[tiles, groups, columns]``."""
    padded = F.pad(of_groups, (0, 0, 0, -len(of_groups) % columns))
    return padded.view(-1, columns, of_groups.shape[1]).transpose(1, 2).contiguous()


def has_byte_order(tiles: torch.Tensor) -> bool:
    """Whether tiles are in the order of `byte_tiles`."""
    return tiles.dtype is not torch.bfloat16 and tiles.shape[-1] == _QUAD


def byte_tiles(weight: PackedWeight, columns: int) -> torch.Tensor:
    """The integers in the order of products of bytes.

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
        torch.split(weight.steps, CHUNK), torch.split(tiles, CHUNK // columns), strict=True
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
    """int8 ``[..., inputs]``: the integers of ``outputs`` ``[...]`` in tiles of either order."""
    in_quads = has_byte_order(tiles)
    half = tiles.shape[3] if in_quads else tiles.shape[-1]
    tile, column = outputs // (2 * half), outputs % (2 * half)
    if in_quads:
        steps = tiles[tile, :, column // half, column % half]
    else:
        steps = tiles[tile, :, column // half, ..., column % half]
    if tiles.dtype is torch.uint8:
        steps = torch.stack((steps & 15, steps >> 4), dim=-2)
    elif tiles.dtype is torch.int32:
        steps = steps[..., None] >> torch.tensor(_SHIFTS, dtype=torch.int32) & 15
    if tiles.dtype is not torch.int8:
        steps = steps.to(torch.int8) - INT4_ZERO
    return steps.flatten(outputs.dim())
