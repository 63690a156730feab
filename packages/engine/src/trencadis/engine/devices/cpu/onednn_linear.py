"""Linear layers with bf16 weights in oneDNN's own layout, as an operator that can be compiled."""

from __future__ import annotations

import torch
from torch import nn

_LIBRARY = torch.library.Library("trencadis", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "onednn_linear(Tensor rows, Tensor weight, Tensor? bias) -> Tensor"
)


def onednn_packs_bf16() -> bool:
    """Whether oneDNN is there and has products of bf16 on this processor.

    Without AVX-512 (or AVX-NE-CONVERT) it rejects to pack such weights: mkldnn_bf16_device_check
    in PyTorch's aten/src/ATen/native/mkldnn/Utils.h.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class OneDNNLinear(nn.Module):
    """A linear layer of bf16 whose weight is packed once, not in every call.

    Only where `onednn_packs_bf16`.
    """

    packed: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.register_buffer("packed", packed, persistent=False)
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # Only tracing needs the registered operator; calling oneDNN directly is faster.
        compute = _compute if type(rows) is torch.Tensor else torch.ops.trencadis.onednn_linear
        out: torch.Tensor = compute(rows, self.packed, self.bias)
        return out


def _compute(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = _POINTWISE(rows, weight, bias, "none", [], "")
    return out


# A custom operator, because Inductor accepts oneDNN's operator with constant weights only, and all
# layers can share a program only if the weight is an input.
_POINTWISE = torch.ops.mkldnn._linear_pointwise.default
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "onednn_linear", _compute, "CompositeExplicitAutograd"
)


def _shape(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    del bias
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))


torch.library.register_fake("trencadis::onednn_linear", _shape, lib=_LIBRARY)
