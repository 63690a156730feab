"""Paged attention over the KV cache, registered with transformers' ``AttentionInterface``.

The tokens of a batch are flat, ``[1, tokens]``, so that models that support transformers'
``logits_to_keep`` compute logits for the wanted rows only. `paged_context` defines what a forward
pass reads and writes, and the letters used in shapes.

How the cache is written and read is an `Attention`, which the device chooses (``Device.attention``)
and the forward pass carries; `block_attention` is that of devices without one. What a layer
computes is its `LayerSpec`, with which the loader has declared its modules (`declare_layers`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from trencadis.engine.errors import ModelError
from trencadis.engine.models.attention_operator import attend_in_program, attend_with
from trencadis.engine.models.block_attention import BlockAttention
from trencadis.engine.models.layer_spec import SINKS, LayerSpec, features_of
from trencadis.engine.models.paged_context import PagedContext

ATTENTION_NAME = "trencadis_paged"

_BLOCK_ATTENTION = BlockAttention()


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedContext,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values to the cache, then attend.

    ``query`` is ``[1, H, T, D]``, ``key`` and ``value`` are ``[1, K, T, D]``, and the width D of
    values may differ. Returns ``[1, T, H, D]``. The signature is that of transformers'
    ``AttentionInterface``. Raises `ModelError` for a call other than the layer's spec declares.
    """
    spec: LayerSpec = module.layer_spec  # type: ignore[assignment]
    features = features_of(attention_mask, arguments)
    if features != spec.arguments or scaling not in (None, spec.scale):
        raise ModelError(
            f"layer {module.layer_idx} passes {features} and the scale {scaling} to attention, and "
            f"was read as {spec}: serve another model"
        )
    attention, sinks = paged.attention or _BLOCK_ATTENTION, arguments.get(SINKS)
    if attention.as_operator and type(query) is not torch.Tensor:  # it is being traced
        return attend_in_program(query, key, value, sinks), None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if spec.scaled_cache:
        key_scale: Any = module.key_scale
        value_scale: Any = module.value_scale
        query, key, value = query * key_scale, key / key_scale, value / value_scale
        out = attend_with(attention, query, key, value, layer, paged, spec, sinks)
        return out * value_scale, None
    return attend_with(attention, query, key, value, layer, paged, spec, sinks), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
