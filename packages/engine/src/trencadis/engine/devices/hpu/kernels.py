"""Intel's fused kernels: prefill attention, softmax over blocks, RMSNorm, rotary embedding.

Releases of Intel's software differ in their kernels. So each kernel is compared with PyTorch on a
small input when a model is loaded. One that differs, or raises an error, is not used, with a
warning; the model is served without it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from trencadis.engine.devices.kernel_trial import (
    TOLERANCE,
    KernelTrial,
    WrongShapeError,
    largest_difference,
)
from trencadis.engine.models.layer_spec import LayerSpec
from trencadis.engine.models.paged_context import MASKED

logger = logging.getLogger("trencadis.engine")

SLICED_FROM = 8192
"""Keys from which prefill with context is computed in slices: the default of vllm-gaudi's
``VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD`` (``vllm_gaudi/extension/utils.py``)."""

SLICE = SLICED_FROM // 2
"""Queries and keys of a slice: the default of ``VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE``."""

PromptKernel = Callable[..., torch.Tensor]
"""Called like `prompt_attention`."""

BlockAdjustment = Callable[..., torch.Tensor]
"""Called like `block_adjustment`."""


@attrs.frozen
class Kernels:
    """The kernels that attention uses; None where PyTorch's operations are used."""

    prompt_attention: PromptKernel | None = None
    block_adjustment: BlockAdjustment | None = None


def use_fused_kernels(model: nn.Module, device: torch.device, softmax_mode: str) -> Kernels:
    """Replace norms and rotary embeddings of ``model`` in place, and find those of attention.

    ``softmax_mode`` is that of FusedSDPA: ``fast`` or ``fp32``.
    """
    dtype = next(model.parameters()).dtype
    _use_norms(model)
    _use_rotary(model, dtype, device)
    heads = _head_shapes(model)
    return Kernels(
        _usable_attention(heads, dtype, device, softmax_mode),
        _usable_adjustment(heads, dtype, device),
    )


# Prefill attention.


def prompt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of ``[B, H, Q, D]`` to ``[B, K, L, D]`` by PyTorch's operations.

    ``bias`` is ``[B, 1, Q, L]``, or None for a causal mask. ``lengths`` is ``[B]``, the queries
    that are not padding: the results of the others are not defined. It is not needed here.
    """
    del lengths
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, bias, is_causal=bias is None, scale=scale, enable_gqa=grouped
    )


class FusedPromptAttention:
    """FusedSDPA, called like `prompt_attention`.

    It skips padding only where the mask is causal: «Valid sequence length is supported only in
    inference with is_causal» (``habana_frameworks/torch/hpex/kernels/FusedSDPA.py:122-125`` of the
    bridge). ``sliced_from`` and ``slice_length`` are in tokens.
    """

    def __init__(
        self,
        kernel: Any,
        softmax_mode: str,
        sliced_from: int = SLICED_FROM,
        slice_length: int = SLICE,
    ) -> None:
        self._kernel = kernel
        self._softmax_mode = softmax_mode
        self._sliced_from = sliced_from
        self._slice = slice_length

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        bias: torch.Tensor | None,
        lengths: torch.Tensor | None,
    ) -> torch.Tensor:
        """Shapes ``[B, H, Q, D]`` and ``[B, K, L, D]``. The kernel handles grouped heads itself."""
        if bias is not None and key.shape[2] >= self._sliced_from:
            return self._sliced(query, key, value, scale, bias)
        causal = bias is None
        out: torch.Tensor = self._kernel.apply(
            *(query, key, value, bias, 0.0, causal, scale),
            *(self._softmax_mode, True, lengths if causal else None, "right"),
        )
        return out

    def _sliced(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        """Attention in slices of queries and keys, combined by their maxima and sums.

        A slice of queries leaves out the keys of the chunk that come after it. Signature of the
        operation and its results: ``sdpa_fwd_wrapper`` in the bridge's FusedSDPA.py.
        """
        grouped = query.shape[1] != key.shape[1]
        if grouped:
            query = query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:])
            key, value, bias = key.unsqueeze(2), value.unsqueeze(2), bias.unsqueeze(1)
        context = key.shape[-2] - query.shape[-2]
        parts = []
        for start in range(0, query.shape[-2], self._slice):
            rows = slice(start, min(start + self._slice, query.shape[-2]))
            merged: list[_Partial] = []
            for first in range(0, context + rows.stop, self._slice):
                columns = slice(first, min(first + self._slice, context + rows.stop))
                found = torch.ops.hpu.sdpa_recomp_fwd(
                    query[..., rows, :].contiguous(),
                    key[..., columns, :].contiguous(),
                    value[..., columns, :].contiguous(),
                    bias[..., rows, columns].contiguous(),
                    *(0.0, scale, False, True, self._softmax_mode, None, "right"),
                )
                out, peak, inverse = (x.float() for x in found[:3])
                merged = [*merged, (out, peak, 1.0 / inverse)]
            parts.append(functools.reduce(_merge, merged)[0])
        joined = torch.cat(parts, dim=-2).to(query.dtype)
        return joined.flatten(1, 2) if grouped else joined


_Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Normalised output, maximum of the scores, sum of the exponentials."""


def _merge(first: _Partial, second: _Partial) -> _Partial:
    """The attention to the keys of both parts."""
    peak = torch.maximum(first[1], second[1])
    weights = [part[2] * torch.exp(part[1] - peak) for part in (first, second)]
    total = weights[0] + weights[1]
    return (first[0] * weights[0] + second[0] * weights[1]) / total, peak, total


_HeadShape = tuple[int, int, int, int]
"""Heads of queries, heads of keys and values, width of a key, width of a value."""


def _head_shapes(model: nn.Module) -> list[_HeadShape]:
    """Those of the model's layers, or of Llama's where the layers were not declared."""
    specs = [vars(module).get("layer_spec") for module in model.modules()]
    shapes = {
        (spec.heads, spec.kv_heads, spec.key_width, spec.value_width)
        for spec in specs
        if isinstance(spec, LayerSpec) and spec.kv_heads
    }
    return sorted(shapes) or [(4, 2, 64, 64)]


def _usable_attention(
    heads: list[_HeadShape], dtype: torch.dtype, device: torch.device, softmax_mode: str
) -> PromptKernel | None:
    kernel = _kernel("kernels", "FusedSDPA")
    if kernel is None:
        return None
    fused = FusedPromptAttention(kernel, softmax_mode)
    small_slices = FusedPromptAttention(kernel, softmax_mode, sliced_from=12, slice_length=4)

    def tried(what: str, attend: PromptKernel) -> bool:
        trials = [
            functools.partial(
                attention_trial,
                attend,
                dtype,
                device,
                heads=num_heads,
                kv_heads=kv_heads,
                width=key_width,
                value_width=value_width,
            )
            for num_heads, kv_heads, key_width, value_width in heads
        ]
        return all(agrees(what, trial, dtype) for trial in trials)

    if not tried("FusedSDPA", fused):
        return None
    if not tried("FusedSDPA in slices", small_slices):
        return FusedPromptAttention(kernel, softmax_mode, sliced_from=sys.maxsize)
    return fused


def attention_trial(
    attend: PromptKernel,
    dtype: torch.dtype,
    device: torch.device,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 64,
    value_width: int | None = None,
    queries: int = 8,
    keys: int = 12,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the kernel and of PyTorch: causal with padding, and biased.

    ``width`` is that of a head, ``value_width`` that of its values where it differs. ``queries``
    and ``keys``: tokens, of keys the context included.
    """
    values = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, queries, width, generator=values).to(dtype)
    key, value = (
        torch.randn(2, kv_heads, keys, size, generator=values).to(dtype)
        for size in (width, value_width or width)
    )
    lengths = torch.tensor([queries, queries * 5 // 8], dtype=torch.int32)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    seen[:, 2] = False
    bias = torch.where(seen, 0.0, MASKED).to(dtype).expand(2, 1, queries, keys).contiguous()
    padding = torch.arange(queries)[:, None] >= lengths.view(2, 1, 1, 1)
    scale = width**-0.5

    def both(function: PromptKernel, *tensors: torch.Tensor) -> torch.Tensor:
        q, k, v, b, n = tensors
        causal = function(q, k[:, :, :queries], v[:, :, :queries], scale, None, n)
        return torch.stack((causal, function(q, k, v, scale, b, None))).cpu()

    expected = both(prompt_attention, query, key, value, bias, lengths)
    found = both(attend, *(x.to(device) for x in (query, key, value, bias, lengths)))
    found[0], expected[0] = (x[0].masked_fill(padding, 0) for x in (found, expected))
    return found, expected


# Softmax over the blocks of a sequence.


def block_adjustment(
    peak: torch.Tensor, sums: torch.Tensor, owners: torch.Tensor, mapping: torch.Tensor
) -> torch.Tensor:
    """The factor of each block's weighted values, ``[N, K, G, 1]`` fp32.

    ``peak`` and ``sums`` are ``[N, K, G, 1]`` fp32: the largest score of a block, and the sum of
    its weights. The factor is the weight of the block's maximum within its sequence, divided by the
    sum of the sequence's weights. ``index_reduce_`` is right with repeated indices, for amax along
    the first dimension alone (``hpu_ops/backend/index_reduce_gen.cpp:20-34``).
    """
    num_blocks, batch = mapping.shape
    flat_peak, flat_sums = peak.reshape(num_blocks, -1), sums.reshape(num_blocks, -1)
    top = flat_peak.new_full((batch + 1, flat_peak.shape[1]), MASKED)
    top = top.index_reduce_(0, owners, flat_peak, "amax").index_select(0, owners)
    weight = torch.exp(flat_peak - top)
    mapping = mapping.float()
    totals = torch.matmul(mapping.t(), flat_sums * weight)
    # A total is at least 1, the weight of the maximum; that of a block without an owner is 0.
    totals = torch.matmul(mapping, totals).clamp_min(1.0)
    return (weight / totals).view(peak.shape)


@attrs.frozen
class BlocksTried:
    """Blocks and sequences of a decode, for which a kernel is tried."""

    blocks: int
    batch: int


ADJUSTMENT_TRIALS = (
    *(BlocksTried(8, 3), BlocksTried(128, 32), BlocksTried(2048, 128)),
    BlocksTried(16384, 256),
)
"""From small to large: 96 GB hold 5,000 blocks of 128 tokens of an 8B model beside its weights."""


def _usable_adjustment(
    heads: list[_HeadShape], dtype: torch.dtype, device: torch.device
) -> BlockAdjustment | None:
    """``block_softmax_adjustment``, where the release has it (vllm-gaudi: 1.22 on Gaudi 3).

    For decodes that are at most as large as what was tried with success.
    """
    if not hasattr(torch.ops.hpu, "block_softmax_adjustment"):
        logger.info("block_softmax_adjustment is not available: PyTorch's operations are used")
        return None
    groups = sorted({(kv_heads, heads // kv_heads) for heads, kv_heads, *_ in heads})

    def works(tried: BlocksTried) -> bool:
        what = f"block_softmax_adjustment for {tried.blocks} blocks of {tried.batch} sequences"
        trials = (
            functools.partial(
                adjustment_trial, dtype, device, tried, kv_heads=kv_heads, group=group
            )
            for kv_heads, group in groups
        )
        return all(agrees(what, trial, dtype) for trial in trials)

    working = list(itertools.takewhile(works, ADJUSTMENT_TRIALS))
    return FusedAdjustment(working[-1]) if working else None


@attrs.frozen
class FusedAdjustment:
    """`block_adjustment` by Intel's kernel, for at most as many blocks and sequences as ``limit``.

    Larger decodes are computed by PyTorch's operations: for how many blocks the kernel works is not
    public.
    """

    limit: BlocksTried

    def __call__(
        self, peak: torch.Tensor, sums: torch.Tensor, owners: torch.Tensor, mapping: torch.Tensor
    ) -> torch.Tensor:
        num_blocks, batch = mapping.shape
        if num_blocks > self.limit.blocks or batch > self.limit.batch:
            return block_adjustment(peak, sums, owners, mapping)
        return _fused_adjustment(peak, sums, owners, mapping)


def _fused_adjustment(
    peak: torch.Tensor, sums: torch.Tensor, owners: torch.Tensor, mapping: torch.Tensor
) -> torch.Tensor:
    """`block_adjustment` by Intel's kernel, as ``vllm_gaudi/extension/ops.py:143`` calls it."""
    out: torch.Tensor = torch.ops.hpu.block_softmax_adjustment(
        peak, sums, owners, mapping.shape[1], list(peak.shape)
    )
    return out


def adjustment_trial(
    dtype: torch.dtype,
    device: torch.device,
    tried: BlocksTried = ADJUSTMENT_TRIALS[0],
    *,
    kv_heads: int = 2,
    group: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For sequences of several blocks each, not side by side, and blocks that have no owner.

    ``group``: the query heads of each KV head.
    """
    values = torch.Generator().manual_seed(0)
    shape = (tried.blocks, kv_heads, group, 1)
    peak = torch.randn(shape, generator=values) * 4
    sums = torch.rand(shape, generator=values) + 1
    # Each owner, the one beyond the batch included, has about as many.
    owners = torch.randperm(tried.blocks, generator=values) % (tried.batch + 1)
    mapping = (owners[:, None] == torch.arange(tried.batch)).to(dtype)
    owned = owners < tried.batch
    given = [x.to(device) for x in (peak, sums, owners, mapping)]
    found, expected = _fused_adjustment(*given).cpu(), block_adjustment(peak, sums, owners, mapping)
    # Without an owner any finite factor is right: the matrix multiplies it by 0.
    expected[~owned] = torch.where(found[~owned].isfinite(), found[~owned], 0.0)
    return found, expected


# RMSNorm.


class FusedNorm(nn.Module):
    """A module that computes RMSNorm with FusedRMSNorm.

    Input and weight must have the same dtype (optimum-habana, ``modeling_llama.py``), and the input
    three dimensions (``vllm_gaudi/ops/hpu_layernorm.py:20``).
    """

    def __init__(self, kernel: Any, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self._kernel = kernel
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.to(self.weight.dtype).reshape(1, -1, hidden.shape[-1])
        out: torch.Tensor = self._kernel.apply(rows, self.weight, self.eps)
        return out.view(hidden.shape).to(hidden.dtype)


def _use_norms(model: nn.Module) -> None:
    """Replace the norms of each class whose results agree: some classes scale by ``1 + weight``."""
    kernel = _kernel("normalization", "FusedRMSNorm")
    if kernel is None:
        return
    tried: dict[type, bool] = {}
    for parent, name, norm, eps in list(_norms(model)):
        fused = FusedNorm(kernel, norm.weight, eps)
        if type(norm) not in tried:
            what = f"FusedRMSNorm for {type(norm).__name__}"
            dtype = norm.weight.dtype
            tried[type(norm)] = agrees(what, functools.partial(_norm_trial, norm, fused), dtype)
        if tried[type(norm)]:
            setattr(parent, name, fused)


def _norms(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any, float]]:
    """Parent, name, module and epsilon of each norm with a weight: some have none (nanochat)."""
    for parent in model.modules():
        for name, child in parent.named_children():
            eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            weight = getattr(child, "weight", None)
            has_weight = isinstance(weight, torch.Tensor) and weight.dim() == 1
            if type(child).__name__.endswith("RMSNorm") and eps is not None and has_weight:
                yield parent, name, child, eps


def _norm_trial(norm: nn.Module, fused: FusedNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """For the ranks that models use: tokens, and heads of tokens."""
    values = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 4, 2, fused.weight.shape[0], generator=values)
    rows = rows.to(fused.weight.dtype).to(fused.weight.device)
    with torch.inference_mode():
        found = torch.cat((fused(rows).flatten(), fused(rows[0]).flatten()))
        expected = torch.cat((norm(rows).flatten(), norm(rows[0]).flatten()))
        return found.cpu(), expected.cpu()


# Rotary position embedding.


class FusedRotary:
    """Intel's rotary embedding, called like transformers' ``apply_rotary_pos_emb``.

    The function is shared by all models of an architecture, so tensors of other devices, other
    shapes than ``[1, heads, tokens, D]``, and heads that are rotated in part (Phi-4-mini), go to
    ``replaced``. Layout of the kernel's arguments:
    ``vllm_gaudi/ops/hpu_rotary_embedding.py:60-76``.
    """

    def __init__(self, kernel: Callable[..., torch.Tensor], replaced: Callable[..., Any]) -> None:
        self._kernel = kernel
        self.replaced = replaced

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole = q.shape[0] == 1 and q.shape[-1] == k.shape[-1] == cos.shape[-1]
        if q.device.type != "hpu" or not whole or unsqueeze_dim != 1:
            rotated: tuple[torch.Tensor, torch.Tensor] = self.replaced(
                q, k, cos, sin, unsqueeze_dim=unsqueeze_dim
            )
            return rotated
        angles = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
        q, k = (self._kernel(x.transpose(1, 2)[0], *angles).to(x.dtype) for x in (q, k))
        return q.unsqueeze(0).transpose(1, 2), k.unsqueeze(0).transpose(1, 2)


_ROTARY = "apply_rotary_pos_emb"


def _use_rotary(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the rotary function of the model's modules where the results agree."""
    kernel = _kernel("kernels", _ROTARY)
    if kernel is None:
        return
    for module in _modules_with_rotary(model):
        own = getattr(module, _ROTARY)
        own = own.replaced if isinstance(own, FusedRotary) else own
        fused = FusedRotary(kernel, own)
        what = f"{_ROTARY} for {module.__name__}"
        usable = agrees(what, functools.partial(rotary_trial, fused, dtype, device), dtype)
        setattr(module, _ROTARY, fused if usable else own)


def _modules_with_rotary(model: nn.Module) -> list[ModuleType]:
    layers = (layer for layer in model.modules() if hasattr(layer, "layer_idx"))
    modules = {type(layer).__module__: sys.modules[type(layer).__module__] for layer in layers}
    return [module for module in modules.values() if hasattr(module, _ROTARY)]


def rotary_trial(
    fused: FusedRotary,
    dtype: torch.dtype,
    device: torch.device,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For six tokens."""
    values = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, 6, width, generator=values).to(dtype)
    key = torch.randn(1, kv_heads, 6, width, generator=values).to(dtype)
    frequencies = torch.rand(width // 2, generator=values)
    angles = torch.outer(torch.arange(6.0), frequencies).repeat(1, 2)[None]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = fused.replaced(query, key, cos, sin)
    found = fused(query.to(device), key.to(device), cos.to(device), sin.to(device))
    return torch.cat([x.flatten().cpu() for x in found]), torch.cat([x.flatten() for x in expected])


# Trials.


def agrees(
    what: str,
    trial: KernelTrial,
    dtype: torch.dtype,
) -> bool:
    """Whether the results of a trial, found and expected, agree; a warning says why not."""
    try:
        largest = largest_difference(*trial())
    except WrongShapeError as error:
        logger.warning("%s is not used: %s", what, error)
        return False
    except Exception as error:  # the bridge raises errors of any type
        logger.warning("%s is not used: a trial raised %s", what, _first_line(error))
        return False
    if largest <= TOLERANCE[dtype]:
        return True
    logger.warning("%s is not used: it differs by %.3g from PyTorch in a trial", what, largest)
    return False


def _kernel(package: str, name: str) -> Any:
    """A kernel of ``habana_frameworks.torch.hpex``, or None if this release lacks it."""
    try:
        module = importlib.import_module(f"habana_frameworks.torch.hpex.{package}")
        return getattr(module, name)
    except (ImportError, AttributeError):
        logger.info("%s is not available: PyTorch's implementation is used", name)
    except Exception as error:  # its libraries raise errors of any type
        logger.warning("%s is not used: it does not load (%s)", name, _first_line(error))
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
