"""The attention backend for Gaudi: rows written in place, blocks combined by matrices.

The cache has a row for each token, ``[blocks * S, K, D]``, because ``index_copy_`` on such a tensor
is the one update that the bridge keeps in place (HabanaAI/gaudi-pytorch-bridge 1.19.0,
``dynamo/compile_backend/passes.py:2575``). Where the CPU's backend scatters to the owners of
blocks, this one multiplies with the one-hot matrix of block and owner, as vllm-gaudi does
(``vllm_gaudi/extension/ops.py:86-91``): on Gaudi ``index_add_`` loses all but one of the entries
with the same index. `paged_context` defines the letters used in shapes.

Scores, weights and weighted values are products of the model's dtype; maxima, exponentials and the
sums of weights are fp32. In bf16 the largest error, beside an attention in fp32, was 0.6 % of the
largest value for sequences of 50 to 2,000 tokens, and 0.9 % with the CPU's backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F

from trencadis.engine.devices.hpu.cached_rows import CachedRows, as_kept, as_read
from trencadis.engine.devices.hpu.kernels import Kernels, block_adjustment, prompt_attention
from trencadis.engine.models.layer_spec import FEATURES, LayerSpec, feature_beyond
from trencadis.engine.models.paged_context import (
    MASKED,
    Attention,
    DecodeContext,
    LayerCaches,
    LayerRun,
    PagedContext,
    PromptContext,
)
from trencadis.engine.models.recent_blocks import (
    attend_to_recent,
    recent_in_decode,
    recent_in_prompt,
)
from trencadis.engine.models.softmax_attention import (
    bounded_scores,
    seen_in_prompt,
    softmax_attention,
)

_BOUND = 1e15
"""Keys, queries and values are far below it, and its square is far below the largest fp32."""


@attrs.frozen(eq=False)
class PromptRows(PagedContext):
    """A batch of prefill chunks.

    ``slots``: ``[B * Q]``, the row of the cache that each token writes. Without context,
    ``lengths`` is ``[B]`` int32, the tokens of each chunk. With context, ``context_blocks`` is
    ``[B * C]``, and ``bias`` is ``[B, 1, Q, C * S + Q]`` in the model's dtype.
    ``state_reads``, ``state_writes``, ``state_tokens``: see `StateTensors`. ``recent_blocks``,
    ``recent_starts``: as in `PromptContext`.
    """

    cache: LayerCaches
    batch: int
    slots: torch.Tensor
    lengths: torch.Tensor | None = None
    context_blocks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    attention: Attention | None = None
    layer_run: LayerRun | None = None
    positions: torch.Tensor | None = None
    adapter_rows: torch.Tensor | None = None
    state_reads: torch.Tensor | None = None
    state_writes: torch.Tensor | None = None
    state_tokens: torch.Tensor | None = None
    groups: tuple[Any, ...] = ()
    group_of: Sequence[int] = ()
    recent_blocks: torch.Tensor | None = None
    recent_starts: torch.Tensor | None = None


@attrs.frozen(eq=False)
class DecodeRows(PagedContext):
    """One token for each sequence.

    ``slots``: ``[B]``. ``owners``: ``[N + E]``, B for a block without an owner. ``mapping``:
    ``[N + E, B]`` in the model's dtype, 1 where the sequence owns the block. ``bias``:
    ``[N + E, 1, 1, S]`` fp32. ``extra_blocks``: ``[E]``.

    Where the first P blocks are shared, N counts the others, ``shared_bias`` is ``[B, P * S]``
    fp32, and ``owners`` and ``mapping`` go on with the B sequences for each part of the P blocks.

    ``starts``, ``shared_starts``, ``recent_blocks`` and ``recent_starts``: as in `DecodeContext`.
    ``queries_at``: ``[N + E]``, the position of the query that reads the block. ``state_reads``,
    ``state_writes``, ``state_tokens``: see `StateTensors`.
    """

    cache: LayerCaches
    prefix_blocks: int
    slots: torch.Tensor
    owners: torch.Tensor
    mapping: torch.Tensor
    bias: torch.Tensor
    extra_blocks: torch.Tensor | None = None
    shared_bias: torch.Tensor | None = None
    attention: Attention | None = None
    layer_run: LayerRun | None = None
    positions: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    shared_starts: torch.Tensor | None = None
    queries_at: torch.Tensor | None = None
    adapter_rows: torch.Tensor | None = None
    state_reads: torch.Tensor | None = None
    state_writes: torch.Tensor | None = None
    state_tokens: torch.Tensor | None = None
    groups: tuple[Any, ...] = ()
    group_of: Sequence[int] = ()
    recent_blocks: torch.Tensor | None = None
    recent_starts: torch.Tensor | None = None


class RowAttention:
    """Implements `Attention` on a cache of token rows, with Intel's kernels where there are any.

    ``kernels`` has None for each kernel that the release lacks or that failed its trial.
    """

    token_rows = True
    as_operator = False
    scores_shared = True
    reads_groups = False
    reads_recent = True

    def __init__(self, kernels: Kernels | None = None) -> None:
        self.kernels = kernels or Kernels()

    def supports(self, layer: LayerSpec) -> str | None:
        """None for causal attention with any `FEATURES`, keys and values of any width."""
        return feature_beyond(layer, FEATURES)

    def prepare(self, paged: PagedContext, dtype: torch.dtype) -> PagedContext:
        """Slots, biases and the one-hot matrix: once for each forward pass."""
        if isinstance(paged, PromptContext):
            return self._prepare_prompt(paged, dtype)
        if isinstance(paged, DecodeContext):
            return self._prepare_decode(paged, dtype)
        raise TypeError(f"cannot prepare {type(paged).__name__}")

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
        parts = []
        for held, given in ((paged.cache.key(layer), key), (paged.cache.value(layer), value)):
            kept = as_kept(_bounded(given[0].transpose(0, 1)), held.dtype)
            rows = held.index_copy_(0, paged.slots, kept)
            parts.append((CachedRows(rows, paged.cache.block_size, query.dtype), kept))
        (keys, new_keys), (values, new_values) = parts
        if isinstance(paged, PromptRows):
            if keys.is_rounded:  # so that a result does not depend on where the prompt was cut
                new = (as_read(kept, query.dtype) for kept in (new_keys, new_values))
                key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in new)
            return self._attend_prompt(query, key, value, keys, values, paged, spec, sinks)
        if (recent := recent_in_decode(paged, spec)) is not None:
            blocks, batch = recent.blocks.flatten(), recent.blocks.shape[0]
            key, value = (rows.of_sequences(blocks, batch) for rows in (keys, values))
            return attend_to_recent(query, key, value, recent, spec, sinks)
        return self._attend_decode(query, keys, values, paged, spec, sinks)

    # Prefill.

    def _prepare_prompt(self, paged: PromptContext, dtype: torch.dtype) -> PromptRows:
        slots = paged.write_blocks * paged.cache.block_size + paged.write_offsets
        if paged.context_blocks is None or paged.mask is None:
            # Padding tokens write to block 0. An empty row of a batch counts as one token.
            real = (paged.write_blocks != 0).view(paged.batch, -1)
            lengths = real.sum(1, dtype=torch.int32).clamp_min(1)
            return PromptRows(
                *(paged.cache, paged.batch, slots, lengths),
                attention=self,
                layer_run=paged.layer_run,
                positions=paged.positions,
            )
        bias = torch.where(paged.mask, 0.0, MASKED).to(dtype)
        blocks = paged.context_blocks.flatten()
        return PromptRows(
            *(paged.cache, paged.batch, slots, None, blocks, bias, self, paged.layer_run),
            paged.positions,
            recent_blocks=paged.recent_blocks,
            recent_starts=paged.recent_starts,
        )

    def _attend_prompt(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: CachedRows,
        values: CachedRows,
        paged: PromptRows,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        query, key, value = (_by_sequence(x, paged.batch) for x in (query, key, value))
        recent = recent_in_prompt(paged, spec)
        blocks = paged.context_blocks if recent is None else recent.blocks.flatten()
        if blocks is not None:
            key = torch.cat((keys.of_sequences(blocks, paged.batch), key), 2)
            value = torch.cat((values.of_sequences(blocks, paged.batch), value), 2)
        if recent is None:
            bias = _prompt_bias(paged, spec, query, key.shape[2])
        else:
            bias = recent.bias.to(query.dtype)
        if spec.needs_scores and bias is not None:
            out = softmax_attention(query, key, value, bias, spec, sinks)
            return out.transpose(1, 2).reshape(1, -1, query.shape[1], spec.value_width)
        attend = self.kernels.prompt_attention or prompt_attention
        if spec.key_width != spec.value_width:
            # Intel's kernel was tried with one width. Zeros change no score.
            width = max(spec.key_width, spec.value_width)
            query, key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
        lengths = paged.lengths if bias is None else None
        out = attend(query, key, value, spec.scale, bias, lengths)
        if spec.key_width > spec.value_width:
            out = out[..., : spec.value_width]
        return out.transpose(1, 2).reshape(1, -1, query.shape[1], spec.value_width)

    # Decode.

    def _prepare_decode(self, paged: DecodeContext, dtype: torch.dtype) -> DecodeRows:
        batch, size = paged.write_blocks.shape[0], paged.cache.block_size
        owners, shared_bias, queries_at = paged.owners, None, None
        if paged.positions is not None:
            queries_at = paged.positions.index_select(0, paged.readers)
        rows = torch.arange(batch, device=owners.device, dtype=owners.dtype)
        if paged.shared_filled is not None:
            filled = paged.shared_filled.unsqueeze(-1)
            seen = torch.arange(size, device=filled.device) < filled
            shared_bias = torch.where(seen, 0.0, MASKED).view(batch, -1)
            owners = torch.cat((owners, *[rows] * len(_parts(shared_bias.shape[1]))))
        return DecodeRows(
            paged.cache,
            paged.prefix_blocks,
            paged.write_blocks * size + paged.write_offsets,
            owners,
            (owners[:, None] == rows).to(dtype),
            paged.bias,
            paged.extra_blocks,
            shared_bias,
            self,
            paged.layer_run,
            paged.positions,
            paged.starts,
            paged.shared_starts,
            queries_at,
            recent_blocks=paged.recent_blocks,
            recent_starts=paged.recent_starts,
        )

    def _attend_decode(
        self,
        query: torch.Tensor,
        keys: CachedRows,
        values: CachedRows,
        paged: DecodeRows,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Score each block for its owner, then combine the blocks of each owner.

        The blocks of a sequence are rescaled to their common maximum (Milakov and Gimelshein,
        "Online normalizer calculation for softmax", 2018).
        """
        _, heads, batch, size = query.shape
        kv_heads, value_width = values.held.shape[1:]
        groups = heads // kv_heads
        queries = _bounded(query[0].transpose(0, 1)) * spec.scale
        num_pairs, owners, mapping_of_all = paged.bias.shape[0], paged.owners, paged.mapping
        bias_of_all, shared_bias = _decode_bias(paged, spec)
        scored = []
        if num_pairs:
            # Each block gets the query of its owner; a block without an owner gets zeros.
            mapping = paged.mapping.narrow(0, 0, num_pairs)
            rows = torch.matmul(mapping, queries.reshape(batch, heads * size))
            rows = rows.view(-1, kv_heads, groups, size)
            extra = 0 if paged.extra_blocks is None else paged.extra_blocks.shape[0]
            if n := num_pairs - extra:
                first = paged.prefix_blocks - n
                prefix, bias = rows.narrow(0, 0, n), bias_of_all.narrow(0, 0, n)
                held, weighed = (x.in_place(first, n) for x in (keys, values))
                scored.append(_score_blocks(prefix, held, weighed, bias, spec.softcap))
            if paged.extra_blocks is not None:
                pairs, bias = rows.narrow(0, n, extra), bias_of_all.narrow(0, n, extra)
                held, weighed = (x.selected(paged.extra_blocks) for x in (keys, values))
                scored.append(_score_blocks(pairs, held, weighed, bias, spec.softcap))
        if shared_bias is not None:
            grouped = queries.view(batch, kv_heads, groups, size)
            scored += _score_shared(grouped, keys, values, shared_bias, spec.softcap)
        if sinks is not None:  # a further block of each row: one score, of a value of 0
            own = torch.arange(batch, device=owners.device, dtype=owners.dtype)
            owners = torch.cat((owners, own))
            one_hot = (own.unsqueeze(1) == own).to(mapping_of_all.dtype)
            mapping_of_all = torch.cat((mapping_of_all, one_hot))
            score = sinks.float().view(1, kv_heads, groups, 1).expand(batch, -1, -1, -1)
            nothing = score.new_zeros((batch, kv_heads, groups, value_width))
            scored.append((score, torch.ones_like(score), nothing))
        peak, sums, weighted = (
            parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*scored, strict=True)
        )
        combine = self.kernels.block_adjustment or block_adjustment
        factor = combine(peak, sums, owners, mapping_of_all)
        scaled = (weighted * factor).flatten(1).to(mapping_of_all.dtype)
        out = torch.matmul(mapping_of_all.t(), scaled)
        return out.to(query.dtype).view(1, batch, heads, value_width)


def _prompt_bias(
    paged: PromptRows, spec: LayerSpec, query: torch.Tensor, num_keys: int
) -> torch.Tensor | None:
    """``[B, 1, Q, L]`` in the dtype of ``query``; None where a causal mask suffices."""
    bias, num_queries = paged.bias, query.shape[2]
    limited = paged.positions is not None and spec.is_limited(num_keys)
    if bias is None and (limited or spec.needs_scores):
        tokens = torch.arange(num_queries, device=paged.slots.device)
        causal = torch.where(tokens <= tokens.unsqueeze(1), 0.0, MASKED)
        bias = causal.to(query.dtype).expand(paged.batch, 1, -1, -1)
    if bias is None or paged.positions is None or not limited:
        return bias
    positions = paged.positions.view(paged.batch, num_queries)
    return torch.where(seen_in_prompt(spec, positions, num_keys - num_queries), bias, MASKED)


def _decode_bias(paged: DecodeRows, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``bias`` and ``shared_bias`` of `DecodeRows`, with what the spec leaves out masked."""
    bias, shared = paged.bias, paged.shared_bias
    if not spec.has_limits:
        return bias, shared
    if paged.positions is None or paged.starts is None or paged.queries_at is None:
        raise ValueError("the context lacks the positions that a window needs")
    offsets = torch.arange(paged.cache.block_size, device=paged.starts.device)
    slots = paged.starts.view(-1, 1, 1, 1) + offsets
    bias = torch.where(spec.sees(paged.queries_at.view(-1, 1, 1, 1), slots), bias, MASKED)
    if shared is not None and paged.shared_starts is not None:
        slots = (paged.shared_starts.unsqueeze(-1) + offsets).view(shared.shape)
        shared = torch.where(spec.sees(paged.positions.unsqueeze(1), slots), shared, MASKED)
    return bias, shared


def _bounded(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` with 0 for NaN, infinities and numbers from which a score could become infinite.

    A product with a matrix of zeros and ones reads every row, and 0 times NaN is NaN: what one
    sequence's NaN leaves in query or cache would reach all others. Its own hidden state stays NaN,
    so that it alone fails when it is sampled.
    """
    return torch.where(rows.abs() < _BOUND, rows, 0.0)


def _score_blocks(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial softmax of ``rows`` ``[N, K, G, D]`` over blocks ``[N, K, S, D]``.

    Returns maximum and sum per row, ``[N, K, G, 1]`` fp32, and the weighted values
    ``[N, K, G, D]`` fp32.
    """
    scores = torch.matmul(rows, keys.transpose(-1, -2)).float()
    scores = bounded_scores(scores, softcap) + bias
    peak = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - peak)
    weighted = torch.matmul(weights.to(values.dtype), values).float()
    return peak, weights.sum(-1, keepdim=True), weighted


_SHARED_AT_ONCE = 4096
"""Shared tokens that are scored by one product: more would be scores of 128 MB and above."""


def _parts(num_tokens: int) -> list[tuple[int, int]]:
    """First token and number of tokens of each product over shared tokens."""
    starts = range(0, num_tokens, _SHARED_AT_ONCE)
    return [(start, min(_SHARED_AT_ONCE, num_tokens - start)) for start in starts]


def _score_shared(
    rows: torch.Tensor,
    keys: CachedRows,
    values: CachedRows,
    bias: torch.Tensor,
    softcap: float | None,
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Partial softmax of ``rows`` ``[B, K, G, D]`` over the first tokens of the cache, in parts.

    ``bias`` is ``[B, tokens]``. Each part is what `_score_blocks` returns, with B rows. A sequence
    that attends to no token of a part has a maximum of `MASKED` there.
    """
    batch, kv_heads, group, size = rows.shape
    queries = rows.transpose(0, 1).reshape(kv_heads, batch * group, size)
    scored = []
    for start, count in _parts(bias.shape[1]):
        held, weighed = (x.tokens(start, count) for x in (keys, values))
        scores = bounded_scores(torch.matmul(queries, held.transpose(1, 2)).float(), softcap)
        scores = scores.view(kv_heads, batch, group, count) + bias.narrow(1, start, count)[:, None]
        peak = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - peak)
        products = weights.view(kv_heads, batch * group, count).to(weighed.dtype)
        weighted = torch.matmul(products, weighed).float().view(kv_heads, batch, group, -1)
        sums = weights.sum(-1, keepdim=True)
        scored.append((peak.transpose(0, 1), sums.transpose(0, 1), weighted.transpose(0, 1)))
    return scored


def _by_sequence(flat: torch.Tensor, batch: int) -> torch.Tensor:
    """``[1, heads, B * Q, D]`` as ``[B, heads, Q, D]``."""
    heads, _, size = flat.shape[1:]
    return flat.reshape(heads, batch, -1, size).transpose(0, 1)
