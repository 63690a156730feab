"""The operations ``torch.ops.hpu.*`` that Intel's kernels are called by.

Their schemas are those of HabanaAI/gaudi-pytorch-bridge 1.19.0: ``scripts/hpu_op.yaml:7420-7432``
(rms_norm), ``hpu_ops/backend/sdpa_gen.cpp`` (sdpa_recomp_fwd), ``python_packages/
habana_frameworks/torch/hpex/kernels/RotaryPosEmbeddingHelper.py:107`` (rotary_pos_embedding).
``block_softmax_adjustment`` is newer than that release: vllm-project/vllm-gaudi 091bbad,
``vllm_gaudi/extension/ops.py:142-144``, which uses it from 1.22.0.494 on Gaudi 3
(``extension/features.py:86-89``). ``mixture_of_experts`` here is its overload ``fused_weights``
(``habana_kernels/kernels_register.cpp:2468``). FP8: ``habana_eager/
eager_custom_op_register.cpp:2146-2167``, ``hpu_ops/backend/fp8_ops.cpp``.
"""

from __future__ import annotations

import os

import torch

_SCHEMAS = (
    "rms_norm(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)",
    "rotary_pos_embedding(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, "
    "int mode) -> Tensor",
    "sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float dropout_p, "
    "float scale, bool is_causal, bool requires_backward, str softmax_mode, Tensor? valid_seq_len, "
    "str seq_padding_type) -> (Tensor, Tensor, Tensor, Tensor)",
    "mixture_of_experts(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, "
    "Tensor[] w12, Tensor[] w3, bool permuted_weights, str activation, int experts_min, "
    "int experts_max) -> Tensor",
    "block_softmax_adjustment(Tensor block_max, Tensor block_sums, Tensor block_groups, "
    "SymInt batch_size, SymInt[] out_shape) -> Tensor",
    "cast_to_fp8_v2(Tensor input, Tensor? scale=None, bool stochastic_rounding=False, "
    "bool is_amax=False, ScalarType dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)",
    "cast_to_fp8_v2.scalar(Tensor input, float scale, bool stochastic_rounding=False, "
    "bool is_amax=False, ScalarType dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)",
    "cast_from_fp8(Tensor input, Tensor? scale, ScalarType out_dtype, int[]? scale_shape=None) "
    "-> Tensor",
    "cast_from_fp8.scalar(Tensor input, float scale, ScalarType out_dtype, "
    "int[]? scale_shape=None) -> Tensor",
    "fp8_gemm_v2(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, "
    "Tensor? A_scale_inv=None, Tensor? B_scale_inv=None, Tensor? bias=None, bool accumulate=False, "
    "int[]? B_scale_shape=None) -> Tensor",
)
_BLOCKWISE = 0
_NORM_RANK = 3
_ROWS_RANK = 2


def register() -> torch.library.Library:
    """Define the operations; destroying the result takes them away."""
    library = torch.library.Library("hpu", "DEF")
    for schema in _SCHEMAS:
        name = schema.partition("(")[0]
        library.define(schema)
        function = globals()[f"_{name.partition('.')[0]}"]
        library.impl(name, function, "CompositeExplicitAutograd")
    return library


def _rms_norm(
    data_in: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    # «HPUFusedRMSNorm requires 3D tensors as inputs»: vllm_gaudi/ops/hpu_layernorm.py:20.
    if data_in.dim() != _NORM_RANK:
        raise RuntimeError(f"rms_norm: the kernel takes 3 dimensions, got {data_in.dim()}")
    # optimum-habana, modeling_llama.py: «mixed dtypes are not good for FusedRMSNorm».
    if data_in.dtype != gamma.dtype:
        raise RuntimeError(f"rms_norm: input is {data_in.dtype} and gamma {gamma.dtype}")
    wide = data_in.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return gamma * (wide * inverse).to(data_in.dtype), inverse.to(data_in.dtype)


def _rotary_pos_embedding(
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    position_ids: torch.Tensor | None,
    offset: int,
    mode: int,
) -> torch.Tensor:
    if mode != _BLOCKWISE or position_ids is not None or offset:
        raise NotImplementedError("the stand-in rotates blockwise, without position ids or offset")
    if not input.dtype == sin.dtype == cos.dtype or input.dim() != cos.dim():
        raise RuntimeError(f"rotary_pos_embedding: {input.shape} {input.dtype} with {cos.shape}")
    half = input.shape[-1] // 2
    turned = torch.cat((-input[..., half:], input[..., :half]), dim=-1)
    return input * cos + turned * sin


def _sdpa_recomp_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout_p: float,
    scale: float,
    is_causal: bool,
    requires_backward: bool,
    softmax_mode: str,
    valid_seq_len: torch.Tensor | None,
    seq_padding_type: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention with its row maxima and inverse row sums, in fp32.

    Padding is on the right: with ``valid_seq_len`` a query attends to no key beyond it. Rows of
    padding queries are not defined; here they are zero.
    """
    if softmax_mode not in ("none", "fast", "fp32"):
        raise RuntimeError(f"softmax_mode {softmax_mode!r}")
    if attention_mask is not None and attention_mask.dtype is torch.bool:
        raise RuntimeError("sdpa_recomp_fwd: the mask is a bias of the queries' dtype")
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    masked = torch.finfo(torch.float32).min
    if attention_mask is not None:
        scores = scores + attention_mask.float()
    rows = torch.arange(q.shape[-2], device=q.device)[:, None]
    columns = torch.arange(k.shape[-2], device=q.device)
    if is_causal:
        scores = torch.where(columns <= rows, scores, masked)
    if valid_seq_len is not None:
        lengths = valid_seq_len.view(-1, *(1,) * (scores.dim() - 1))
        scores = torch.where(columns < lengths, scores, masked)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    inverse = 1.0 / weights.sum(-1, keepdim=True)
    out = torch.matmul(weights * inverse, v.float())
    if valid_seq_len is not None:
        out = torch.where(rows < lengths, out, 0.0)
    return out.to(q.dtype), top, inverse, torch.empty(0, dtype=torch.int32, device=q.device)


def _mixture_of_experts(
    hidden_states: torch.Tensor,
    expert_routing_table: torch.Tensor,
    router_weights: torch.Tensor,
    w12: list[torch.Tensor],
    w3: list[torch.Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
) -> torch.Tensor:
    """The fused weights' overload, for all experts: gate and up, then down."""
    if not permuted_weights or (experts_min, experts_max) != (0, len(w12) - 1):
        raise NotImplementedError("the stand-in computes all experts, with permuted weights")
    if activation != "silu":
        raise NotImplementedError(f"the stand-in computes silu, not {activation}")
    if router_weights.dtype != hidden_states.dtype:
        raise RuntimeError(f"moe: {router_weights.dtype} weights of {hidden_states.dtype} rows")
    out = torch.zeros_like(hidden_states)
    for number, (both, down) in enumerate(zip(w12, w3, strict=True)):
        gate, up = (hidden_states @ both.t()).chunk(2, dim=-1)
        share = (router_weights * (expert_routing_table == number)).sum(-1, keepdim=True)
        out = out + (torch.nn.functional.silu(gate) * up) @ down.t() * share
    return out


def _cast_to_fp8_v2(
    input: torch.Tensor,
    scale: torch.Tensor | float | None = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: torch.dtype | None = None,
    scale_shape: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # fp8_ops.cpp:200-213; the product is one of the input's dtype: tests/pytest_working/any_mode/
    # test_hpu_fp8_ops_any_mode.py:86. Numbers beyond the largest one become that: 221-242 there.
    if input.dtype not in (torch.float32, torch.bfloat16):
        raise RuntimeError("CastToFp8V2 input dtype must be one of [float, bfloat16, ...]")
    if stochastic_rounding or is_amax or scale_shape is not None or dtype is None:
        raise NotImplementedError("the stand-in rounds to the nearest, without amax")
    largest = _largest_fp8(dtype)
    wide = input if scale is None else input * _in(input.dtype, scale)
    empty = torch.empty(0, dtype=torch.float32, device=input.device)
    return wide.float().clamp(-largest, largest).to(dtype), empty


def _cast_from_fp8(
    input: torch.Tensor,
    scale: torch.Tensor | float | None,
    out_dtype: torch.dtype,
    scale_shape: list[int] | None = None,
) -> torch.Tensor:
    # fp8_ops.cpp:265-300; the product is one of the result's dtype, as for ``cast_to_fp8_v2``.
    if out_dtype not in (torch.float32, torch.bfloat16):
        raise RuntimeError("CastFromFp8 output dtype must be equal to float or bfloat16.")
    if input.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise RuntimeError(f"cast_from_fp8: {input.dtype}")
    if scale_shape is not None:
        raise NotImplementedError("the stand-in has one scale")
    read = _as_read(input).to(out_dtype)
    return read if scale is None else read * _in(out_dtype, scale)


def _in(dtype: torch.dtype, scale: torch.Tensor | float) -> torch.Tensor:
    return torch.as_tensor(scale).to(dtype)


def _largest_fp8(dtype: torch.dtype) -> float:
    """E4M3 of Gaudi 2 ends at 240: ``hpu_ops/backend/optimizer_adamw_gen.cpp:211``, and vllm-gaudi,
    ``extension/ops.py:25-30``."""
    is_gaudi2 = os.environ.get("GAUDI_STANDIN_NAME") == "GAUDI2"
    return 240.0 if is_gaudi2 and dtype is torch.float8_e4m3fn else torch.finfo(dtype).max


def _as_read(steps: torch.Tensor) -> torch.Tensor:
    """What the device takes the bits for: beyond the largest number, NaN."""
    wide = steps.float()
    return torch.where(wide.abs() > _largest_fp8(steps.dtype), torch.nan, wide)


def _fp8_gemm_v2(
    a: torch.Tensor,
    trans_a: bool,
    b: torch.Tensor,
    trans_b: bool,
    d: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    scale_shape: list[int] | None = None,
) -> torch.Tensor:
    if trans_a or not trans_b or d is not None or accumulate or scale_shape is not None:
        raise NotImplementedError("the stand-in multiplies A with the transposed B")
    if not a.dtype == b.dtype == torch.float8_e4m3fn:
        raise RuntimeError(f"fp8_gemm_v2: {a.dtype} with {b.dtype}")
    if bias is not None and bias.dtype != out_dtype:
        raise RuntimeError(f"fp8_gemm_v2: a bias of {bias.dtype} for {out_dtype}")
    # Scales of rows are used with two dimensions alone: vllm-gaudi, ``ops/hpu_fp8.py:128``.
    if a_scale is not None and a_scale.numel() > 1 and a.dim() != _ROWS_RANK:
        raise RuntimeError(f"fp8_gemm_v2: scales of rows for {a.dim()} dimensions")
    out = _as_read(a) @ _as_read(b).t()
    for scale in (a_scale, b_scale):
        if scale is not None and scale.dtype is not torch.float32:
            raise RuntimeError(f"fp8_gemm_v2: a scale of {scale.dtype}")
        out = out if scale is None else out * scale
    out = out.to(out_dtype)
    return out if bias is None else out + bias


def _block_softmax_adjustment(
    block_max: torch.Tensor,
    block_sums: torch.Tensor,
    block_groups: torch.Tensor,
    batch_size: int,
    out_shape: list[int],
) -> torch.Tensor:
    """The factor of each block's weighted values; groups of ``batch_size`` and more own nothing."""
    flat_max = block_max.reshape(block_max.shape[0], -1).float()
    groups = block_groups.long().clamp_max(batch_size)
    top = flat_max.new_full((batch_size + 1, flat_max.shape[1]), -torch.inf)
    top = top.index_reduce(0, groups, flat_max, "amax")
    weight = torch.exp(flat_max - top.index_select(0, groups))
    sums = block_sums.reshape(block_sums.shape[0], -1).float() * weight
    total = torch.zeros_like(top).index_add(0, groups, sums).index_select(0, groups)
    return (weight / torch.maximum(total, sums)).to(block_max.dtype).view(out_shape)
