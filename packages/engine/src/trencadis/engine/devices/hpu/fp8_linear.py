"""Linear layers with weights of FP8, whose inputs are rounded to FP8 in each call.

By the bridge's ``cast_to_fp8_v2`` and ``fp8_gemm_v2`` (``hpu_ops/backend/fp8_ops.cpp`` 1.19.0),
with a scale for each output, and for each token or, where one is known, for all inputs, as
vllm-gaudi 091bbad calls them for such checkpoints (``extension/ops.py:921-957``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
import torch
from torch import nn

from trencadis.engine.devices.hpu.kernels import agrees
from trencadis.engine.models.packed_experts import (
    MATRICES,
    expand_experts,
    experts_in,
    packed_weight,
    put_weights,
)
from trencadis.engine.models.packed_weight import (
    LARGEST_FP8,
    PackedWeight,
    QuantizedLinear,
    rounded_fp8,
)
from trencadis.engine.models.replaced_layers import layers_of, replace_layers

_SMALLEST_ROW = 1e-8
"""What the largest number of a row counts for at least, so that the scale of zeros is finite."""


class FP8Linear(nn.Module):
    """A linear layer whose weight has one scale for each output, and no other numbers but one
    scale of inputs."""

    steps: torch.Tensor
    scales: torch.Tensor
    input_scale: torch.Tensor | None

    def __init__(self, weight: PackedWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.register_buffer("steps", weight.steps, persistent=False)
        self.register_buffer("scales", weight.scales.float().flatten(), persistent=False)
        self.register_buffer("input_scale", weight.input_scale, persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The product with ``rows`` ``[..., inputs]``, in their dtype.

        The kernel takes the scales of rows beside those of outputs for two dimensions. The cast
        multiplies in the dtype of rows (``test_hpu_fp8_ops_any_mode.py:86`` of the bridge), so the
        scale is of that one, and what undoes it is exactly its inverse. Inputs beyond what one
        scale was measured for become the largest number.
        """
        flat = rows.reshape(-1, self.in_features)
        out = fp8_product(flat, self.steps, self.scales, self.bias, self.input_scale)
        return out.view(*rows.shape[:-1], self.out_features)


def fp8_product(
    rows: torch.Tensor,
    steps: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[rows, outputs]`` of ``rows`` ``[rows, inputs]`` and FP8 ``[outputs, inputs]``.

    With fp32 ``scales`` ``[outputs]``; see `FP8Linear`.
    """
    if input_scale is None:
        largest = rows.abs().amax(1, keepdim=True).float().clamp_min(_SMALLEST_ROW)
        scale = (LARGEST_FP8 / largest).to(rows.dtype)
    else:
        scale = input_scale.reciprocal().to(rows.dtype)
    ops, dtype = torch.ops.hpu, torch.float8_e4m3fn
    rounded, _ = ops.cast_to_fp8_v2(rows, scale, False, False, dtype)
    out: torch.Tensor = ops.fp8_gemm_v2(
        *(rounded, False, steps, True, None, rows.dtype),
        *(scale.float().reciprocal(), scales, bias, False),
    )
    return out


def use_fp8_products(
    model: nn.Module, device: torch.device, dtype: torch.dtype, *, is_gaudi2: bool
) -> None:
    """Replace layers with weights of FP8 by `FP8Linear`, where the kernels give its results.

    Otherwise they are expanded in each call. Weights with scales of blocks are rounded again, to
    those of outputs, which is vllm-gaudi's default, too (``VLLM_HPU_FORCE_CHANNEL_FP8``). E4M3 of
    Gaudi 2 ends at 240 where that of checkpoints has 448, which read there is NaN: weights are
    halved and scales doubled, also of inputs, as by vllm-gaudi (``extension/ops.py:969-988``).
    """
    layers = [each for each in layers_of(model, QuantizedLinear) if not each[2].packed.has_integers]
    experts = experts_in(model)
    if not layers and not experts:
        return
    trial = functools.partial(fp8_trial, device, dtype)
    usable = agrees("fp8_gemm_v2", trial, dtype)
    has_input_scales = usable and any(each[2].input_scale is not None for each in layers)
    if has_input_scales:
        one_scale = functools.partial(trial, input_scale=1 / 128)
        has_input_scales = agrees("fp8_gemm_v2 with one scale of inputs", one_scale, dtype)

    def replaced(layer: QuantizedLinear) -> nn.Module:
        packed = layer.packed
        input_scale = packed.input_scale if has_input_scales else None
        if usable or (is_gaudi2 and packed.groups == 1):
            packed = _as_multiplied(packed, is_gaudi2=is_gaudi2)
        if input_scale is not None and is_gaudi2:
            input_scale = input_scale * 2
        packed = attrs.evolve(packed, input_scale=input_scale)
        return FP8Linear(packed, layer.bias) if usable else QuantizedLinear(packed, layer.bias)

    replace_layers(layers, replaced)
    if not usable:
        expand_experts(model, dtype)
        return
    for each in experts:
        for matrix in MATRICES:
            numbers = range(len(getattr(each, matrix)))
            weights = [packed_weight(each, matrix, number) for number in numbers]
            put_weights(each, matrix, [_as_multiplied(w, is_gaudi2=is_gaudi2) for w in weights])


def _as_multiplied(weight: PackedWeight, *, is_gaudi2: bool) -> PackedWeight:
    """With scales of outputs, and numbers that the device has."""
    if weight.groups > 1:
        return _on_the_host(weight, lambda own: rounded_fp8(own.unpacked()))
    return _on_the_host(weight, _halved) if is_gaudi2 else weight


def _on_the_host(
    weight: PackedWeight, change: Callable[[PackedWeight], PackedWeight]
) -> PackedWeight:
    """A weight of steps and scales that the host has changed: a device may lack its numbers."""
    where = weight.steps.device
    changed = change(PackedWeight(weight.steps.cpu(), weight.scales.cpu()))
    return PackedWeight(changed.steps.to(where), changed.scales.to(where))


def _halved(weight: PackedWeight) -> PackedWeight:
    """A weight with the same values and numbers of half the size, where some are too large."""
    wide = weight.steps.float()
    if bool(wide.abs().amax() <= LARGEST_FP8):
        return weight
    return PackedWeight((wide / 2).to(weight.steps.dtype), weight.scales.float() * 2)


def fp8_trial(
    device: torch.device,
    dtype: torch.dtype,
    *,
    outputs: int = 48,
    inputs: int = 64,
    input_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the kernels and of PyTorch for five rows of two sequences, one of them zeros.

    Each row has eighths, the largest of them 15: with its scale, 128, all are numbers of E4M3, so
    that no result depends on how a kernel rounds.
    """
    values = torch.Generator().manual_seed(0)
    weight = rounded_fp8(torch.randn(outputs, inputs, generator=values) * inputs**-0.5)
    bias = nn.Parameter(torch.randn(outputs, generator=values).to(dtype), requires_grad=False)
    rows = torch.randint(-15, 16, (2, 5, inputs), generator=values) / 8
    rows[..., 0] = 15 / 8
    rows[1, 2] = 0
    expected = rows @ weight.unpacked().t() + bias.float()
    if input_scale is not None:
        weight = attrs.evolve(weight, input_scale=torch.tensor([input_scale]))
    found = FP8Linear(weight, bias).to(device)(rows.to(dtype).to(device))
    return found.cpu(), expected
