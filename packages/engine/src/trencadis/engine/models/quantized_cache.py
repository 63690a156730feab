"""A KV cache in 8 bits: of each token and head, the codes of a row and its scale, side by side.

A part of the cache is a tensor of `KVCache`, ``[blocks, K, S, D + 2]``, whose dtype is that of the
codes. The bytes of a block and head are the codes, ``[S, D]``, then the scales, ``[S]`` in bf16. So
whatever moves blocks moves their scales: swaps, copies, defragmentation.

A token has a scale of its own, in place of one for each block: then what is stored of a token does
not depend on the tokens after it, nor on how a prompt was cut. A number is its code times the
scale, which is the row's largest magnitude divided by the largest code, up to the next bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trencadis.kvcache.tensors import LayerShape

CACHE_DTYPES: Mapping[str, torch.dtype] = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "fp8_inc": torch.float8_e4m3fn,
}
"""Those of `EngineConfig.kv_cache_dtype`, without ``auto``; the last are vLLM's names, of which
``fp8_inc`` is for a Gaudi. Where a cache has token rows (`KVCache`), they have no scales."""

CODES = frozenset(CACHE_DTYPES.values())
"""The dtypes of a cache in 8 bits."""

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

SCALE_BYTES = torch.bfloat16.itemsize

_TINY = torch.finfo(torch.float32).tiny


def with_scales(layers: Sequence[LayerShape]) -> list[LayerShape]:
    """The shapes that a cache of codes has for these layers."""
    return [
        LayerShape(each.kv_heads, each.key_width + SCALE_BYTES, each.value_width + SCALE_BYTES)
        for each in layers
    ]


def quantized(rows: torch.Tensor, codes: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite rows ``[..., D]`` as codes ``[..., D]``, and their scales ``[..., 1]`` in bf16."""
    numbers = rows.float()
    top = numbers.abs().amax(-1, keepdim=True) / _LARGEST[codes]
    scales = ((top.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    is_zero = scales < _TINY
    numbers = torch.where(is_zero, 0.0, numbers / scales)
    if codes is torch.int8:
        numbers = numbers.round()
    return numbers.to(codes), torch.where(is_zero, 0.0, scales).bfloat16()


class QuantizedPart:
    """The keys or the values of a layer in ``held``, read and written as a tensor of ``dtype``.

    Implements of a tensor ``[blocks, K, S, D]`` what `BlockAttention` uses.
    """

    def __init__(self, held: torch.Tensor, dtype: torch.dtype) -> None:
        self._codes = held.dtype
        self._dtype = dtype
        self._bytes = held.view(torch.uint8).flatten(2)
        *axes, size, width = held.shape
        self.shape = torch.Size((*axes, size, width - SCALE_BYTES))

    def __setitem__(self, index: tuple[torch.Tensor, slice, torch.Tensor], rows: Any) -> None:
        """Write finite rows ``[T, K, D]`` into slots: blocks, all heads, offsets in the blocks."""
        codes, scales = quantized(rows, self._codes)
        of_codes, of_scales = self._split(self._bytes)
        of_codes[index] = codes.view(torch.uint8)
        of_scales[index] = scales.view(torch.uint8)

    def __getitem__(self, blocks: torch.Tensor | slice) -> torch.Tensor:
        codes, scales = self._split(self._bytes[blocks])
        return self._expanded(codes.contiguous().view(self._codes), scales.contiguous())

    def index_select(self, axis: int, blocks: torch.Tensor) -> torch.Tensor:
        """Some blocks; ``axis`` is 0."""
        del axis
        return self[blocks]

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in the values that the cache gives back for them."""
        codes, scales = quantized(rows.nan_to_num(0.0, 0.0, 0.0), self._codes)
        return self._expanded(codes, scales)

    def _split(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[..., S, D]`` and ``[..., S, 2]`` of the bytes ``[..., S * (D + 2)]``."""
        size, width = self.shape[2:]
        axes, end = blocks.shape[:-1], size * width
        codes = blocks[..., :end].view(*axes, size, width)
        return codes, blocks[..., end:].view(*axes, size, SCALE_BYTES)

    def _expanded(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Finite numbers: a scale that was rounded up could make the largest ones infinite."""
        largest = torch.finfo(self._dtype).max
        numbers = codes.float() * scales.view(torch.bfloat16).float()
        return numbers.clamp_(-largest, largest).to(self._dtype)
