"""What one forward pass reads from and writes to the paged KV cache.

A forward pass carries one `PagedContext` through the model as the keyword ``paged``: a
`PromptContext` or a `RaggedContext` for prefill chunks, a `DecodeContext` for decode steps, a
`MixedContext` for both.

Letters in shapes: B sequences, Q padded query length, C context blocks per sequence, N blocks of
the cache prefix, E extra (block, sequence) pairs, S block size, H query heads, K key-value heads,
G = H / K, D width of a head, which may differ between keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from trencadis.engine.models.layer_spec import LayerSpec

_GATHER_COST = 3
"""A gathered block is read, written and read again."""

MASKED = -1e30
"""Score of a masked position: finite, so that a block with no valid position yields no NaN."""

LayerRun = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Computes one decoder layer. Arguments: the layer's index, the layer's own forward function, and
the positional and keyword arguments that the model passed to the layer."""


@runtime_checkable
class ReplayedLayers(Protocol):
    """A `LayerRun` that can compute all layers of a chain at once, for some numbers of tokens."""

    def replays(self, num_tokens: int) -> bool: ...

    def replay(self, given: Sequence[torch.Tensor], paged: PagedContext) -> torch.Tensor | None:
        """What the last layer returns, by what the first one is ``given``, hidden states first.

        None where the layers must be called.
        """


class LayerCaches(Protocol):
    """Keys and values of each layer, ``[blocks, K, S, D]``, or ``[blocks * S, K, D]`` where the
    attention has token rows. Block 0 is the padding block."""

    @property
    def block_size(self) -> int: ...

    def key(self, layer: int) -> torch.Tensor: ...

    def value(self, layer: int) -> torch.Tensor: ...


@attrs.frozen(eq=False, slots=False, these={})
class PagedContext:
    """Base of what a forward pass reads and writes. Its tensors are inputs of graphs and programs.

    ``attention`` is the device's attention backend; None: `BlockAttention`. ``layer_run`` computes
    the decoder layers in place of the model's own code; None for eager. ``positions``: ``[T]``,
    that of each token in its sequence, 0 for padding; None where no layer needs it.
    ``adapter_rows``: see `AdapterLayers.rows_of`; None where no token has an adapter.

    Where layers have block tables of several block groups, this is the context of the first group,
    and ``groups`` has those of all, for `Attention.attend`: a layer reads the context at
    ``group_of[layer]``. Empty for one group.
    """

    cache: LayerCaches
    attention: Attention | None
    layer_run: LayerRun | None
    positions: torch.Tensor | None
    adapter_rows: torch.Tensor | None
    groups: tuple[Any, ...]
    group_of: Sequence[int]


class Attention(Protocol):
    """How a device lays out the KV cache, writes to it, and attends."""

    token_rows: bool
    """Whether the cache has a row for each token (`KVCache`), or blocks by head."""

    as_operator: bool
    """Whether compiled programs call attention instead of containing it (`attention_operator`).
    Then a program depends on the number of tokens only, and attention takes a `RaggedContext` and
    a `MixedContext`."""

    scores_shared: bool
    """Whether a `DecodeContext` may have ``shared_filled``."""

    reads_groups: bool
    """Whether a layer reads the context of its block group (`PagedContext.groups`)."""

    reads_recent: bool
    """Whether a `PromptContext` and a `DecodeContext` may have ``recent_blocks``."""

    def supports(self, layer: LayerSpec) -> str | None:
        """What of a layer it does not compute, in words that follow «layer 0»; None for nothing.

        What it names here it must compute in `attend`: see `feature_beyond`.
        """

    def prepare(self, paged: PagedContext, dtype: torch.dtype) -> PagedContext:
        """What all layers of a forward pass need, derived once from the uploaded ``paged``.

        ``dtype`` is that of the queries. The result names this object as its ``attention``.
        """

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
        """Write a layer's new keys and values, then attend.

        ``query`` is ``[1, H, T, D]``, ``key`` and ``value`` are ``[1, K, T, D]``, ``sinks`` is
        ``[H]``, given where ``spec.sinks``. Returns ``[1, T, H, D]``.
        """


@attrs.frozen(eq=False)
class PromptContext(PagedContext):
    """Where a padded batch of prefill chunks writes, and the context that it reads.

    ``write_blocks``, ``write_offsets``: ``[B * Q]``; padding tokens write to block 0.
    ``context_blocks``: ``[B, C]``, None if no chunk has context. ``mask``: ``[B, 1, Q, C * S + Q]``
    bool, true where a query attends; None without context, where a causal mask suffices because
    padding follows every real token.

    ``recent_blocks``: ``[B * R]``, the last R blocks of each context, the padding block in front of
    shorter ones; None where layers with a window read what the others do. ``recent_starts``:
    ``[B]``, the position of the first slot of these, below 0 for shorter contexts.
    """

    cache: LayerCaches
    batch: int
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    context_blocks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    layer_run: LayerRun | None = None
    attention: Attention | None = None
    positions: torch.Tensor | None = None
    adapter_rows: torch.Tensor | None = None
    groups: tuple[Any, ...] = ()
    group_of: Sequence[int] = ()
    recent_blocks: torch.Tensor | None = None
    recent_starts: torch.Tensor | None = None


@attrs.frozen(eq=False)
class RaggedChunk:
    """A prefill chunk of a `RaggedContext`: its tokens are ``start`` to ``end`` of the batch.

    ``context_blocks``: ``[C]``, the blocks of its context, None if it has none. ``mask``:
    ``[R, context tokens + Q]`` bool, true where one of the last R queries attends; so many attend
    at once, and earlier ones have the same mask without its last columns. None without context.
    """

    start: int
    end: int
    context_blocks: torch.Tensor | None
    mask: torch.Tensor | None

    @property
    def context_tokens(self) -> int:
        """Tokens of its sequence that are in the cache already."""
        return 0 if self.mask is None else self.mask.shape[1] - (self.end - self.start)


@attrs.frozen(eq=False)
class RaggedContext(PagedContext):
    """Where prefill chunks that follow each other write, and the context that each reads.

    ``write_blocks``, ``write_offsets``: ``[T]``; padding tokens, at the end, write to block 0.
    """

    cache: LayerCaches
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    chunks: tuple[RaggedChunk, ...]
    layer_run: LayerRun | None = None
    attention: Attention | None = None
    positions: torch.Tensor | None = None
    adapter_rows: torch.Tensor | None = None
    groups: tuple[Any, ...] = ()
    group_of: Sequence[int] = ()


@attrs.frozen(eq=False)
class _Mask:
    """The owners and the bias of a `DecodeContext` within a window; the pairs that are left, where
    few are."""

    owners: torch.Tensor
    bias: torch.Tensor
    kept: torch.Tensor | None


@attrs.frozen(eq=False)
class DecodeContext(PagedContext):
    """Where one token per sequence writes, and which sequence owns each block that is read.

    ``write_blocks``, ``write_offsets``: ``[B]``. ``owners``: ``[N + E]``, the batch row that a
    block belongs to, B for a block without an owner. ``readers``: ``[N + E]``, the row whose query
    attends to the block: its owner, or any row where there is none. ``bias``:
    ``[N + E, 1, 1, S]`` fp32, 0 at valid positions and `MASKED` elsewhere. The first N blocks are
    the cache prefix, read in place. ``extra_blocks``: ``[E]``, blocks that are gathered because a
    further sequence shares them, or all blocks where N is 0; None if there are none.
    ``shared_filled``: ``[B, P]``, how many slots of each of the first P blocks a sequence attends
    to; ``owners``, ``readers`` and ``bias`` begin with block P then. None where all have owners.

    ``starts``: ``[N + E]``, the position of a block's first slot in its owner's sequence.
    ``shared_starts``: ``[B, P]``. ``narrowed``: the results of `within`, for a backend that asks
    for each layer and is not traced; None keeps none. ``masks``: what these have in common with
    those of other groups that have the same ``owners``.

    ``recent_blocks``, ``recent_starts``: see `PromptContext`, of the last blocks of a sequence.
    """

    cache: LayerCaches
    prefix_blocks: int
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    owners: torch.Tensor
    readers: torch.Tensor
    bias: torch.Tensor
    extra_blocks: torch.Tensor | None = None
    shared_filled: torch.Tensor | None = None
    layer_run: LayerRun | None = None
    attention: Attention | None = None
    positions: torch.Tensor | None = None
    adapter_rows: torch.Tensor | None = None
    groups: tuple[Any, ...] = ()
    group_of: Sequence[int] = ()
    starts: torch.Tensor | None = None
    shared_starts: torch.Tensor | None = None
    narrowed: dict[tuple[int | None, ...], DecodeContext] | None = None
    masks: dict[tuple[int | None, ...], _Mask] | None = None
    recent_blocks: torch.Tensor | None = None
    recent_starts: torch.Tensor | None = None

    def within(self, spec: LayerSpec) -> DecodeContext:
        """The context of layers with the limits of ``spec``; itself without any.

        Slots outside are masked, and a block that has no other slots has no owner. Where the shapes
        may change (``narrowed``) and few blocks are left, only these are read.
        """
        if not spec.has_limits:
            return self
        limits = spec.limits
        if self.narrowed is not None and limits in self.narrowed:
            return self.narrowed[limits]
        mask = None if self.masks is None else self.masks.get(limits)
        if mask is None:
            mask = self._mask(spec)
            if self.masks is not None:
                self.masks[limits] = mask
        found = attrs.evolve(self, owners=mask.owners, bias=mask.bias)
        if mask.kept is not None:
            found = found._gathering(mask.kept)
        if self.narrowed is not None:
            self.narrowed[limits] = found
        return found

    def _mask(self, spec: LayerSpec) -> _Mask:
        if self.positions is None or self.starts is None:
            raise ValueError("the context lacks the positions that a window needs")
        queries, size = self.positions[self.readers], self.bias.shape[-1]
        slots = self.starts[:, None] + torch.arange(size, device=self.starts.device)
        seen = spec.sees(queries[:, None], slots)
        num_rows = self.positions.shape[0]
        owners = torch.where(seen.any(1), self.owners, num_rows)
        bias = torch.where(seen[:, None, None], self.bias, MASKED)
        if self.narrowed is None:
            return _Mask(owners, bias, None)
        kept = (owners < num_rows).nonzero()[:, 0]
        # A batch without owners stands for a full one, whose memory is measured.
        is_few = 0 < _GATHER_COST * len(kept) <= len(owners)
        return _Mask(owners, bias, kept if is_few else None)

    def _gathering(self, pairs: torch.Tensor) -> DecodeContext:
        """Only these of the (block, sequence) pairs, each block gathered."""
        blocks = torch.arange(self.prefix_blocks, device=pairs.device)
        if self.extra_blocks is not None:
            blocks = torch.cat((blocks, self.extra_blocks))
        return attrs.evolve(
            self,
            prefix_blocks=0,
            owners=self.owners[pairs],
            readers=self.readers[pairs],
            bias=self.bias[pairs],
            extra_blocks=blocks[pairs],
            starts=None if self.starts is None else self.starts[pairs],
        )


@attrs.frozen(eq=False)
class MixedContext(PagedContext):
    """A decode batch, one token per sequence, then prefill chunks: each part attends as if alone.

    ``num_decodes``: the tokens of the first part. The parts write to different blocks.
    """

    cache: LayerCaches
    num_decodes: int
    decode: DecodeContext
    prompt: RaggedContext
    layer_run: LayerRun | None = None
    attention: Attention | None = None
    positions: torch.Tensor | None = None
    adapter_rows: torch.Tensor | None = None
    groups: tuple[Any, ...] = ()
    group_of: Sequence[int] = ()


def is_operator(paged: PagedContext | None) -> bool:
    """Whether the attention of a forward pass is an operator of compiled programs."""
    return paged is not None and paged.attention is not None and paged.attention.as_operator


def paged_tensors(paged: Any) -> list[str]:
    """Names of a `PagedContext`'s fields that hold the tensors that a program reads.

    They depend only on the shape. A program that calls attention as an operator reads none.
    """
    if is_operator(paged):
        return []
    names = (field.name for field in attrs.fields(type(paged)))
    return [name for name in names if isinstance(getattr(paged, name), torch.Tensor)]
