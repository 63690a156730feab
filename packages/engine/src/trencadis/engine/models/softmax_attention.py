"""Attention by products and a softmax: for scores that no fused kernel of PyTorch computes.

Those are scores that a tanh bounds (Gemma 2), and softmax with a learned score of each head that
takes weight and adds no value, a sink (gpt-oss). All shapes depend on shapes alone.
"""

from __future__ import annotations

import torch

from trencadis.engine.models.layer_spec import LayerSpec

_MOST_SCORES = 1 << 26
"""Scores that are computed at once: 256 MB of them, in fp32."""


def softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of ``[B, H, Q, D]`` to ``[B, K, L, D]``, as ``[B, H, Q, D of values]``.

    ``bias`` is ``[B or 1, 1, Q, L]``. ``sinks``: ``[H]``, None where the spec has none.
    """
    batch, heads, _, _ = query.shape
    at_once = max(1, _MOST_SCORES // (batch * heads * key.shape[2]))
    parts = [
        _attend_rows(rows, key, value, of_rows, spec, sinks)
        for rows, of_rows in zip(
            torch.split(query, at_once, 2), torch.split(bias, at_once, 2), strict=True
        )
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, queries, size = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    rows = query.reshape(batch, kv_heads, groups * queries, size)
    scores = torch.matmul(rows, key.transpose(-1, -2)).float() * spec.scale
    scores = scores.view(batch, kv_heads, groups, queries, -1)
    scores = bounded_scores(scores, spec.softcap) + bias.unsqueeze(1)
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        of_heads = sinks.float().view(1, kv_heads, groups, 1, 1)
        peak = torch.maximum(peak, of_heads)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(of_heads - peak)
    weights = (weights / total).to(value.dtype).view(batch, kv_heads, groups * queries, -1)
    return torch.matmul(weights, value).view(batch, heads, queries, -1)


def bounded_scores(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Scores within ``softcap`` of 0; unchanged without one."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def seen_in_prompt(spec: LayerSpec, positions: torch.Tensor, num_context: int) -> torch.Tensor:
    """`LayerSpec.sees` for a padded batch of chunks, ``[B, 1, Q, num_context + Q]``.

    ``positions`` is ``[B, Q]``. The keys are the first ``num_context`` slots of each sequence, then
    those of its chunk.
    """
    context = torch.arange(num_context, device=positions.device, dtype=positions.dtype)
    keys = torch.cat((context.expand(positions.shape[0], -1), positions), dim=1)
    # Views, as an index would not be traced on every device.
    return spec.sees(positions.view(len(positions), 1, -1, 1), keys.view(len(keys), 1, 1, -1))
