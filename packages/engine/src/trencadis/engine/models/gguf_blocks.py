"""Reads the blocks of a GGUF file's tensors as packed weights, which have the same values.

A block is a few scales and the integers of 32 or 256 inputs that follow each other. Their bytes, by
type: ``ggml-common.h`` and ``dequantize_row_...`` of ``ggml-quants.c``, in
https://github.com/ggml-org/llama.cpp/tree/master/ggml/src. Types of fewer than 4 bits, and those
that look their values up in a table, are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch

from trencadis.engine.models.packed_weight import PackedWeight, WeightFormat, pack_int4


@attrs.frozen
class BlockType:
    """A type of blocks: so many ``bytes`` have ``inputs`` integers of ``bits``, in groups.

    ``read`` gets blocks, uint8 ``[blocks, bytes]``, and gives integers ``[blocks, inputs]``, scales
    and, where the type has them, minimums ``[blocks, inputs / group]``.
    """

    bytes: int
    inputs: int
    bits: int
    group: int
    read: Callable[[torch.Tensor], _Parts]

    def form(self, name: str) -> WeightFormat:
        """How users see a weight of this type."""
        return WeightFormat(f"gguf {name}", self.bits, group=self.group)

    def packed(self, rows: torch.Tensor) -> PackedWeight:
        """The weight of uint8 ``[outputs, bytes]``, blocks that follow each other."""
        shape = len(rows), -1
        integers, scales, minimums = self.read(rows.reshape(-1, self.bytes))
        steps = integers.reshape(shape)
        return PackedWeight(
            pack_int4(steps) if self.bits == 4 else steps.to(torch.int8),
            scales.reshape(shape).contiguous(),
            minimums=None if minimums is None else minimums.reshape(shape).contiguous(),
        )


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _q4_0(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[:, 2:18]), _fp16(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[:, 4:20]), _fp16(blocks, 0), _fp16(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[:, 6:22]) + 16 * _bits(blocks[:, 2:6]) - 16, _fp16(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> _Parts:
    integers = _nibbles(blocks[:, 8:24]) + 16 * _bits(blocks[:, 4:8])
    return integers, _fp16(blocks, 0), _fp16(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return blocks[:, 2:34].view(torch.int8), _fp16(blocks, 0), None


def _q4_k(blocks: torch.Tensor) -> _Parts:
    return _nibbles_of_64(blocks[:, 16:144]), *_of_six_bits(blocks)


def _q5_k(blocks: torch.Tensor) -> _Parts:
    # Bit j of a byte belongs to its input in the j-th group of 32.
    fifths = (blocks[:, None, 16:48] >> _shifts(range(8))) & 1
    integers = _nibbles_of_64(blocks[:, 48:176]) + 16 * fifths.flatten(1)
    return integers, *_of_six_bits(blocks)


def _q6_k(blocks: torch.Tensor) -> _Parts:
    low, high = blocks[:, :128].view(-1, 2, 1, 64), blocks[:, 128:192].view(-1, 2, 1, 32)
    fours = torch.cat((low & 15, low >> 4), dim=2).flatten(2)  # of 128 inputs
    twos = ((high >> _shifts(range(0, 8, 2))) & 3).flatten(2)
    integers = (fours | (twos << 4)).flatten(1).to(torch.int8) - 32
    scales = blocks[:, 192:208].view(torch.int8)
    return integers, _fp16(blocks, 208).float() * scales, None


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(18, 32, 4, 32, _q4_0),
    "Q4_1": BlockType(20, 32, 4, 32, _q4_1),
    "Q5_0": BlockType(22, 32, 8, 32, _q5_0),
    "Q5_1": BlockType(24, 32, 8, 32, _q5_1),
    "Q8_0": BlockType(34, 32, 8, 32, _q8_0),
    "Q4_K": BlockType(144, 256, 4, 32, _q4_k),
    "Q5_K": BlockType(176, 256, 8, 32, _q5_k),
    "Q6_K": BlockType(210, 256, 8, 16, _q6_k),
}
"""Those that are read, by the names of llama.cpp."""


def _fp16(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """fp16 ``[blocks, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _shifts(bits: range) -> torch.Tensor:
    """``[shifts, 1]``."""
    return torch.tensor(bits, dtype=torch.uint8)[:, None]


def _bits(words: torch.Tensor) -> torch.Tensor:
    """int8 ``[blocks, 32]`` of uint8 ``[blocks, 4]``, the lowest bit first."""
    return ((words[:, :, None] >> _shifts(range(8)).T) & 1).flatten(1).to(torch.int8)


def _nibbles(halves: torch.Tensor) -> torch.Tensor:
    """int8 of 0 to 15: the lower four bits of all bytes, then the upper ones."""
    return torch.cat((halves & 15, halves >> 4), dim=1).to(torch.int8)


def _nibbles_of_64(halves: torch.Tensor) -> torch.Tensor:
    """As `_nibbles`, of 32 bytes each."""
    return _nibbles(halves.reshape(-1, 32)).view(len(halves), -1)


def _of_six_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums ``[blocks, 8]``, fp32: exact products of fp16 and six bits.

    The first four of both have six bits of a byte each; of the others four bits share a byte, and
    the upper two are what the first ones leave free: ``get_scale_min_k4``.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=1)
    minimums = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=1)
    return _fp16(blocks, 0).float() * scales, _fp16(blocks, 2).float() * -minimums.float()
