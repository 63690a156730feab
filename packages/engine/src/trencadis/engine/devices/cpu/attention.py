"""Attention on the CPU: a native kernel for decode, PyTorch's operations for the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import PreTrainedConfig

from trencadis.engine.devices.cpu.native_kernel import NoKernel, load_kernel
from trencadis.engine.models.block_attention import BlockAttention
from trencadis.engine.models.paged_context import MASKED, DecodeContext, PagedContext

_SOURCE = Path(__file__).with_name("decode_attention.cpp")
_DTYPES = {torch.bfloat16: 1, torch.float32: 0}
_TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}
"""Largest difference to PyTorch's operations in a trial, where values are about 1."""

_LANES = 16
"""A head is a whole number of the kernel's vectors."""

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: tuple[Any, ...] = (
    *(_POINTER, _INTEGER, _INTEGER),
    *(_POINTER, _POINTER, *[_INTEGER] * 4),
    *[_POINTER] * 3,
    *[_POINTER] * 5,
    *[_INTEGER] * 5,
    *(ctypes.c_float, _INTEGER),
)


@attrs.frozen(eq=False)
class DecodeKernel:
    """``decode_attention`` of the source, compiled for the heads and the type of a model.

    ``compute`` takes the arguments of the source, in order. ``groups`` are the query heads of each
    KV head.
    """

    compute: Callable[..., None]
    groups: int
    head_dim: int
    dtype: torch.dtype

    def fits(self, query: torch.Tensor, keys: torch.Tensor) -> bool:
        """Whether it can compute these queries with this cache of a layer."""
        return (
            query.shape[3] == keys.shape[3] == self.head_dim
            and query.shape[1] == self.groups * keys.shape[1]
            and query.dtype is keys.dtype is self.dtype
        )


class CPUAttention:
    """Implements `Attention`. ``kernel`` is `decode_kernel`'s; None for PyTorch's operations."""

    token_rows = False
    as_operator = True

    def __init__(self, kernel: DecodeKernel | None = None) -> None:
        self._blocks = BlockAttention()
        self._kernel = kernel

    def prepare(self, paged: PagedContext, dtype: torch.dtype) -> PagedContext:
        """Nothing to derive."""
        del dtype
        return attrs.evolve(paged, attention=self)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        paged: Any,
        scale: float,
    ) -> torch.Tensor:
        """Write, then attend: see `Attention.attend`."""
        keys, values = paged.cache.key(layer), paged.cache.value(layer)
        kernel = self._kernel
        if kernel is None or not isinstance(paged, DecodeContext) or not kernel.fits(query, keys):
            return self._blocks.attend(query, key, value, layer, paged, scale)
        _, heads, batch, size = query.shape
        extra = paged.extra_blocks
        # The kernel reads heads as rows of contiguous values.
        query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
        out = query.new_empty((1, batch, heads, size))
        kernel.compute(
            *(query.data_ptr(), query.stride(1), query.stride(2)),
            *(key.data_ptr(), value.data_ptr()),
            *(key.stride(1), key.stride(2), value.stride(1), value.stride(2)),
            *(out.data_ptr(), keys.data_ptr(), values.data_ptr()),
            *(paged.write_blocks.data_ptr(), paged.write_offsets.data_ptr()),
            *(paged.owners.data_ptr(), paged.bias.data_ptr()),
            None if extra is None else extra.data_ptr(),
            0 if extra is None else extra.shape[0],
            *(paged.owners.shape[0], batch, keys.shape[1], keys.shape[2]),
            *(scale, torch.get_num_threads()),
        )
        return out


def decode_kernel_of(config: PreTrainedConfig, dtype: torch.dtype) -> DecodeKernel:
    """`decode_kernel` for a model with this configuration, after a trial. Raises `NoKernel`."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kernel = decode_kernel(heads, kv_heads, head_dim, dtype)
    _try(kernel, heads // kv_heads, head_dim, dtype)
    return kernel


def decode_kernel(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, directory: Path | None = None
) -> DecodeKernel:
    """The kernel for a model, compiled into ``directory`` if it is not there.

    Raises `NoKernel` where there is none for the model or on this machine.
    """
    if dtype not in _DTYPES:
        raise NoKernel(f"it computes in bf16 and fp32, not in {dtype}")
    if head_dim % _LANES:
        raise NoKernel(f"a head of {head_dim} is no multiple of {_LANES}")
    definitions = (f"D={head_dim}", f"G={heads // kv_heads}", f"BF16={_DTYPES[dtype]}")
    compute = load_kernel(_SOURCE, definitions, directory).decode_attention
    compute.argtypes, compute.restype = _ARGUMENTS, None
    return DecodeKernel(compute, heads // kv_heads, head_dim, dtype)


def _try(kernel: DecodeKernel, groups: int, head_dim: int, dtype: torch.dtype) -> None:
    """Raise `NoKernel` where the kernel's result differs from that of PyTorch's operations."""
    batch, blocks, kv_heads, size = 3, 8, 2, 24
    random = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    query = tensor(1, groups * kv_heads, batch, head_dim)
    key, value = tensor(1, kv_heads, batch, head_dim), tensor(1, kv_heads, batch, head_dim)
    held = tensor(2, blocks, kv_heads, size, head_dim)
    bias = torch.zeros(blocks, 1, 1, size)
    bias[4:7, :, :, 11:] = MASKED
    rows = torch.arange(batch)
    results = []
    for attention in (CPUAttention(kernel), CPUAttention()):
        owners = torch.tensor([batch, 0, 1, 2, 0, 1, 2, batch])
        paged = DecodeContext(
            *(_OneCache(size, held.clone()), blocks, rows + 4, torch.full((batch,), 10)),
            *(owners, owners.clamp_max(batch - 1), bias),
        )
        results.append(attention.attend(query, key, value, 0, paged, head_dim**-0.5).float())
    error = (results[0] - results[1]).abs().max().item()
    if not error <= _TOLERANCE[dtype]:
        raise NoKernel(f"its result is off by {error:.3g}")


@attrs.frozen(eq=False)
class _OneCache:
    """Implements `LayerCaches` for one layer: ``held`` is ``[2, blocks, K, S, D]``."""

    block_size: int
    held: torch.Tensor

    def key(self, layer: int) -> torch.Tensor:
        del layer
        return self.held[0]

    def value(self, layer: int) -> torch.Tensor:
        del layer
        return self.held[1]
