"""Sources: ``habana_frameworks/torch/hpex/kernels/FusedSDPA.py``, ``RotaryPosEmbeddingHelper.py``.

``window_size`` and ``sinks`` of later releases are not modelled.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch


class RotaryPosEmbeddingMode(Enum):
    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(
    p: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
) -> torch.Tensor:
    wide = torch.float32 in (p.dtype, cos.dtype, sin.dtype)
    dtype = torch.float32 if wide else p.dtype
    p, cos, sin = p.to(dtype), cos.to(dtype), sin.to(dtype)
    return torch.ops.hpu.rotary_pos_embedding(p, sin, cos, position_ids, offset, mode.value)


class FusedSDPA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: torch.Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
    ) -> torch.Tensor:
        if valid_seq_len is not None and not (is_causal and attn_mask is None):
            raise AssertionError("Valid sequence length is supported only with is_causal")
        if not recompute_mode:
            raise NotImplementedError("the stand-in has the recompute variant alone")
        heads, kv_heads = q.shape[1], k.shape[1]
        if kv_heads not in (1, heads):
            q, k, v = q.unflatten(1, (kv_heads, -1)), k.unsqueeze(2), v.unsqueeze(2)
            attn_mask = None if attn_mask is None else attn_mask.unsqueeze(1)
        out = torch.ops.hpu.sdpa_recomp_fwd(
            q,
            k,
            v,
            attn_mask,
            dropout_p,
            1 / math.sqrt(q.shape[-1]) if scale is None else scale,
            is_causal,
            False,
            softmax_mode.lower(),
            valid_seq_len,
            seq_padding_type.lower(),
        )[0]
        return out.flatten(1, 2) if out.dim() > 4 else out
