"""Builds the model's input tensors from scheduled sequences, padded to a bucket's shape.

Arrays are assembled on the host in NumPy and copied to the device once per tensor. Padding tokens
have id 0 and position 0 and write to the padding block 0, which no sequence reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.engine.models.paged_context import (
    MASKED,
    DecodeContext,
    PagedContext,
    PromptContext,
    paged_tensors,
)
from trencadis.engine.runner.shapes import DecodeShape, ForwardShape, PromptShape
from trencadis.kvcache import NO_OWNER, DecodeLayout, ceil_div, lay_out
from trencadis.kvcache.tensors import KVCache
from trencadis.scheduler import ScheduledSequence

IntArray = npt.NDArray[np.int64]


@attrs.frozen(eq=False)
class ModelInput:
    """The input of one forward pass: token ids ``[1, T]``, position ids ``[1, T]``, logit rows.

    ``logit_rows`` has one entry per row of the padded batch: the index of the token whose logits
    are computed. The first ``num_rows`` rows are real, the others are padding.
    """

    shape: ForwardShape
    token_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor
    paged: PagedContext
    num_rows: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the input, in an order that depends only on the shape."""
        paged = (getattr(self.paged, name) for name in paged_tensors(self.paged))
        return (self.token_ids, self.position_ids, self.logit_rows, *paged)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> ModelInput:
        """The same input with other tensors, in the order of `tensors`."""
        own, paged = tensors[:3], tensors[3:]
        names = paged_tensors(self.paged)
        changes: dict[str, Any] = dict(zip(names, paged, strict=True))
        return attrs.evolve(
            self,
            token_ids=own[0],
            position_ids=own[1],
            logit_rows=own[2],
            paged=attrs.evolve(self.paged, **changes),
        )


def build_prompt(
    chunks: Sequence[ScheduledSequence], shape: PromptShape, cache: KVCache, device: torch.device
) -> ModelInput:
    """A prefill batch padded to ``shape``. Without chunks, a dummy batch for warm-up."""
    tokens = np.zeros((shape.batch, shape.query), np.int64)
    positions = np.zeros_like(tokens)
    write_blocks = np.zeros_like(tokens)
    context = np.zeros((shape.batch, shape.context_blocks), np.int64)
    starts = np.zeros(shape.batch, np.int64)
    last = np.zeros(shape.batch, np.int64)
    size = cache.block_size
    for row, chunk in enumerate(chunks):
        length = len(chunk.token_ids)
        where = np.arange(chunk.start, chunk.start + length)
        table = np.asarray(chunk.block_table, np.int64)
        tokens[row, :length] = chunk.token_ids
        positions[row, :length] = where
        write_blocks[row, :length] = table[where // size]
        held = ceil_div(chunk.start, size)
        context[row, :held] = table[:held]
        starts[row] = chunk.start
        last[row] = length - 1
    paged = PromptContext(
        cache,
        shape.batch,
        _put(write_blocks, device),
        _put(positions % size, device),
        _put(context, device, flat=False) if shape.context_blocks else None,
        _context_mask(starts, shape, size, device) if shape.context_blocks else None,
    )
    rows = np.arange(shape.batch) * shape.query + last
    return _model_input(shape, tokens, positions, rows, paged, len(chunks), device)


def lay_out_decodes(
    decodes: Sequence[ScheduledSequence], blocks: int, block_size: int
) -> DecodeLayout:
    """Which sequence owns which of the first ``blocks`` blocks, and the pairs to gather."""
    tables = [decode.block_table[: decode.start // block_size + 1] for decode in decodes]
    return lay_out(tables, [decode.start + 1 for decode in decodes], block_size, blocks)


def build_decode(
    decodes: Sequence[ScheduledSequence],
    layout: DecodeLayout,
    shape: DecodeShape,
    cache: KVCache,
    device: torch.device,
) -> ModelInput:
    """A decode batch, one token per sequence, padded to ``shape``.

    Without sequences, a dummy batch for warm-up. ``layout`` comes from `lay_out_decodes`;
    ``shape.extra`` is at least its number of extra pairs.
    """
    tokens, positions, write_blocks = np.zeros((3, shape.batch), np.int64)
    size = cache.block_size
    for row, decode in enumerate(decodes):
        tokens[row] = decode.token_ids[0]
        positions[row] = decode.start
        write_blocks[row] = decode.block_table[decode.start // size]
    owners = np.full(shape.blocks + shape.extra, shape.batch, np.int64)
    filled = np.zeros(shape.blocks + shape.extra, np.int64)
    owned = layout.owner != NO_OWNER
    owners[: shape.blocks][owned] = layout.owner[owned]
    filled[: shape.blocks] = layout.used
    extra_blocks = np.zeros(shape.extra, np.int64)
    shared = slice(shape.blocks, shape.blocks + layout.num_extra)
    owners[shared], filled[shared] = layout.extra_owner, layout.extra_used
    extra_blocks[: layout.num_extra] = layout.extra_block
    paged = DecodeContext(
        cache,
        shape.blocks,
        _put(write_blocks, device),
        _put(positions % size, device),
        _put(owners, device),
        _put(np.minimum(owners, shape.batch - 1), device),
        _bias(_put(filled, device), size),
        _put(extra_blocks, device) if shape.extra else None,
    )
    rows = np.arange(shape.batch)
    return _model_input(shape, tokens, positions, rows, paged, len(decodes), device)


def _model_input(
    shape: ForwardShape,
    tokens: IntArray,
    positions: IntArray,
    rows: IntArray,
    paged: PagedContext,
    num_rows: int,
    device: torch.device,
) -> ModelInput:
    return ModelInput(
        shape,
        _put(tokens, device).unsqueeze(0),
        _put(positions, device).unsqueeze(0),
        _put(rows, device),
        paged,
        num_rows,
    )


def _put(array: IntArray, device: torch.device, *, flat: bool = True) -> torch.Tensor:
    return torch.from_numpy(array.reshape(-1) if flat else array).to(device)


def _context_mask(
    starts: IntArray, shape: PromptShape, block_size: int, device: torch.device
) -> torch.Tensor:
    """``[B, 1, Q, C * S + Q]``: true for a query's context, then causally for its chunk."""
    width = shape.context_blocks * block_size
    held = torch.arange(width, device=device) < _put(starts, device)[:, None]
    context = held[:, None, None, :].expand(-1, 1, shape.query, -1)
    causal = torch.ones(shape.query, shape.query, dtype=torch.bool, device=device).tril()
    return torch.cat((context, causal.expand(shape.batch, 1, -1, -1)), dim=-1)


def _bias(filled: torch.Tensor, block_size: int) -> torch.Tensor:
    """``[N, 1, 1, S]``: 0 at the filled positions of each block, `MASKED` at the others."""
    offsets = torch.arange(block_size, device=filled.device)
    return torch.where(offsets < filled[:, None], 0.0, MASKED)[:, None, None, :]
