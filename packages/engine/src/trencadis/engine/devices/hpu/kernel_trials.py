"""Each kernel that the engine may use on a Gaudi, compared with the host at a model's shapes.

At load time small trials decide which kernels are used. These here are for a report: they cover the
updates in place that have no substitute, too, and a kernel that a release lacks is told apart from
one that fails.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from trencadis.engine.devices.hpu.cached_rows import cache_trial
from trencadis.engine.devices.hpu.experts import ExpertSizes, experts_trial, num_chosen
from trencadis.engine.devices.hpu.fp8_linear import fp8_trial
from trencadis.engine.devices.hpu.kernels import (
    ADJUSTMENT_TRIALS,
    FusedNorm,
    FusedPromptAttention,
    FusedRotary,
    adjustment_trial,
    attention_trial,
    rotary_trial,
)
from trencadis.engine.devices.kernel_trial import KernelTrial, MissingKernelError
from trencadis.engine.models.loader import ModelSpec

_QUERIES, _KEYS = 128, 256
"""Tokens of a trial of attention: a block of queries, and one more block of context."""


def kernel_trials(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, softmax_mode: str
) -> Mapping[str, KernelTrial]:
    """The trials by the names of the kernels. ``softmax_mode`` is that of FusedSDPA."""
    text = spec.config.get_text_config(decoder=True)
    layer = next(layer for layer in spec.layers if layer.kv_heads)
    # The kernels get keys and values of one width, also where a model's own differ.
    heads, kv_heads, width = layer.heads, layer.kv_heads, layer.key_width

    def attention(**sliced: int) -> tuple[torch.Tensor, torch.Tensor]:
        attend = FusedPromptAttention(_load("kernels", "FusedSDPA"), softmax_mode, **sliced)
        sizes = {"heads": heads, "kv_heads": kv_heads, "width": width}
        return attention_trial(attend, dtype, device, **sizes, queries=_QUERIES, keys=_KEYS)

    def adjustment() -> tuple[torch.Tensor, torch.Tensor]:
        _find_operation("block_softmax_adjustment")
        sizes = {"kv_heads": kv_heads, "group": heads // kv_heads}
        trials = [adjustment_trial(dtype, device, each, **sizes) for each in ADJUSTMENT_TRIALS]
        found, expected = [[pair[i].flatten() for pair in trials] for i in (0, 1)]
        return torch.cat(found), torch.cat(expected)

    def norm() -> tuple[torch.Tensor, torch.Tensor]:
        return _norm(text.hidden_size, dtype, device)

    def rotary() -> tuple[torch.Tensor, torch.Tensor]:
        fused = FusedRotary(_load("kernels", "apply_rotary_pos_emb"), _rotate)
        return rotary_trial(fused, dtype, device, heads=heads, kv_heads=kv_heads, width=width)

    def experts() -> tuple[torch.Tensor, torch.Tensor]:
        _find_operation("mixture_of_experts")
        if not layer_of_experts:
            return experts_trial(device, dtype, ExpertSizes())
        number, hidden = layer_of_experts.experts, text.hidden_size
        inner = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
        sizes = ExpertSizes(number, num_chosen(text, number), hidden, inner)
        return experts_trial(device, dtype, sizes)

    def products() -> tuple[torch.Tensor, torch.Tensor]:
        _find_operation("fp8_gemm_v2")
        return fp8_trial(device, dtype, outputs=text.hidden_size, inputs=text.hidden_size)

    def cache() -> tuple[torch.Tensor, torch.Tensor]:
        _find_operation("cast_from_fp8")
        return cache_trial(device, dtype, kv_heads=kv_heads, width=width)

    layer_of_experts = next((layer for layer in spec.layers if layer.experts), None)
    return {
        "FusedSDPA": attention,
        "FusedSDPA in slices": lambda: attention(sliced_from=_KEYS, slice_length=_QUERIES // 2),
        "block_softmax_adjustment": adjustment,
        "FusedRMSNorm": norm,
        "apply_rotary_pos_emb": rotary,
        "mixture_of_experts": experts,
        "fp8_gemm_v2": products,
        "cast_from_fp8": cache,
        "index_copy_": lambda: _index_copy(kv_heads, width, dtype, device),
        "index_reduce_ amax": lambda: _index_reduce(heads, device),
    }


def _load(package: str, name: str) -> Any:
    """A kernel of ``habana_frameworks.torch.hpex``."""
    try:
        return getattr(importlib.import_module(f"habana_frameworks.torch.hpex.{package}"), name)
    except (ImportError, AttributeError) as error:
        raise MissingKernelError(f"hpex.{package} has no {name}") from error


def _find_operation(name: str) -> None:
    if not hasattr(torch.ops.hpu, name):
        raise MissingKernelError(f"there is no operation hpu::{name}")


def _norm(
    hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of 128 tokens, with the formula of Llama."""
    values = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _QUERIES, hidden, generator=values).to(dtype)
    weight = torch.rand(hidden, generator=values).to(dtype)
    eps = 1e-6
    kernel = _load("normalization", "FusedRMSNorm")
    fused = FusedNorm(kernel, torch.nn.Parameter(weight.to(device), requires_grad=False), eps)
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return fused(rows.to(device)).cpu(), weight * wide.to(dtype)


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotary embedding of Llama."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotated(q), rotated(k)


def _index_copy(
    kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens are written to their rows of a cache, the others stay."""
    values = torch.Generator().manual_seed(0)
    cache = torch.randn(4 * _QUERIES, kv_heads, width, generator=values).to(dtype)
    rows = torch.randn(_QUERIES, kv_heads, width, generator=values).to(dtype)
    slots = torch.randperm(len(cache), generator=values)[: len(rows)]
    found = cache.to(device).index_copy_(0, slots.to(device), rows.to(device)).cpu()
    return found, cache.index_copy_(0, slots, rows)


def _index_reduce(heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The maxima of blocks by owner, with owners that repeat."""
    values = torch.Generator().manual_seed(0)
    peak = torch.randn(64, heads, generator=values)
    owners = torch.randint(0, 9, (64,), generator=values)
    top = torch.full((9, heads), -1e30)
    given = (top.to(device), owners.to(device), peak.to(device))
    found = given[0].index_reduce_(0, given[1], given[2], "amax").cpu()
    return found, top.index_reduce_(0, owners, peak, "amax")
