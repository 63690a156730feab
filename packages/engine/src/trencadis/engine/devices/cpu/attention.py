"""Attention on the CPU: native kernels for decode and ragged prefill, PyTorch's operations else.

Prefill has a kernel in bf16 where the processor multiplies vectors of bf16 and no tiles of it. It
takes keys and values from the cache, so that a chunk's result does not depend on where it was cut.
It has none for layers with a window or a chunk.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from trencadis.engine.devices.cpu.native_calls import (
    Address,
    address_of,
    float_bits,
    is_recording,
    note,
)
from trencadis.engine.devices.cpu.native_kernel import (
    WAYS,
    NoKernel,
    fastest,
    load_kernel,
    no_memory,
)
from trencadis.engine.models.block_attention import BlockAttention, attend_in_parts
from trencadis.engine.models.layer_spec import LIMITS, LayerSpec, feature_beyond
from trencadis.engine.models.paged_context import (
    MASKED,
    DecodeContext,
    MixedContext,
    PagedContext,
    RaggedChunk,
    RaggedContext,
)
from trencadis.engine.models.quantized_cache import SCALE_BYTES, QuantizedPart

_SOURCE = Path(__file__).with_name("paged_attention.cpp")
_DTYPES = {torch.bfloat16: 1, torch.float32: 0}
_CODES = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
_TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}
"""Largest difference to PyTorch's operations in a trial, where values are about 1."""

_TOLERANCE_OF_CODES = 0.03
"""The same for a cache of codes: the kernel may round queries to 14 bits."""

_LANES = 16
"""A head is a whole number of the kernel's vectors."""

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_ROWS: tuple[Any, ...] = (
    *(_POINTER, _INTEGER, _INTEGER),
    *(_POINTER, _POINTER, *[_INTEGER] * 4),
    *[_POINTER] * 5,
)
"""What both kernels take first: queries, keys and values, the result, the cache, and the slots."""

_STRIDES_OF_ROWS = (1, 2, 5, 6, 7, 8)
"""Of what `_rows` returns, those that are not addresses."""

OF_CACHE = 2
"""How many of `changing_arguments` depend on the layer: the place of its cache."""

_DECODE: tuple[Any, ...] = (*_ROWS, *[_POINTER] * 3, *[_INTEGER] * 7)
_PREFILL: tuple[Any, ...] = (*_ROWS, _POINTER, *[_INTEGER] * 4, ctypes.c_float, *[_INTEGER] * 4)


@attrs.frozen(eq=False)
class AttentionKernel:
    """The functions of the source, compiled for the heads and the type of a model.

    They take the arguments of the source, in order. ``prefill`` is None where PyTorch's operations
    are faster. ``groups`` are the query heads of each KV head. ``cached`` and ``cached_width``: the
    dtype and the width of a row in the cache, those of a head or of its codes (`quantized_cache`).
    ``widens``: whether prefill multiplies bf16 widened to fp32, or pairs of bf16 (see
    `load_linear_kernel`).
    """

    decode: Callable[..., int]
    prefill: Callable[..., int] | None
    groups: int
    head_dim: int
    dtype: torch.dtype
    cached: torch.dtype
    cached_width: int
    widens: bool = False

    @functools.lru_cache(maxsize=256)  # noqa: B019 - kernels live as long as the process
    def supports(self, layer: LayerSpec) -> str | None:
        """See `Attention.supports`. What is not supported is computed by PyTorch's operations.

        Of a layer with `LIMITS`, prefill is given them, and the blocks and the bias of decode have
        them already (`DecodeContext.within`).
        """
        sizes = (self.groups * layer.kv_heads, self.head_dim, self.head_dim)
        if (layer.heads, layer.key_width, layer.value_width) != sizes:
            return f"has other heads than {self.head_dim} wide, {self.groups} for a KV head"
        return feature_beyond(layer, LIMITS)

    def fits(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor
    ) -> bool:
        """Whether it can compute these rows with this cache of a layer.

        The functions get addresses: they would read beyond heads of another size or number.
        """
        batch, heads, tokens, _ = query.shape
        rows = (batch, keys.shape[1], tokens, self.head_dim)
        return (
            query.shape[3] == self.head_dim
            and keys.shape[3] == self.cached_width
            and keys.dtype is self.cached
            and heads == self.groups * keys.shape[1]
            and key.shape == value.shape == rows
            and all(x.dtype is self.dtype for x in (query, key, value))
        )


_WIDENS: dict[tuple[int, int, torch.dtype, torch.dtype], bool] = {}
"""How each kernel multiplies: what was measured once holds for the process, so that a model that
is loaded again computes the same."""


class CPUAttention:
    """Implements `Attention`. ``kernel`` is `attention_kernel`'s; None for PyTorch's operations."""

    token_rows = False
    as_operator = True
    scores_shared = False
    reads_groups = True
    reads_recent = False  # `DecodeContext.narrowed` reads fewer

    def __init__(self, kernel: AttentionKernel | None = None) -> None:
        self._blocks = BlockAttention()
        self._kernel = kernel

    def prepare(self, paged: PagedContext, dtype: torch.dtype) -> PagedContext:
        """Nothing but a place for what layers of one window share."""
        del dtype
        changes: dict[str, Any] = {}
        if paged.groups:
            pass  # each has such a place
        elif isinstance(paged, DecodeContext):
            changes["narrowed"] = {}
        elif isinstance(paged, MixedContext):
            changes["decode"] = attrs.evolve(paged.decode, narrowed={})
        return attrs.evolve(paged, attention=self, **changes)

    def supports(self, layer: LayerSpec) -> str | None:
        """What PyTorch's operations support: the kernel is for some of it."""
        return self._blocks.supports(layer)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        paged: Any,
        spec: LayerSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write, then attend: see `Attention.attend`."""
        if paged.groups:
            paged = paged.groups[paged.group_of[layer]]
        if isinstance(paged, MixedContext):
            return attend_in_parts(self.attend, query, key, value, layer, paged, spec, sinks)
        kernel = self._kernel
        if (
            kernel is None
            or kernel.supports(spec) is not None
            or not kernel.fits(query, key, value, paged.cache.key(layer))
        ):
            return self._blocks.attend(query, key, value, layer, paged, spec, sinks)
        scale = spec.scale
        # The kernels read heads as rows of contiguous values.
        query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
        is_limited = spec.has_limits
        if isinstance(paged, DecodeContext):
            seen = paged.within(spec) if is_limited else paged
            return _decode(kernel.decode, query, key, value, layer, seen, scale)
        if isinstance(paged, RaggedContext) and kernel.prefill is not None:
            return _prefill(kernel.prefill, kernel.widens, query, key, value, layer, paged, spec)
        return self._blocks.attend(query, key, value, layer, paged, spec, sinks)


def _decode(
    compute: Callable[..., int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    paged: DecodeContext,
    scale: float,
) -> torch.Tensor:
    keys = paged.cache.key(layer)
    out, rows = _rows(query, key, value)
    sizes = (query.shape[2], keys.shape[1], keys.shape[2])
    given = (
        *(*rows, *_of_cache(layer, paged), *_read(paged)),
        *(*sizes, float_bits(scale), torch.get_num_threads()),
    )
    if compute(*given):
        raise no_memory()
    if is_recording():
        arguments = (x if place in _STRIDES_OF_ROWS else Address(x) for place, x in enumerate(rows))
        changing = range(len(rows), len(given) - len(sizes) - 2)
        note(
            address_of(compute),
            (*arguments, *given[len(rows) :]),
            (out,),
            has_status=True,
            changing=changing,
        )
    return out


def changing_arguments(layer: int, paged: DecodeContext) -> tuple[int, ...]:
    """What a call of the decode kernel for a layer is given by the step and by the cache.

    ``paged`` is that of the layer's window: `DecodeContext.within`.
    """
    return (*_of_cache(layer, paged), *_read(paged))


def _prefill(
    compute: Callable[..., int],
    widens: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    paged: RaggedContext,
    spec: LayerSpec,
) -> torch.Tensor:
    keys = paged.cache.key(layer)
    out, rows = _rows(query, key, value)
    chunks = [number for chunk in paged.chunks for number in _numbers_of(chunk)]
    status = compute(
        *(*rows, *_of_cache(layer, paged)),
        *((_INTEGER * len(chunks))(*chunks), len(paged.chunks)),
        *(query.shape[2], keys.shape[1], keys.shape[2]),
        *(spec.scale, *(limit or 0 for limit in spec.limits)),
        *(torch.get_num_threads(), int(widens)),
    )
    if status:
        raise no_memory()
    return out


def _rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The result of a kernel, to be computed, and the addresses and strides of all rows."""
    _, heads, tokens, size = query.shape
    out = query.new_empty((1, tokens, heads, size))
    return out, (
        *(query.data_ptr(), query.stride(1), query.stride(2)),
        *(key.data_ptr(), value.data_ptr()),
        *(key.stride(1), key.stride(2), value.stride(1), value.stride(2)),
        out.data_ptr(),
    )


def _of_cache(layer: int, paged: DecodeContext | RaggedContext) -> tuple[int, ...]:
    """The addresses of a layer's cache, and of the slots that are written."""
    keys, values = paged.cache.key(layer), paged.cache.value(layer)
    return (
        *(keys.data_ptr(), values.data_ptr()),
        *(paged.write_blocks.data_ptr(), paged.write_offsets.data_ptr()),
    )


def _read(paged: DecodeContext) -> tuple[int, ...]:
    """What tells which blocks each sequence reads, by address and number."""
    extra = paged.extra_blocks
    return (
        *(paged.owners.data_ptr(), paged.bias.data_ptr()),
        *((0, 0) if extra is None else (extra.data_ptr(), extra.shape[0])),
        paged.owners.shape[0],
    )


def _numbers_of(chunk: RaggedChunk) -> tuple[int, int, int, int]:
    """A ``Chunk`` of the source."""
    if chunk.context_blocks is None or chunk.mask is None:
        return chunk.start, chunk.end, 0, 0
    context = chunk.mask.shape[1] - (chunk.end - chunk.start)
    return chunk.start, chunk.end, context, chunk.context_blocks.data_ptr()


def attention_kernel_of(
    layer: LayerSpec,
    dtype: torch.dtype,
    directory: Path | None = None,
    *,
    trusted: bool = False,
    cached: torch.dtype | None = None,
) -> AttentionKernel:
    """`attention_kernel` for such layers, after a trial. Raises `NoKernel`."""
    heads, kv_heads, head_dim = layer.heads, layer.kv_heads, layer.key_width
    kernel = attention_kernel(
        heads, kv_heads, head_dim, dtype, directory, trusted=trusted, cached=cached
    )
    if (lacking := kernel.supports(layer)) is not None:
        raise NoKernel(f"a layer {lacking}")
    found = (False,) if kernel.prefill is None else (True, False)
    ways = {WAYS[way]: attrs.evolve(kernel, widens=way) for way in found}
    for way in ways.values():
        _try(way)
    key = (kernel.groups, head_dim, dtype, kernel.cached)
    if _WIDENS.get(key) not in found:
        _WIDENS[key] = fastest("Attention of prefill", ways, _timed(kernel)).widens
    return ways[WAYS[_WIDENS[key]]]


def attention_kernel(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    directory: Path | None = None,
    *,
    trusted: bool = False,
    cached: torch.dtype | None = None,
) -> AttentionKernel:
    """The kernels for a model, compiled into ``directory`` if it is not there: see `load_kernel`.

    ``cached``: the dtype of a cache of codes; None for one of ``dtype``.
    Raises `NoKernel` where there are none for the model or on this machine.
    """
    if dtype not in _DTYPES:
        raise NoKernel(f"it computes in bf16 and fp32, not in {dtype}")
    if head_dim % _LANES:
        raise NoKernel(f"a head of {head_dim} is not a multiple of {_LANES}")
    codes = 0 if cached is None else _CODES[cached]
    definitions = (
        *(f"D={head_dim}", f"G={heads // kv_heads}"),
        *(f"BF16={_DTYPES[dtype]}", f"CODES={codes}"),
    )
    library = load_kernel(_SOURCE, definitions, directory, trusted=trusted)
    decode, prefill = library.decode_attention, getattr(library, "prefill_attention", None)
    decode.argtypes, decode.restype = _DECODE, ctypes.c_int
    if prefill is not None:
        prefill.argtypes, prefill.restype = _PREFILL, ctypes.c_int
    width = head_dim + SCALE_BYTES if codes else head_dim
    groups = heads // kv_heads
    return AttentionKernel(decode, prefill, groups, head_dim, dtype, cached or dtype, width)


_TRIAL_BLOCKS, _TRIAL_KV_HEADS, _TRIAL_BLOCK_SIZE = 8, 2, 24


def _try(kernel: AttentionKernel) -> None:
    """Raise `NoKernel` where the kernel's result differs from that of PyTorch's operations."""
    dtype = kernel.dtype
    held, spec = _trial_cache(kernel), _trial_spec(kernel)
    for make_context, tokens in ((_trial_decode, 3), (_trial_prefill, 40)):
        query, key, value = _trial_rows(kernel, tokens)
        expected, result = (
            attention.attend(query, key, value, 0, make_context(held.clone()), spec)
            for attention in (CPUAttention(), CPUAttention(kernel))
        )
        error = (result.float() - expected.float()).abs().max().item()
        most = _TOLERANCE[dtype] if kernel.cached is dtype else _TOLERANCE_OF_CODES
        if not error <= most:
            raise NoKernel(f"its result is off by {error:.3g}")


def _timed(kernel: AttentionKernel) -> Callable[[AttentionKernel], object]:
    """What decides how a kernel multiplies: the chunks of the trial."""
    context, rows = _trial_prefill(_trial_cache(kernel)), _trial_rows(kernel, 40)
    return lambda way: CPUAttention(way).attend(*rows, 0, context, _trial_spec(way))


def _trial_spec(kernel: AttentionKernel) -> LayerSpec:
    return LayerSpec(
        heads=kernel.groups * _TRIAL_KV_HEADS,
        kv_heads=_TRIAL_KV_HEADS,
        key_width=kernel.head_dim,
        value_width=kernel.head_dim,
        scale=kernel.head_dim**-0.5,
    )


def _trial_cache(kernel: AttentionKernel) -> torch.Tensor:
    blocks, size = _TRIAL_BLOCKS, _TRIAL_BLOCK_SIZE
    shape = (2 * blocks, size, _TRIAL_KV_HEADS, kernel.head_dim)
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kernel.dtype)
    if kernel.cached is kernel.dtype:
        held = rows.transpose(1, 2).contiguous()
        return held.view(2, blocks, *held.shape[1:])
    held = torch.zeros(
        *(2 * blocks, _TRIAL_KV_HEADS, size, kernel.cached_width), dtype=kernel.cached
    )
    part, numbers = QuantizedPart(held, kernel.dtype), torch.arange(2 * blocks * size)
    part[numbers // size, :, numbers % size] = rows.flatten(0, 1)
    return held.view(2, blocks, *held.shape[1:])


def _trial_rows(
    kernel: AttentionKernel, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values."""
    random = torch.Generator().manual_seed(tokens)

    def rows(heads: int) -> torch.Tensor:
        shape = (1, heads, tokens, kernel.head_dim)
        return torch.randn(shape, generator=random).to(kernel.dtype)

    return rows(kernel.groups * _TRIAL_KV_HEADS), rows(_TRIAL_KV_HEADS), rows(_TRIAL_KV_HEADS)


def _trial_decode(held: torch.Tensor) -> DecodeContext:
    """Three sequences of two blocks, the last of which have 11 tokens."""
    _, blocks, _, size, _ = held.shape
    batch = 3
    bias = torch.zeros(blocks, 1, 1, size)
    bias[4:7, :, :, 11:] = MASKED
    owners = torch.tensor([batch, 0, 1, 2, 0, 1, 2, batch])
    return DecodeContext(
        *(_OneCache(size, held), blocks, torch.arange(4, 7), torch.full((batch,), 10)),
        *(owners, owners.clamp_max(batch - 1), bias),
    )


def _trial_prefill(held: torch.Tensor) -> RaggedContext:
    """A chunk of 13 tokens, and one of 25 after a context of 50; two tokens of padding."""
    size, context = held.shape[3], 50
    positions = torch.cat((torch.arange(13), context + torch.arange(25), torch.zeros(2))).long()
    tables = torch.tensor([[7, 0, 0, 0], [3, 1, 5, 6]])
    rows = torch.tensor([0] * 13 + [1] * 25 + [0] * 2)
    blocks = tables[rows, positions // size]
    blocks[-2:] = 0
    mask = torch.ones(25, context + 25, dtype=torch.bool).tril_(context)
    chunks = (RaggedChunk(0, 13, None, None), RaggedChunk(13, 38, tables[1, :3], mask))
    return RaggedContext(_OneCache(size, held), blocks, positions % size, chunks)


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
