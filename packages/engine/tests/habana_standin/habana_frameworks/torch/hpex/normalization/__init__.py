"""Source: ``habana_frameworks/torch/hpex/normalization/FusedRMSNorm.py``."""

from __future__ import annotations

from typing import Any

import torch


class FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        data_in: torch.Tensor,
        gamma: torch.Tensor,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
    ) -> torch.Tensor:
        return torch.ops.hpu.rms_norm(data_in, gamma, eps)[0]
