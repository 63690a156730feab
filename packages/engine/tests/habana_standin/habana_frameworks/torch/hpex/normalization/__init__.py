"""Source: ``habana_frameworks/torch/hpex/normalization/FusedRMSNorm.py``."""

import torch


class FusedRMSNorm:
    @staticmethod
    def apply(
        data_in: torch.Tensor,
        gamma: torch.Tensor,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
    ) -> torch.Tensor:
        # optimum-habana, modeling_llama.py: «mixed dtypes are not good for FusedRMSNorm».
        if data_in.dtype != gamma.dtype:
            raise RuntimeError(f"rms_norm: input is {data_in.dtype} and gamma {gamma.dtype}")
        wide = data_in.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return gamma * scaled.to(data_in.dtype)
