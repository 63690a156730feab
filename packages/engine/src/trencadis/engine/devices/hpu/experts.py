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
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from trencadis.engine.devices.hpu.cached_rows import as_read
from trencadis.engine.devices.hpu.fp8_linear import fp8_product
from trencadis.engine.devices.hpu.kernels import agrees
from trencadis.engine.models.layer_spec import is_replaceable
from trencadis.engine.models.packed_experts import (
    MATRICES,
    are_packed,
    is_gated_silu,
    scales_of,
)

_ALL, _FUSED = "trencadis_all_experts", "trencadis_fused_experts"
_FP8 = "trencadis_fp8_experts"

_ROWS_OF_A_PRODUCT = 128
"""That a matrix engine of a Gaudi computes for any smaller number (forum.habana.ai/t/1272)."""


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
    if weight.dtype is torch.float8_e4m3fn:
        scales = getattr(experts, scales_of(name))[number].flatten()
        return fp8_product(rows, weight, scales)
    bias = getattr(experts, f"{name}_bias")[number] if experts.has_bias else None
    return F.linear(rows, weight.t() if experts.is_transposed else weight, bias)


def fused_experts(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """`all_experts` by Intel's kernel, for the experts that `is_gated_silu` accepts."""
    out: torch.Tensor = torch.ops.hpu.mixture_of_experts(
        hidden_states=hidden,
        expert_routing_table=chosen,
        router_weights=weights.to(hidden.dtype),
        w12=list(experts.gate_up_proj),
        w3=list(experts.down_proj),
        permuted_weights=True,
        activation="silu",
        experts_min=0,
        experts_max=experts.num_experts - 1,
    )
    return out


def fp8_experts(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """`all_experts` of packed experts, whose scales are those of outputs.

    Few rows are multiplied with all experts in FP8, which reads a byte of each weight: a product
    computes as many rows for one. Of more rows, the weights are expanded for Intel's kernel, which
    computes the chosen ones. That in FP8 is not in the public bridge.
    """
    if hidden.shape[0] <= _ROWS_OF_A_PRODUCT or not experts.expands_to_kernel:
        return all_experts(experts, hidden, chosen, weights)
    expanded = (
        [_expanded(experts, matrix, n, hidden.dtype) for n in range(experts.num_experts)]
        for matrix in MATRICES
    )
    return fused_experts(_Experts(*expanded), hidden, chosen, weights)


def _expanded(experts: Any, matrix: str, number: int, dtype: torch.dtype) -> torch.Tensor:
    scales: torch.Tensor = getattr(experts, scales_of(matrix))[number]
    steps: torch.Tensor = getattr(experts, matrix)[number]
    return as_read(steps, dtype) * scales.to(dtype)


ALL_EXPERTS_FUNCTIONS.register(_ALL, all_experts)
ALL_EXPERTS_FUNCTIONS.register(_FP8, fp8_experts)
ALL_EXPERTS_FUNCTIONS.register(_FUSED, fused_experts)


def use_static_experts(model: nn.Module, device: torch.device) -> None:
    """Let the experts of a loaded model compute in static shapes, in its dtype."""
    dtype = next(model.parameters()).dtype
    is_usable: dict[tuple[ExpertSizes, torch.dtype], bool] = {}
    replaceable: list[Any] = [module for module in model.modules() if is_replaceable(module)]
    for experts in replaceable:
        implementation = _ALL
        if is_gated_silu(experts) and hasattr(torch.ops.hpu, "mixture_of_experts"):
            sizes = ExpertSizes.of(experts)
            if (sizes, dtype) not in is_usable:
                trial = functools.partial(experts_trial, device, dtype, sizes)
                what = f"mixture_of_experts with {sizes}"
                is_usable[sizes, dtype] = agrees(what, trial, dtype)
            implementation = _FUSED if is_usable[sizes, dtype] else _ALL
        if are_packed(experts):
            experts.expands_to_kernel = implementation == _FUSED
            implementation = _FP8
        experts.config._experts_implementation = implementation


@attrs.frozen
class ExpertSizes:
    """``number`` of experts, ``chosen`` for each token; widths of a token and within an expert."""

    number: int = 4
    chosen: int = 2
    hidden: int = 32
    inner: int = 16

    @classmethod
    def of(cls, experts: Any) -> ExpertSizes:
        """Those of a module that `is_gated_silu` accepts, as this rank has them."""
        number, hidden, inner = experts.down_proj.shape
        return cls(number, num_chosen(experts.config, number), hidden, inner)

    def __str__(self) -> str:
        return f"{self.chosen} of {self.number} experts of {self.inner} for {self.hidden} numbers"


def num_chosen(config: Any, number: int) -> int:
    """The experts of each token, by what families call them in their configurations."""
    for name in ("num_experts_per_tok", "moe_topk", "top_k_experts"):
        if isinstance(chosen := getattr(config, name, None), int):
            return min(chosen, number)
    return min(ExpertSizes().chosen, number)


@attrs.frozen
class _Experts:
    """Experts of a trial: the matrices of each, in place of transformers' one for all."""

    gate_up_proj: Sequence[torch.Tensor]
    down_proj: Sequence[torch.Tensor]
    has_gate, has_bias, is_transposed, has_post_expert_norm = True, False, False, False

    @property
    def num_experts(self) -> int:
        return len(self.down_proj)

    def only(self, numbers: Sequence[int]) -> _Experts:
        """The experts with these numbers."""
        return _Experts(
            [self.gate_up_proj[n] for n in numbers], [self.down_proj[n] for n in numbers]
        )

    def _apply_gate(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return F.silu(gate) * up


_SHIFT = 16
"""Rows by which the matrix of an expert begins after that of the one before, in one buffer. A
multiple of what memory is aligned to, for any width."""


def _experts(sizes: ExpertSizes, gate_up: torch.Tensor, down: torch.Tensor) -> _Experts:
    """All experts from two buffers: each has rows of its own and shares the others."""
    starts = range(0, sizes.number * _SHIFT, _SHIFT)
    return _Experts(
        [gate_up.narrow(0, start, 2 * sizes.inner) for start in starts],
        [down.narrow(0, start, sizes.hidden) for start in starts],
    )


def experts_trial(
    device: torch.device, dtype: torch.dtype, sizes: ExpertSizes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the kernel and of `all_experts` for six tokens, the first and last expert among
    those that are chosen.

    Weights are random, and those of all experts take hardly more memory than those of one.
    Results are about 1 at most, so that roundings stay far below `TOLERANCE`.
    """
    values = torch.Generator().manual_seed(1)
    number, hidden, inner = sizes.number, sizes.hidden, sizes.inner
    more = (number - 1) * _SHIFT
    # Products of random numbers are as large as the square root of how many they are.
    gate_up = torch.randn(2 * inner + more, hidden, generator=values) * hidden**-0.5
    down = torch.randn(hidden + more, inner, generator=values) * inner**-0.5
    buffers = gate_up.to(dtype), down.to(dtype)
    rows = torch.randn(6, hidden, generator=values).to(dtype)
    preferred = torch.rand(6, number, generator=values)
    preferred[0, 0] = preferred[1, number - 1] = 1.0
    chosen = preferred.topk(sizes.chosen).indices
    weights = (torch.rand(6, sizes.chosen, generator=values) + 0.5).to(dtype)
    weights = weights / weights.sum(-1, keepdim=True)
    used, places = torch.unique(chosen, return_inverse=True)
    # The host computes those alone that were chosen.
    expected = all_experts(_experts(sizes, *buffers).only(used.tolist()), rows, places, weights)
    given = [x.to(device) for x in (rows, chosen, weights)]
    experts = _experts(sizes, *(x.to(device) for x in buffers))
    return fused_experts(experts, *given).cpu(), expected
