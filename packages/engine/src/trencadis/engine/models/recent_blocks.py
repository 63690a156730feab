"""Layers with a window read the last blocks of each sequence, where shapes depend on a bucket.

There a layer would read and score all blocks of the batch or of the context, and mask most: with a
window of 1,024 tokens, 32,768 of a long sequence. As many last blocks as can have the window are a
static number too, and the model's input says which they are. `paged_context` defines the letters
used in shapes; R blocks of each sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trencadis.engine.models.layer_spec import LayerSpec
from trencadis.engine.models.paged_context import MASKED
from trencadis.engine.models.softmax_attention import softmax_attention
from trencadis.kvcache import most_window_blocks


class Recent(NamedTuple):
    """What a layer attends to: ``blocks`` ``[B, R]``, then the chunk itself in a prefill.

    ``seen``: ``[B, 1, Q, R * S]``, ``[B, 1, Q, R * S + Q]`` in a prefill, true where a query
    attends.
    """

    blocks: torch.Tensor
    seen: torch.Tensor

    @property
    def bias(self) -> torch.Tensor:
        """0 where a query attends, `MASKED` elsewhere, fp32."""
        return torch.where(self.seen, 0.0, MASKED)


def recent_in_decode(paged: Any, spec: LayerSpec) -> Recent | None:
    """Of a `DecodeContext` or what a backend made of it; None where its blocks are too few."""
    found = _blocks_and_slots(paged, spec)
    if found is None:
        return None
    blocks, slots = found
    queries = paged.positions.unsqueeze(1)
    seen = (slots >= 0) & (slots <= queries) & spec.sees(queries, slots)
    return Recent(blocks, seen.view(len(blocks), 1, 1, -1))


def recent_in_prompt(paged: Any, spec: LayerSpec) -> Recent | None:
    """Of a `PromptContext` or what a backend made of it; None where its blocks are too few."""
    found = _blocks_and_slots(paged, spec)
    if found is None:
        return None
    blocks, slots = found
    batch = blocks.shape[0]
    positions = paged.positions.view(batch, -1)
    queries, tokens = positions.unsqueeze(2), torch.arange(positions.shape[1], device=slots.device)
    # A chunk begins after its context.
    held = (slots >= 0) & (slots < positions.narrow(1, 0, 1))
    context = held.unsqueeze(1) & spec.sees(queries, slots.unsqueeze(1))
    causal = tokens <= tokens.unsqueeze(1)
    chunk = causal & spec.sees(queries, positions.unsqueeze(1))
    return Recent(blocks, torch.cat((context, chunk), dim=2).unsqueeze(1))


def _blocks_and_slots(paged: Any, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The last blocks that have what the spec sees, and the positions of their slots.

    ``[B, R * S]``, below 0 in blocks of padding.
    """
    if paged.recent_blocks is None or spec.most_seen is None:
        return None
    size, batch = paged.cache.block_size, paged.recent_starts.shape[0]
    blocks = paged.recent_blocks.view(batch, -1)
    count, needed = blocks.shape[1], most_window_blocks(spec.most_seen, 1, size)
    if needed > count:
        return None
    starts = paged.recent_starts + (count - needed) * size
    slots = starts.unsqueeze(1) + torch.arange(needed * size, device=starts.device)
    return blocks.narrow(1, count - needed, needed), slots


def attend_to_recent(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recent: Recent,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Decode: attention of ``[1, H, B, D]`` to ``[B, K, R * S, D]``, as ``[1, B, H, width]``."""
    rows = query[0].transpose(0, 1).unsqueeze(2)
    return softmax_attention(rows, key, value, recent.bias, spec, sinks).squeeze(2).unsqueeze(0)
