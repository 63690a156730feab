"""Source: ``habana_frameworks/torch/hpex/kernels/FusedSDPA.py``."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class FusedSDPA:
    @staticmethod
    def apply(
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
    ) -> torch.Tensor:
        if valid_seq_len is not None and not (is_causal and attn_mask is None):
            raise AssertionError("Valid sequence length is supported only with is_causal")
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )
