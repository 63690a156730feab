"""Intel's fused kernels for prefill attention and RMSNorm.

Releases of Intel's software differ in their kernels. So each kernel is compared with PyTorch on a
small input when a model is loaded; one that differs is not used, with a warning.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trencadis.engine.models.paged_context import MASKED, PROMPT_KERNEL

logger = logging.getLogger("trencadis.engine")

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest accepted difference, relative above 1: a few roundings of the dtype."""


def use_fused_kernels(model: nn.Module, device: torch.device) -> None:
    """Replace attention and norms of ``model`` in place by FusedSDPA and FusedRMSNorm."""
    _use_attention(model, device)
    _use_norms(model, device)


class PromptAttention:
    """FusedSDPA, called like ``torch.nn.functional.scaled_dot_product_attention``.

    Source of the call: ``habana_frameworks/torch/hpex/kernels/FusedSDPA.py``.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Shapes ``[B, H, Q, D]`` and ``[B, K, L, D]``. The kernel handles grouped heads itself."""
        bias = None
        if attn_mask is not None:
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, MASKED)
        out: torch.Tensor = self._kernel.apply(query, key, value, bias, 0.0, is_causal, scale)
        return out


class FusedNorm(nn.Module):
    """A module that computes RMSNorm with FusedRMSNorm.

    Input and weight must have the same dtype (optimum-habana, ``modeling_llama.py``).
    """

    def __init__(self, kernel: Any, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self._kernel = kernel
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._kernel.apply(hidden.to(self.weight.dtype), self.weight, self.eps)
        return out.to(hidden.dtype)


def _use_attention(model: nn.Module, device: torch.device) -> None:
    kernel = _kernel("kernels", "FusedSDPA")
    attentions = [module for module in model.modules() if hasattr(module, "layer_idx")]
    if kernel is None or not attentions:
        return
    attend = PromptAttention(kernel)
    dtype = next(model.parameters()).dtype
    if _agrees("FusedSDPA", *_attention_trial(attend, dtype, device), dtype):
        for module in attentions:
            setattr(module, PROMPT_KERNEL, attend)


def _use_norms(model: nn.Module, device: torch.device) -> None:
    """Replace the norms of each class whose results agree: some classes scale by ``1 + weight``."""
    kernel = _kernel("normalization", "FusedRMSNorm")
    if kernel is None:
        return
    tried: dict[type, bool] = {}
    for parent, name, norm, eps in list(_norms(model)):
        fused = FusedNorm(kernel, norm.weight, eps)
        if type(norm) not in tried:
            tried[type(norm)] = _agrees(
                f"FusedRMSNorm for {type(norm).__name__}",
                *_norm_trial(norm, fused, device),
                norm.weight.dtype,
            )
        if tried[type(norm)]:
            setattr(parent, name, fused)


def _norms(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any, float]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            if type(child).__name__.endswith("RMSNorm") and eps is not None:
                yield parent, name, child, eps


def _attention_trial(
    attend: PromptAttention, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the kernel and of PyTorch, for grouped heads, causal and with a mask."""
    values = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 8, 64, generator=values).to(dtype)
    key, value = torch.randn(2, 2, 2, 8, 64, generator=values).to(dtype)
    mask = torch.ones(8, 8, dtype=torch.bool).tril(-2) | torch.eye(8, dtype=torch.bool)
    mask = mask.expand(2, 1, 8, 8)
    expected = [
        F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **how)
        for how in ({"is_causal": True}, {"attn_mask": mask})
    ]
    query, key, value = query.to(device), key.to(device), value.to(device)
    found = [
        attend(query, key, value, is_causal=True),
        attend(query, key, value, attn_mask=mask.to(device)),
    ]
    return torch.stack(found).cpu(), torch.stack(expected)


def _norm_trial(
    norm: nn.Module, fused: FusedNorm, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.Generator().manual_seed(0)
    rows = torch.randn(4, fused.weight.shape[0], generator=values)
    rows = rows.to(fused.weight.dtype).to(device)
    with torch.inference_mode():
        return fused(rows).cpu(), norm(rows).cpu()


def _agrees(what: str, found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    difference = (found.float() - expected.float()).abs() / expected.float().abs().clamp_min(1.0)
    largest = float(difference.max())
    if largest <= _TOLERANCE[dtype]:
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
        return None
