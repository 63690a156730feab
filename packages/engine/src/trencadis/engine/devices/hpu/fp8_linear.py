"""Linear layers with weights of FP8, whose inputs are rounded to FP8 in each call.

By the bridge's ``cast_to_fp8_v2`` and ``fp8_gemm_v2`` (``hpu_ops/backend/fp8_ops.cpp`` 1.19.0),
with a scale for each token and each output, as vllm-gaudi 091bbad calls them for such checkpoints
(``extension/ops.py:921-957``). Scales that a checkpoint has for inputs are not used.
"""

from __future__ import annotations

import functools

import attrs
import torch
from torch import nn

from trencadis.engine.devices.hpu.kernels import agrees
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
    """A linear layer whose weight has one scale for each output, and no other numbers."""

    steps: torch.Tensor
    scales: torch.Tensor

    def __init__(self, weight: PackedWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.register_buffer("steps", weight.steps, persistent=False)
        self.register_buffer("scales", weight.scales.float().flatten(), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The product with ``rows`` ``[..., inputs]``, in their dtype.

        The kernel takes the scales of rows beside those of outputs for two dimensions.
        """
        flat = rows.reshape(-1, self.in_features)
        largest = flat.abs().amax(1, keepdim=True).float().clamp_min(_SMALLEST_ROW)
        ops, dtype = torch.ops.hpu, torch.float8_e4m3fn
        steps, _ = ops.cast_to_fp8_v2(flat, LARGEST_FP8 / largest, False, False, dtype)
        out: torch.Tensor = ops.fp8_gemm_v2(
            *(steps, False, self.steps, True, None, rows.dtype),
            *(largest / LARGEST_FP8, self.scales, self.bias, False),
        )
        return out.view(*rows.shape[:-1], self.out_features)


def use_fp8_products(
    model: nn.Module, device: torch.device, dtype: torch.dtype, *, is_gaudi2: bool
) -> None:
    """Replace layers with weights of FP8 by `FP8Linear`, where the kernels give its results.

    Otherwise they are expanded in each call. Weights with scales of blocks are rounded again, to
    those of outputs, which is vllm-gaudi's default, too (``VLLM_HPU_FORCE_CHANNEL_FP8``).
    """
    layers = [each for each in layers_of(model, QuantizedLinear) if not each[2].packed.has_integers]
    if not layers:
        return
    usable = agrees("fp8_gemm_v2", functools.partial(fp8_trial, device, dtype), dtype)

    def replaced(layer: QuantizedLinear) -> nn.Module:
        packed = _of_outputs(layer.packed, is_gaudi2=is_gaudi2)
        return FP8Linear(packed, layer.bias) if usable else QuantizedLinear(packed, layer.bias)

    replace_layers(layers, replaced)


def _of_outputs(weight: PackedWeight, *, is_gaudi2: bool) -> PackedWeight:
    """The weight with a scale for each output, with numbers that the device has.

    E4M3 of Gaudi 2 ends at 240 where that of checkpoints has 448, which read there is NaN: weights
    are halved on the host, scales doubled, as by vllm-gaudi (``extension/ops.py:969-988``).
    """
    if weight.groups == 1 and not is_gaudi2:
        return weight
    where = weight.steps.device
    steps, scales = weight.steps.cpu(), weight.scales.cpu().float()
    if weight.groups > 1:
        made = rounded_fp8(PackedWeight(steps, scales).unpacked())
        steps, scales = made.steps, made.scales
    elif bool(steps.float().abs().amax() > LARGEST_FP8):
        steps, scales = (steps.float() / 2).to(steps.dtype), scales * 2
    return attrs.evolve(weight, steps=steps.to(where), scales=scales.to(where))


def fp8_trial(
    device: torch.device, dtype: torch.dtype, *, outputs: int = 48, inputs: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the kernels and of PyTorch for five rows of two sequences, one of them zeros."""
    values = torch.Generator().manual_seed(0)
    weight = rounded_fp8(torch.randn(outputs, inputs, generator=values) * inputs**-0.5)
    bias = nn.Parameter(torch.randn(outputs, generator=values).to(dtype), requires_grad=False)
    rows = torch.randn(2, 5, inputs, generator=values).to(dtype)
    rows[1, 2] = 0
    given = rounded_fp8(rows.flatten(0, 1))
    expected = given.unpacked() @ weight.unpacked().t() + bias.float()
    layer = FP8Linear(weight, bias).to(device)
    return layer(rows.to(device)).cpu(), expected.view(2, 5, outputs)
