"""Mixtures of experts in static shapes: by Intel's kernel, or with the products of all experts.

Transformers sorts tokens by expert and computes each expert with its own, whose number the host
must read. Here a kernel of the device gets the table of chosen experts (``mixture_of_experts``,
``hpu_ops/backend/mixture_of_experts.cpp`` of HabanaAI/gaudi-pytorch-bridge 1.19.0, called as by
vllm-gaudi 091bbad, ``extension/ops.py:707``). Where it cannot be used, each expert computes every
token, and the weight of an expert that a token has not chosen is 0. A decode of many sequences
reads nearly all experts anyway.

Both are functions of transformers' ``ExpertsInterface``, which its expert modules call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from trencadis.engine.devices.hpu.kernels import agrees
from trencadis.engine.models.layer_spec import is_replaceable

_ALL, _FUSED = "trencadis_all_experts", "trencadis_fused_experts"


def all_experts(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum ``[T, D]`` of each token's experts, with the products of all experts.

    ``hidden`` is ``[T, D]``, ``chosen`` ``[T, k]`` has the numbers of experts, ``weights`` theirs.
    """
    numbers = torch.arange(experts.num_experts, device=chosen.device, dtype=chosen.dtype)
    is_chosen = chosen.unsqueeze(-1) == numbers
    share = (is_chosen * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
    out = torch.zeros_like(hidden)
    for number in range(experts.num_experts):
        part = share[:, number : number + 1]
        # Not a product with 0 alone: of an infinite result that would be NaN.
        out = out + torch.where(part != 0, _expert(experts, number, hidden) * part, 0.0)
    return out


def _expert(experts: Any, number: int, hidden: torch.Tensor) -> torch.Tensor:
    """The result of one expert for all tokens, as in ``batched_mm`` of transformers."""
    if experts.has_gate:
        inner = experts._apply_gate(_product(experts, "gate_up_proj", number, hidden))
    else:
        inner = experts.act_fn(_product(experts, "up_proj", number, hidden))
    out = _product(experts, "down_proj", number, inner)
    return experts.post_expert_norm(out) if experts.has_post_expert_norm else out


def _product(experts: Any, name: str, number: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)[number]
    bias = getattr(experts, f"{name}_bias")[number] if experts.has_bias else None
    return F.linear(rows, weight.t() if experts.is_transposed else weight, bias)


def fused_experts(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """`all_experts` by Intel's kernel, for the experts that `_suits_kernel` accepts."""
    out: torch.Tensor = torch.ops.hpu.mixture_of_experts(
        hidden_states=hidden,
        expert_routing_table=chosen,
        router_weights=weights.to(hidden.dtype),
        w12=list(experts.gate_up_proj.unbind()),
        w3=list(experts.down_proj.unbind()),
        permuted_weights=True,
        activation="silu",
        experts_min=0,
        experts_max=experts.num_experts - 1,
    )
    return out


ALL_EXPERTS_FUNCTIONS.register(_ALL, all_experts)
ALL_EXPERTS_FUNCTIONS.register(_FUSED, fused_experts)


def use_static_experts(model: nn.Module, device: torch.device) -> None:
    """Let the experts of a loaded model compute in static shapes."""
    is_usable: dict[torch.dtype, bool] = {}
    replaceable: list[Any] = [module for module in model.modules() if is_replaceable(module)]
    for experts in replaceable:
        implementation, dtype = _ALL, next(experts.parameters()).dtype
        if _suits_kernel(experts) and hasattr(torch.ops.hpu, "mixture_of_experts"):
            if dtype not in is_usable:
                trial = functools.partial(experts_trial, device, dtype)
                is_usable[dtype] = agrees("mixture_of_experts", trial, dtype)
            implementation = _FUSED if is_usable[dtype] else _ALL
        experts.config._experts_implementation = implementation


def _suits_kernel(experts: Any) -> bool:
    """Whether they are SiLU-gated products without more, with gate and up one after the other."""
    gate = getattr(type(experts), "_apply_gate", None)
    return (
        type(getattr(experts, "act_fn", None)) in (nn.SiLU, type(ACT2FN["silu"]))
        and getattr(gate, "__name__", "") == "_default_apply_gate"
        and experts.has_gate
        and experts.is_concatenated
        and not (experts.has_bias or experts.is_transposed or experts.has_post_expert_norm)
    )


class _Experts(nn.Module):
    """Random experts, whose results are about as large as what they get."""

    has_gate, has_bias, is_transposed, has_post_expert_norm = True, False, False, False

    def __init__(self, number: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.num_experts = number
        values = torch.Generator().manual_seed(0)
        gate_up = torch.randn(number, 2 * inner, hidden, generator=values)
        down = torch.randn(number, hidden, inner, generator=values)
        # A product of 32 numbers has its own size; of more, that of their square root.
        self.gate_up_proj = gate_up * (32 / hidden) ** 0.5
        self.down_proj = down * (16 / inner) ** 0.5

    def moved(self, device: torch.device, dtype: torch.dtype) -> _Experts:
        """The same experts elsewhere; changes these."""
        self.gate_up_proj = self.gate_up_proj.to(device, dtype)
        self.down_proj = self.down_proj.to(device, dtype)
        return self

    def _apply_gate(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return F.silu(gate) * up


def experts_trial(
    device: torch.device,
    dtype: torch.dtype,
    *,
    number: int = 4,
    hidden: int = 32,
    inner: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the kernel and of `all_experts` for six tokens with two experts each.

    ``hidden`` and ``inner`` are the widths of a token and of an expert.
    """
    values = torch.Generator().manual_seed(1)
    rows = (torch.randn(6, hidden, generator=values) * 0.1).to(dtype)
    pairs = [[0, 1], [3, 2], [1, 3], [0, 2], [2, 1], [3, 0]]
    chosen = torch.tensor(pairs) % number
    weights = torch.rand(6, 2, generator=values).to(dtype)
    experts = _Experts(number, hidden, inner).moved(torch.device("cpu"), dtype)
    expected = all_experts(experts, rows, chosen, weights)
    given = [x.to(device) for x in (rows, chosen, weights)]
    return fused_experts(experts.moved(device, dtype), *given).cpu(), expected
