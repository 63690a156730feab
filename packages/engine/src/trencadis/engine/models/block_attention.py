"""The attention backend of devices without one of their own: a block is scored for its owner.

The cache has blocks by head, ``[blocks, K, S, D]``, so that a prefix of it is a batch of matrices.
Blocks of a sequence are combined by scatter operations, which cost little where launches are free.
`paged_context` defines the letters used in shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F

from trencadis.engine.models.layer_spec import FEATURES, LayerSpec, feature_beyond
from trencadis.engine.models.paged_context import (
    MASKED,
    DecodeContext,
    MixedContext,
    PagedContext,
    PromptContext,
    RaggedChunk,
    RaggedContext,
)
from trencadis.engine.models.quantized_cache import CODES, QuantizedPart
from trencadis.engine.models.recent_blocks import (
    Recent,
    attend_to_recent,
    recent_in_decode,
    recent_in_prompt,
)
from trencadis.engine.models.softmax_attention import (
    bounded_scores,
    seen_in_prompt,
    softmax_attention,
)

Cached = torch.Tensor | QuantizedPart
"""The keys or the values of a layer."""

_ROWS = 512
"""Queries of a chunk that attend at once within a window: their keys are few more than it has."""


class BlockAttention:
    """Implements `Attention`."""

    token_rows = False
    as_operator = False
    scores_shared = False
    reads_groups = True
    reads_recent = True

    def prepare(self, paged: PagedContext, dtype: torch.dtype) -> PagedContext:
        """Nothing to derive."""
        del dtype
        return attrs.evolve(paged, attention=self)

    def supports(self, layer: LayerSpec) -> str | None:
        """None for causal attention with any `FEATURES`, keys and values of any width."""
        return feature_beyond(layer, FEATURES)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        paged: Any,
        spec: LayerSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write, then attend: see `Attention.attend`."""
        if paged.groups:
            paged = paged.groups[paged.group_of[layer]]
        if isinstance(paged, MixedContext):
            return attend_in_parts(self.attend, query, key, value, layer, paged, spec, sinks)
        keys: Any = paged.cache.key(layer)
        values: Any = paged.cache.value(layer)
        is_quantized = keys.dtype in CODES
        if is_quantized:
            keys, values = QuantizedPart(keys, key.dtype), QuantizedPart(values, key.dtype)
        # Finite, because the next owner of a block adds a bias to what it has not overwritten yet.
        for part, given in ((keys, key), (values, value)):
            rows = given[0].transpose(0, 1).nan_to_num(0.0, 0.0, 0.0)
            part[paged.write_blocks, :, paged.write_offsets] = rows
        if is_quantized:  # so that a chunk's result does not depend on where the prompt was cut
            key, value = keys.rounded(key), values.rounded(value)
        if isinstance(paged, PromptContext):
            return _attend_prompt(query, key, value, keys, values, paged, spec, sinks)
        if isinstance(paged, RaggedContext):
            return _attend_ragged(query, key, value, keys, values, paged, spec, sinks)
        if (recent := recent_in_decode(paged, spec)) is not None:
            return _attend_recent(query, keys, values, recent, spec, sinks)
        return _attend_decode(query, keys, values, paged.within(spec), spec, sinks)


def attend_in_parts(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    paged: MixedContext,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`Attention.attend` for the decode batch, then for the prefill chunks, in one result."""
    count, outs = paged.num_decodes, []
    for rows, context in ((slice(count), paged.decode), (slice(count, None), paged.prompt)):
        given = (tensor[:, :, rows] for tensor in (query, key, value))
        outs.append(attend(*given, layer, context, spec, sinks))
    return torch.cat(outs, dim=1)


def _attend_prompt(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cached_keys: Cached,
    cached_values: Cached,
    paged: PromptContext,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Prefill: a chunk attends to its context, gathered from the cache, and to itself."""
    query, key, value = (_by_sequence(x, paged.batch) for x in (query, key, value))
    recent = recent_in_prompt(paged, spec)
    blocks = paged.context_blocks if recent is None else recent.blocks
    if blocks is not None:
        key = torch.cat((_gather(cached_keys, blocks), key), dim=2)
        value = torch.cat((_gather(cached_values, blocks), value), dim=2)
    if recent is not None:
        out = _attend_masked(query, key, value, recent.seen, spec, sinks)
        return out.transpose(1, 2).reshape(1, -1, query.shape[1], value.shape[-1])
    mask = paged.mask
    if mask is None and (spec.needs_scores or spec.is_limited(key.shape[2])):
        tokens = torch.arange(query.shape[2], device=query.device)
        mask = (tokens <= tokens[:, None])[None, None]
    if mask is not None and paged.positions is not None and spec.is_limited(key.shape[2]):
        positions = paged.positions.view(paged.batch, -1)
        mask = mask & seen_in_prompt(spec, positions, key.shape[2] - query.shape[2])
    out = _attend_masked(query, key, value, mask, spec, sinks)
    return out.transpose(1, 2).reshape(1, -1, query.shape[1], value.shape[-1])


def _attend_ragged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cached_keys: Cached,
    cached_values: Cached,
    paged: RaggedContext,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Prefill: each chunk, in its own size, attends to its context and to itself."""
    _, heads, tokens, _ = query.shape
    out = query.new_empty((1, tokens, heads, value.shape[-1]))
    end = 0
    for chunk in paged.chunks:
        start, end = chunk.start, chunk.end
        rows, keys, values = (x[:, :, start:end] for x in (query, key, value))
        if spec.needs_scores or spec.is_limited(chunk.context_tokens + end - start):
            caches = (cached_keys, cached_values)
            _attend_narrowly(rows, keys, values, *caches, chunk, spec, sinks, out[:, start:end])
            continue
        if chunk.context_blocks is not None and chunk.mask is not None:
            held, context = chunk.context_tokens, chunk.context_blocks[None]
            keys = torch.cat((_gather(cached_keys, context)[:, :, :held], keys), dim=2)
            values = torch.cat((_gather(cached_values, context)[:, :, :held], values), dim=2)
            _attend_in_slices(rows, keys, values, chunk.mask, spec.scale, out[:, start:end])
            continue
        attended = _attend_masked(rows, keys, values, None, spec, None)
        out[:, start:end] = attended.transpose(1, 2)
    out[:, end:] = 0.0
    return out


def _attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of ``[B, H, Q, D]`` to ``[B, K, L, D]``. Without ``mask`` it is causal."""
    if spec.needs_scores and mask is not None:
        bias = torch.where(mask, 0.0, MASKED)
        return softmax_attention(query, key, value, bias, spec, sinks)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=spec.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_narrowly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cached_keys: Cached,
    cached_values: Cached,
    chunk: RaggedChunk,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Attend from some queries of a chunk at once to the keys between the first and last they see.

    Writes to ``out``, ``[1, Q, H, D]``.
    """
    held, tokens, size = chunk.context_tokens, query.shape[2], cached_keys.shape[2]
    for first in range(0, tokens, _ROWS):
        last = min(first + _ROWS, tokens)
        begin = spec.first_seen(held + first)
        rows = slice(max(0, begin - held), last)
        keys, values = key[:, :, rows], value[:, :, rows]
        if chunk.context_blocks is not None and begin < held:
            blocks, skipped = chunk.context_blocks[None, begin // size :], begin % size
            of_context = slice(skipped, skipped + held - begin)
            keys, values = (
                torch.cat((_gather(cached, blocks)[:, :, of_context], new), dim=2)
                for cached, new in ((cached_keys, keys), (cached_values, values))
            )
        at = torch.arange(held + first, held + last)[:, None]
        places = torch.arange(begin, held + last)
        mask = ((places <= at) & spec.sees(at, places))[None, None]
        attended = _attend_masked(query[:, :, first:last], keys, values, mask, spec, sinks)
        out[:, first:last] = attended.transpose(1, 2)


def _attend_in_slices(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend to a context and then causally, as many queries at once as ``mask`` has rows.

    ``mask`` is that of a `RaggedChunk`. Writes to ``out``, ``[1, Q, H, D]``.
    """
    rows, length = mask.shape
    tokens = query.shape[2]
    for first in range(0, tokens, rows):
        last = min(first + rows, tokens)
        width = length - (tokens - last)
        attended = F.scaled_dot_product_attention(
            query[:, :, first:last],
            key[:, :, :width],
            value[:, :, :width],
            attn_mask=mask[first - last :, length - width :],
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out[:, first:last] = attended.transpose(1, 2)


def _attend_recent(
    query: torch.Tensor,
    cached_keys: Cached,
    cached_values: Cached,
    recent: Recent,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Decode: each sequence attends to its last blocks, gathered from the cache."""
    key, value = (_gather(cached, recent.blocks) for cached in (cached_keys, cached_values))
    return attend_to_recent(query, key, value, recent, spec, sinks)


def _attend_decode(
    query: torch.Tensor,
    cached_keys: Cached,
    cached_values: Cached,
    paged: DecodeContext,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Decode: attend from each block's owner to that block, then combine the blocks of each owner.

    A block gives a maximum, a sum of exponentials and a weighted sum of values. The blocks of a
    sequence are combined by rescaling to their common maximum (Milakov and Gimelshein, "Online
    normalizer calculation for softmax", 2018). Row B of the accumulators takes blocks without an
    owner.
    """
    _, heads, batch, size = query.shape
    kv_heads = cached_keys.shape[1]
    groups = heads // kv_heads
    rows = (query[0].transpose(0, 1) * spec.scale).view(batch, kv_heads, groups, size)
    rows = rows[paged.readers]
    n, extra, owners, cap = paged.prefix_blocks, paged.extra_blocks, paged.owners, spec.softcap
    scored = []
    if n:
        held, weighed = cached_keys[:n], cached_values[:n]
        scored.append(_score_blocks(rows[:n], held, weighed, paged.bias[:n], cap))
    if extra is not None:
        held, weighed = (x.index_select(0, extra) for x in (cached_keys, cached_values))
        scored.append(_score_blocks(rows[n:], held, weighed, paged.bias[n:], cap))
    if sinks is not None:  # a further block of each row: one score, of a value of 0
        own = torch.arange(batch, device=owners.device, dtype=owners.dtype)
        owners = torch.cat((owners, own))
        peak = sinks.float().view(1, kv_heads, groups, 1).expand(batch, -1, -1, -1)
        nothing = peak.new_zeros((1, 1, 1, cached_values.shape[3])).expand(*peak.shape[:3], -1)
        scored.append((peak, torch.cat((nothing, torch.ones_like(peak)), dim=-1)))
    peak, sums = (
        parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*scored, strict=True)
    )
    combined = _combine(peak, sums, owners, batch + 1)
    return combined[:batch].to(query.dtype).view(1, batch, heads, -1)


def _score_blocks(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial softmax of ``rows`` ``[N, K, G, D]`` over blocks ``[N, K, S, D]``.

    Returns, in fp32, the maximum per row ``[N, K, G, 1]``, and ``[N, K, G, D + 1]``: the values
    weighted by the exponentials, then the sum of the exponentials.
    """
    scores = torch.matmul(rows, keys.transpose(-1, -2)).float()
    scores = bounded_scores(scores, softcap) + bias
    peak = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - peak)
    weighted = torch.matmul(weights.to(values.dtype), values).float()
    return peak, torch.cat((weighted, weights.sum(-1, keepdim=True)), dim=-1)


def _combine(
    peak: torch.Tensor, sums: torch.Tensor, owners: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """The attention output of each owner, from the partial softmax of its blocks."""
    top = peak.new_full((num_rows, *peak.shape[1:]), MASKED)
    top.scatter_reduce_(0, owners.view(-1, 1, 1, 1).expand_as(peak), peak, "amax")
    combined = sums.new_zeros((num_rows, *sums.shape[1:]))
    combined.index_add_(0, owners, sums * torch.exp(peak - top[owners]))
    # Padded rows own no block; their sum of 0 must not become a NaN.
    return combined[..., :-1] / combined[..., -1:].clamp_min(torch.finfo(sums.dtype).tiny)


def _by_sequence(flat: torch.Tensor, batch: int) -> torch.Tensor:
    """``[1, heads, B * Q, D]`` as ``[B, heads, Q, D]``."""
    heads, _, size = flat.shape[1:]
    return flat.view(heads, batch, -1, size).transpose(0, 1)


def _gather(cached: Cached, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks ``[B, C]`` of a cache ``[blocks, K, S, D]`` as ``[B, K, C * S, D]``."""
    return cached[blocks].transpose(1, 2).flatten(2, 3)
