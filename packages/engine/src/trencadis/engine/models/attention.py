"""Paged attention over the KV cache, registered with transformers' ``AttentionInterface``.

The tokens of a batch are flat, ``[1, tokens]``, so that models that support transformers'
``logits_to_keep`` compute logits for the wanted rows only. `paged_context` defines what a forward
pass reads and writes, and the letters used in shapes.

How the cache is written and read is an `Attention`, which the device chooses (``Device.attention``)
and the forward pass carries; `block_attention` is that of the CPU. To add a kind of attention (such
as a sliding window): compute it in each `Attention`, and remove it from `_refuse_unsupported`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from trencadis.engine.errors import ModelError
from trencadis.engine.models.attention_operator import attend_in_program
from trencadis.engine.models.block_attention import BlockAttention
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
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values to the cache, then attend.

    ``query`` is ``[1, H, T, D]``, ``key`` and ``value`` are ``[1, K, T, D]``. Returns
    ``[1, T, H, D]``. The signature is that of transformers' ``AttentionInterface``. Raises
    `ModelError` for an attention feature that this engine does not compute.
    """
    _refuse_unsupported(features)
    attention = paged.attention or _BLOCK_ATTENTION
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention.as_operator and type(query) is not torch.Tensor:  # it is being traced
        return attend_in_program(query, key, value, scale), None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return attention.attend(query, key, value, layer, paged, scale), None


def _refuse_unsupported(features: dict[str, Any]) -> None:
    for name in ("sliding_window", "softcap", "s_aux"):
        if features.get(name) is not None:
            raise ModelError(
                f"the model's attention uses {name}={features[name]!r}, which this engine does "
                "not compute: serve a model with plain causal attention"
            )


AttentionInterface.register(ATTENTION_NAME, paged_attention)
