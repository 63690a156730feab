"""Keys or values of a layer in the KV cache, a row for each token: in the model's dtype or in FP8.

FP8 by the bridge's ``cast_to_fp8_v2`` and ``cast_from_fp8`` (``hpu_ops/backend/fp8_ops.cpp``
1.19.0), with a scale of 1, as vllm-gaudi 091bbad (``extension/utils.py:96-123``): those of a
checkpoint are applied before (`cache_scales`). Rows of FP8 are written and gathered as others are:
tests of the bridge have both types for ``index_copy_`` and ``index_select``
(``test_hpu_index_copy.py:25``, ``test_hpu_index_select.py:25``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import attrs
import torch

from trencadis.engine.devices.hpu.kernels import agrees
from trencadis.engine.errors import ConfigError
from trencadis.engine.models.packed_weight import LARGEST_FP8

LARGEST: Mapping[torch.dtype, float] = {
    torch.float8_e4m3fn: LARGEST_FP8,
    torch.float8_e5m2: torch.finfo(torch.float8_e5m2).max,
}
"""The largest number that a cache of each type holds. Where Gaudi 3 has larger ones, Gaudi 2 reads
NaN, and a tier of blocks may have both."""


@attrs.frozen(eq=False)
class CachedRows:
    """``held``: ``[blocks * S, K, D]``, read in ``dtype``. The letters are of `paged_context`."""

    held: torch.Tensor
    block_size: int
    dtype: torch.dtype

    @property
    def is_rounded(self) -> bool:
        return self.held.dtype in LARGEST

    def in_place(self, first: int, num_blocks: int) -> torch.Tensor:
        """Blocks that follow each other, ``[num_blocks, K, S, D]``; without a copy but for FP8."""
        rows = self.held.narrow(0, first * self.block_size, num_blocks * self.block_size)
        return self._blocks(self._numbers(rows)).transpose(1, 2)

    def selected(self, blocks: torch.Tensor) -> torch.Tensor:
        """These blocks, ``[len(blocks), K, S, D]``."""
        return self._gathered(blocks).transpose(1, 2)

    def of_sequences(self, blocks: torch.Tensor, batch: int) -> torch.Tensor:
        """Blocks ``[B * C]`` as ``[B, K, C * S, D]``."""
        found = self._gathered(blocks)
        return found.reshape(batch, -1, *self.held.shape[1:]).transpose(1, 2)

    def tokens(self, first: int, count: int) -> torch.Tensor:
        """Rows that follow each other, ``[K, count, D]``."""
        return self._numbers(self.held.narrow(0, first, count)).transpose(0, 1)

    def _gathered(self, blocks: torch.Tensor) -> torch.Tensor:
        return self._numbers(self._blocks(self.held).index_select(0, blocks))

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """``[blocks * S, K, D]`` as ``[blocks, S, K, D]``."""
        return rows.view(-1, self.block_size, *rows.shape[1:])

    def _numbers(self, rows: torch.Tensor) -> torch.Tensor:
        return as_read(rows, self.dtype)


def as_kept(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Finite rows in the type of a cache: to the nearest number of FP8, at most the largest."""
    if dtype not in LARGEST:
        return rows
    bounded = rows.clamp(-LARGEST[dtype], LARGEST[dtype])
    kept: torch.Tensor = torch.ops.hpu.cast_to_fp8_v2(bounded, 1.0, False, False, dtype)[0]
    return kept


def as_read(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a cache in the type that is computed with."""
    if rows.dtype not in LARGEST:
        return rows
    read: torch.Tensor = torch.ops.hpu.cast_from_fp8(rows, 1.0, dtype)
    return read


def check_kernels(device: torch.device, dtype: torch.dtype, kept: torch.dtype) -> None:
    """Raise `ConfigError` where the kernels of a cache of FP8 do not give PyTorch's results."""
    trial = functools.partial(cache_trial, device, dtype, kept)
    if not agrees("cast_from_fp8", trial, dtype):
        raise ConfigError(
            "kv_cache_dtype: FP8 needs cast_to_fp8_v2, cast_from_fp8, index_copy_, index_select, "
            "stack and copies to the host, some of which fail or differ here: leave it out",
            "kv_cache_dtype",
        )


def cache_trial(
    device: torch.device,
    dtype: torch.dtype,
    kept: torch.dtype = torch.float8_e4m3fn,
    *,
    kv_heads: int = 2,
    width: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of FP8 that were written, swapped out and in, and gathered in blocks.

    Some are beyond the largest.
    """
    values = torch.Generator().manual_seed(0)
    rows = torch.randn(6, kv_heads, width, generator=values) * 2.0 ** torch.arange(-4, 8, 2).view(
        -1, 1, 1
    )
    rows[0, 0, 0], rows[1, 0, 0] = 2 * LARGEST[kept], -2 * LARGEST[kept]
    rows = rows.to(dtype)
    slots, blocks = torch.tensor([9, 2, 3, 11, 4, 0]), torch.tensor([2, 0, 1])
    expected = torch.zeros(12, kv_heads, width)
    bounded = rows.float().clamp(-LARGEST[kept], LARGEST[kept])
    expected[slots] = bounded.to(kept).float()
    held = torch.zeros(12, kv_heads, width, dtype=kept, device=device)
    held.index_copy_(0, slots.to(device), as_kept(rows.to(device), kept))
    # As `RowCopier` swaps blocks, on the host as bytes.
    on_host = torch.stack((held, held), dim=1).cpu().view(torch.uint8)
    swapped = on_host.view(kept).to(device).unbind(1)[1]
    held = torch.zeros_like(held).index_copy_(0, torch.arange(12, device=device), swapped)
    found = CachedRows(held, 4, dtype).of_sequences(blocks.to(device), 1).cpu()
    return found, expected.view(3, 4, kv_heads, width)[blocks].flatten(0, 1).transpose(0, 1)[None]
