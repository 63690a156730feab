"""Builds the model's input from scheduled sequences, padded to a bucket's shape.

The numbers of a batch are assembled in one int32 array on the host and uploaded at once. The device
splits it (`ModelInput.unpack`), within a captured graph where there is one. Padding tokens have id
0 and position 0 and write to the padding block 0, which no sequence reads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.engine.models.paged_context import (
    MASKED,
    DecodeContext,
    LayerRun,
    MixedContext,
    PagedContext,
    PromptContext,
    RaggedChunk,
    RaggedContext,
)
from trencadis.engine.models.state_layers import StateRow, StateTensors
from trencadis.engine.runner.shapes import (
    DecodeShape,
    ForwardShape,
    MixedShape,
    PromptShape,
    RaggedShape,
)
from trencadis.kvcache import (
    NO_OWNER,
    PADDING_BLOCK,
    DecodeLayout,
    LayerGroups,
    ceil_div,
    lay_out,
    lay_out_pairs,
)
from trencadis.kvcache.tensors import KVCache
from trencadis.scheduler import ScheduledSequence

IntArray = npt.NDArray[np.int32]

Section = TypeVar("Section", IntArray, torch.Tensor)

MASK_ROWS = 512
"""Queries of a chunk with context that attend at once. A mask of all would have as many elements as
the square of a long prompt: 17 GB for 131,072 tokens."""

Upload = Callable[[torch.Tensor], torch.Tensor]
"""`Device.upload`."""

_INPUTS = ("packed", "sampled_ids", "adapter_slots", "state_places")
"""The tensors of a `ModelInput` that differ between two batches of a shape."""


@attrs.frozen(eq=False)
class ModelTensors:
    """The input of one forward pass: token ids ``[1, T]``, position ids ``[1, T]``, logit rows.

    ``logit_rows`` has one entry per row of the padded batch: the index of the token whose logits
    are computed. ``adapter_slots``: ``[T]``, see `ModelInput`. ``states``: where the states of the
    rows are, in static shapes; else None.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor
    paged: PagedContext
    adapter_slots: torch.Tensor | None = None
    states: StateTensors | None = None


@attrs.frozen(eq=False)
class ModelInput:
    """A padded batch on the device.

    ``packed`` is int32: the sections of the batch's shape one after another, then
    ``num_sampler_words`` for each row of the batch, which the sampler reads. A token id -n of a
    decode stands for that in slot n of ``sampled_ids``, see `Sampler`. ``adapter_slots``: int32
    ``[T]``, the slot of each token's adapter, 0 for none; None where the shape has no
    ``adapter_rank``.
    ``state_rows``: where its sequences are, for layers that keep a state; none in a dummy batch.
    ``state_places``: int32, see `StateLayers.places`; None where the host alone knows the rows.
    """

    shape: ForwardShape
    packed: torch.Tensor
    cache: KVCache
    num_sampler_words: int = 0
    layer_run: LayerRun | None = None
    sampled_ids: torch.Tensor | None = None
    adapter_slots: torch.Tensor | None = None
    state_rows: Sequence[StateRow] = ()
    state_places: torch.Tensor | None = None

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors that differ between two batches of the shape."""
        given = (getattr(self, name) for name in _INPUTS)
        return tuple(tensor for tensor in given if tensor is not None)

    def with_inputs(self, *inputs: torch.Tensor) -> ModelInput:
        """A batch of the same shape with other `inputs`."""
        names = (name for name in _INPUTS if getattr(self, name) is not None)
        changes: dict[str, Any] = dict(zip(names, inputs, strict=True))
        return attrs.evolve(self, **changes)

    def unpack(self) -> ModelTensors:
        """The tensors of the forward pass, int64: views of a converted ``packed``."""
        sections = _sections(self.shape, self.cache.groups)
        sizes = [math.prod(shape) for shape in sections.values()]
        parts = torch.split(self.packed[: sum(sizes)].long(), sizes)
        views = {
            name: part.view(shape)
            for (name, shape), part in zip(sections.items(), parts, strict=True)
        }
        token_ids = views["token_ids"].view(-1)
        if self.sampled_ids is not None:
            sampled = self.sampled_ids.index_select(0, (-token_ids).clamp_min(0))
            token_ids = torch.where(token_ids < 0, sampled.long(), token_ids)
        context = _context(self.shape, views, self.cache)
        if self.layer_run is not None:
            context = attrs.evolve(context, layer_run=self.layer_run)
        return ModelTensors(
            token_ids.view(1, -1),
            views["position_ids"].view(1, -1),
            views["logit_rows"],
            context,
            self.adapter_slots,
            None if self.state_places is None else StateTensors.of(self.state_places),
        )

    def sampler_words(self) -> torch.Tensor:
        """A copy of the sampler's words, ``[batch, num_sampler_words]``."""
        rows, width = self.shape.batch, self.num_sampler_words
        return self.packed[len(self.packed) - rows * width :].view(rows, width).clone()


def build_prompt(
    chunks: Sequence[ScheduledSequence],
    shape: PromptShape | RaggedShape,
    cache: KVCache,
    upload: Upload,
    sampler_words: IntArray | None = None,
) -> ModelInput:
    """A prefill batch padded to ``shape``. Without chunks, a dummy batch for warm-up."""
    packed, fields = _pack(shape, sampler_words, cache.groups)
    if isinstance(shape, RaggedShape):
        _fill_chunks(chunks, shape, fields, cache)
        return _uploaded(packed, shape, cache, upload, sampler_words)
    if cache.groups.num_groups > 1:
        raise ValueError("padded prompts read one block group: serve this cache ragged prompts")
    tokens, positions, write_blocks = (
        fields[name] for name in ("token_ids", "position_ids", "write_blocks")
    )
    size = cache.block_size
    fields["logit_rows"][:] = np.arange(shape.batch) * shape.query
    for row, chunk in enumerate(chunks):
        length = len(chunk.token_ids)
        where = np.arange(chunk.start, chunk.start + length)
        table = np.asarray(chunk.block_table, np.int32)
        tokens[row, :length] = chunk.token_ids
        positions[row, :length] = where
        write_blocks[row, :length] = table[where // size]
        fields["logit_rows"][row] += length - 1
        if shape.context_blocks:
            held = ceil_div(chunk.start, size)
            fields["context_blocks"][row, :held] = table[:held]
            fields["context_tokens"][row] = chunk.start
            _fill_recent(row, table[:held], shape.recent, fields, size)
    fields["write_offsets"][:] = positions % size
    return _uploaded(packed, shape, cache, upload, sampler_words)


def first_rows(sequences: Sequence[ScheduledSequence], shape: ForwardShape) -> dict[int, int]:
    """Where the tokens of each sequence of a batch begin in its forward pass, by sequence id."""
    if isinstance(shape, PromptShape):
        starts = [row * shape.query for row in range(len(sequences))]
    else:
        lengths = [len(sequence.token_ids) for sequence in sequences]
        starts = [0, *np.cumsum(lengths).tolist()]
        if isinstance(shape, MixedShape):
            # The decodes, one token each, come first, and may be padded.
            num_decodes = sum(length == 1 for length in lengths)
            padding = shape.decode.num_tokens - num_decodes
            starts = [start + padding * (i >= num_decodes) for i, start in enumerate(starts)]
    return {sequence.seq_id: start for sequence, start in zip(sequences, starts, strict=False)}


def state_rows(sequences: Sequence[ScheduledSequence], shape: ForwardShape) -> list[StateRow]:
    """Where the sequences of a batch of this shape are, and where their states."""
    starts = first_rows(sequences, shape)
    return [
        StateRow(
            starts[sequence.seq_id],
            len(sequence.token_ids),
            sequence.state_slot,
            sequence.start == 0,
        )
        for sequence in sequences
    ]


def dummy_rows(shape: ForwardShape) -> list[StateRow]:
    """The rows of a batch without sequences: all its tokens, as a full batch would have them."""
    if isinstance(shape, PromptShape):
        lengths = [shape.query] * shape.batch
    elif isinstance(shape, RaggedShape):
        lengths = [size.tokens for size in shape.chunks]
    elif isinstance(shape, MixedShape):
        decodes = dummy_rows(shape.decode)
        begin = shape.decode.num_tokens
        chunks = (row._replace(offset=begin + row.offset) for row in dummy_rows(shape.prompt))
        return [*decodes, *chunks]
    else:
        lengths = [1] * shape.batch
    offsets = [0, *np.cumsum(lengths).tolist()]
    return [StateRow(*row) for row in zip(offsets, lengths, strict=False)]


def adapter_slots(
    sequences: Sequence[ScheduledSequence], shape: ForwardShape, slots: Mapping[str, int]
) -> IntArray:
    """int32 ``[T]``: the slot of each token's adapter in a batch of this shape, 0 for none.

    ``slots``: of the adapters of the step.
    """
    of_tokens = np.zeros(shape.num_tokens, np.int32)
    starts = first_rows(sequences, shape)
    for sequence in sequences:
        if sequence.adapter:
            start = starts[sequence.seq_id]
            of_tokens[start : start + len(sequence.token_ids)] = slots[sequence.adapter]
    return of_tokens


def with_dummy_slots(batch: ModelInput, upload: Upload) -> ModelInput:
    """A batch of no sequences, with slots of adapters where its shape computes them."""
    if not batch.shape.adapter_rank:
        return batch
    slots = torch.from_numpy(adapter_slots((), batch.shape, {}))
    return attrs.evolve(batch, adapter_slots=upload(slots))


def _fill_chunks(
    chunks: Sequence[ScheduledSequence],
    shape: RaggedShape,
    fields: dict[str, IntArray],
    cache: KVCache,
) -> None:
    """The sections of ragged chunks, with those of all block groups."""
    _fill_ragged(chunks, shape, fields, cache.block_size)
    for group in range(1, cache.groups.num_groups):
        tables = [chunk.further_tables[group - 1] for chunk in chunks]
        of_group = _of_group(fields, cache.groups, group)
        _fill_chunk_blocks(chunks, tables, shape, of_group, cache.block_size)


def _fill_ragged(
    chunks: Sequence[ScheduledSequence],
    shape: RaggedShape,
    fields: dict[str, IntArray],
    block_size: int,
) -> None:
    positions, end = fields["position_ids"], 0
    for chunk, size in zip(chunks, shape.chunks, strict=bool(chunks)):
        start, end = end, end + size.tokens
        fields["token_ids"][start:end] = chunk.token_ids
        positions[start:end] = np.arange(chunk.start, chunk.start + size.tokens)
    tables = [chunk.block_table for chunk in chunks]
    _fill_chunk_blocks(chunks, tables, shape, fields, block_size)
    fields["write_offsets"][:] = positions % block_size
    fields["logit_rows"][:] = np.cumsum([size.tokens for size in shape.chunks]) - 1


def _fill_chunk_blocks(
    chunks: Sequence[ScheduledSequence],
    tables: Sequence[IntArray],
    shape: RaggedShape,
    fields: Mapping[str, IntArray],
    block_size: int,
) -> None:
    """The blocks that chunks write and read, by their tables in a block group."""
    end, held = 0, 0
    for chunk, given, size in zip(chunks, tables, shape.chunks, strict=bool(chunks)):
        start, end = end, end + size.tokens
        table = np.asarray(given, np.int32)
        where = np.arange(chunk.start, chunk.start + size.tokens)
        fields["write_blocks"][start:end] = table[where // block_size]
        if size.context_blocks:
            blocks = slice(held, held + size.context_blocks)
            fields["context_blocks"][blocks] = table[: size.context_blocks]
            held = blocks.stop


def lay_out_decodes(
    decodes: Sequence[ScheduledSequence], blocks: int, block_size: int, shared: int = 0
) -> DecodeLayout:
    """Which sequence owns which of the first ``blocks`` blocks, and the pairs to gather.

    With 0 ``blocks`` no prefix is read, and all are pairs to gather. ``shared``: see `DecodeShape`.
    """
    tables = [decode.block_table[: decode.start // block_size + 1] for decode in decodes]
    num_tokens = [decode.start + 1 for decode in decodes]
    if not blocks:
        return lay_out_pairs(tables, num_tokens, block_size)
    return lay_out(tables, num_tokens, block_size, blocks, shared)


def lay_out_groups(
    decodes: Sequence[ScheduledSequence], groups: LayerGroups, block_size: int
) -> tuple[DecodeLayout, ...]:
    """The pairs to gather in each block group. Those of one window differ in their blocks alone."""
    ends = [decode.start // block_size + 1 for decode in decodes]
    num_tokens = [decode.start + 1 for decode in decodes]
    layouts: list[DecodeLayout] = []
    for group in range(groups.num_groups):
        of_group = ((each.block_table, *each.further_tables)[group] for each in decodes)
        tables = [table[:end] for table, end in zip(of_group, ends, strict=True)]
        first = groups.first_alike(group)
        if first == group:
            layouts.append(lay_out_pairs(tables, num_tokens, block_size))
            continue
        blocks = np.concatenate(tables)
        layouts.append(attrs.evolve(layouts[first], extra_block=blocks[blocks != PADDING_BLOCK]))
    return tuple(layouts)


def build_decode(
    decodes: Sequence[ScheduledSequence],
    layout: DecodeLayout,
    shape: DecodeShape,
    cache: KVCache,
    upload: Upload,
    sampler_words: IntArray | None = None,
    sampled_ids: torch.Tensor | None = None,
    further: Sequence[DecodeLayout] = (),
) -> ModelInput:
    """A decode batch, one token per sequence, padded to ``shape``.

    Without sequences, a dummy batch for warm-up. ``layout`` comes from `lay_out_decodes`;
    ``shape.extra`` is at least its number of extra pairs. ``further``: those of the block groups
    after the first, from `lay_out_groups`.
    """
    packed, fields = _pack(shape, sampler_words, cache.groups)
    _fill_decodes(decodes, (layout, *further), shape, fields, cache)
    return _uploaded(packed, shape, cache, upload, sampler_words, sampled_ids)


def build_mixed(
    decodes: Sequence[ScheduledSequence],
    layout: DecodeLayout,
    chunks: Sequence[ScheduledSequence],
    shape: MixedShape,
    cache: KVCache,
    upload: Upload,
    sampler_words: IntArray | None = None,
    sampled_ids: torch.Tensor | None = None,
    further: Sequence[DecodeLayout] = (),
) -> ModelInput:
    """A decode batch and prefill chunks as one batch: see `build_decode` and `build_prompt`."""
    packed, fields = _pack(shape, sampler_words, cache.groups)
    decode_fields, prompt_fields = _parts(shape, fields, cache.groups)
    _fill_decodes(decodes, (layout, *further), shape.decode, decode_fields, cache)
    _fill_chunks(chunks, shape.prompt, prompt_fields, cache)
    prompt_fields["logit_rows"] += shape.decode.num_tokens
    return _uploaded(packed, shape, cache, upload, sampler_words, sampled_ids)


def _fill_decodes(
    decodes: Sequence[ScheduledSequence],
    layouts: Sequence[DecodeLayout],
    shape: DecodeShape,
    fields: dict[str, IntArray],
    cache: KVCache,
) -> None:
    """The sections of a decode batch, with those of all block groups."""
    size = cache.block_size
    _fill_decode(decodes, layouts[0], shape, fields, size)
    for group, layout in enumerate(layouts[1:], 1):
        of_group = _of_group(fields, cache.groups, group)
        for row, decode in enumerate(decodes):
            table = decode.further_tables[group - 1]
            of_group["write_blocks"][row] = table[decode.start // size]
        of_shape = DecodeShape(shape.batch, 0, shape.further[group - 1])
        if cache.groups.first_alike(group) == group:
            _fill_reads(layout, of_shape, of_group)
        elif of_shape.extra:
            of_group["extra_blocks"][: layout.num_extra] = layout.extra_block


def _fill_decode(
    decodes: Sequence[ScheduledSequence],
    layout: DecodeLayout,
    shape: DecodeShape,
    fields: dict[str, IntArray],
    size: int,
) -> None:
    for row, decode in enumerate(decodes):
        fields["token_ids"][row] = decode.token_ids[0]
        fields["position_ids"][row] = decode.start
        fields["write_blocks"][row] = decode.block_table[decode.start // size]
        table = decode.block_table[: decode.start // size + 1]
        _fill_recent(row, table, shape.recent, fields, size)
    fields["write_offsets"][:] = fields["position_ids"] % size
    fields["logit_rows"][:] = np.arange(shape.batch)
    _fill_reads(layout, shape, fields)


def _fill_recent(
    row: int,
    table: Sequence[int] | IntArray,
    recent: int,
    fields: Mapping[str, IntArray],
    size: int,
) -> None:
    """The last ``recent`` of the blocks that a sequence has, behind padding where it has fewer."""
    if recent:
        blocks, end = table[-recent:], (row + 1) * recent
        fields["recent_blocks"][end - len(blocks) : end] = blocks
        fields["recent_starts"][row] = (len(table) - recent) * size


def _fill_reads(layout: DecodeLayout, shape: DecodeShape, fields: Mapping[str, IntArray]) -> None:
    """Which blocks a decode batch reads."""
    owners, filled = fields["owners"], fields["filled"]
    owners[:] = shape.batch
    owner, num_owned = layout.owner[shape.shared :], shape.blocks - shape.shared
    owned = owner != NO_OWNER
    owners[:num_owned][owned] = owner[owned]
    filled[:num_owned] = layout.used[shape.shared :]
    starts = fields["starts"]
    starts[:num_owned] = layout.start[shape.shared :]
    extra = slice(num_owned, num_owned + layout.num_extra)
    owners[extra], filled[extra] = layout.extra_owner, layout.extra_used
    starts[extra] = layout.extra_start
    fields["readers"][:] = np.minimum(owners, shape.batch - 1)
    if shape.extra:
        fields["extra_blocks"][: layout.num_extra] = layout.extra_block
    if shape.shared:
        fields["shared_filled"][: len(layout.shared_used)] = layout.shared_used
        fields["shared_starts"][: len(layout.shared_used)] = layout.shared_start


_BLOCK_SECTIONS = ("write_blocks", "context_blocks", "extra_blocks")
"""The sections that each block group has of its own."""

_READ_SECTIONS = (*_BLOCK_SECTIONS, "owners", "readers", "filled", "starts")
"""Those that each window has of its own."""


def _of_group(
    sections: Mapping[str, Section], groups: LayerGroups, group: int
) -> dict[str, Section]:
    """The sections of a block group: its own, those of its window, and those of all groups."""
    found = dict(sections)
    for number in (groups.first_alike(group), group):
        own = ((name, sections.get(f"{name}.{number}")) for name in _READ_SECTIONS)
        found.update((name, section) for name, section in own if section is not None)
    return found


def _sections(shape: ForwardShape, groups: LayerGroups) -> dict[str, tuple[int, ...]]:
    """The sections of a packed batch in order, and the shape of each."""
    sections = _sections_of_one(shape)
    for group in range(1, groups.num_groups):
        of_group = _sections_of_one(_shape_in_group(shape, group))
        is_first = groups.first_alike(group) == group
        own = _READ_SECTIONS if is_first else _BLOCK_SECTIONS
        sections |= {f"{name}.{group}": of_group[name] for name in own if name in of_group}
    return sections


def _shape_in_group(shape: ForwardShape, group: int) -> ForwardShape:
    """The shape of a batch in a block group after the first."""
    if isinstance(shape, DecodeShape):
        return DecodeShape(shape.batch, 0, shape.further[group - 1])
    if isinstance(shape, MixedShape):
        decode = DecodeShape(shape.decode.batch, 0, shape.decode.further[group - 1])
        return MixedShape(decode, shape.prompt)
    return shape


def _sections_of_one(shape: ForwardShape) -> dict[str, tuple[int, ...]]:
    """The sections of a batch with one block group."""
    if isinstance(shape, PromptShape):
        padded = (shape.batch, shape.query)
        tokens = ("token_ids", "position_ids", "write_blocks", "write_offsets")
        sections: dict[str, tuple[int, ...]] = dict.fromkeys(tokens, padded)
        sections["logit_rows"] = (shape.batch,)
        if shape.context_blocks:
            sections["context_blocks"] = (shape.batch, shape.context_blocks)
            sections["context_tokens"] = (shape.batch,)
        return sections | _recent_sections(shape)
    if isinstance(shape, RaggedShape):
        tokens = ("token_ids", "position_ids", "write_blocks", "write_offsets")
        sections = dict.fromkeys(tokens, (shape.num_tokens,))
        sections["logit_rows"] = (shape.batch,)
        sections["context_blocks"] = (sum(size.context_blocks for size in shape.chunks),)
        return sections
    if isinstance(shape, MixedShape):
        sections = _sections_of_one(shape.decode)
        for name, (size,) in _sections_of_one(shape.prompt).items():
            sections[name] = (size + sum(sections.get(name, ())),)
        return sections
    rows = ("token_ids", "position_ids", "write_blocks", "write_offsets", "logit_rows")
    sections = dict.fromkeys(rows, (shape.batch,))
    blocks = (shape.blocks - shape.shared + shape.extra,)
    sections |= dict.fromkeys(("owners", "readers", "filled", "starts"), blocks)
    if shape.extra:
        sections["extra_blocks"] = (shape.extra,)
    sections |= _recent_sections(shape)
    if shape.shared:
        shared = ("shared_filled", "shared_starts")
        sections |= dict.fromkeys(shared, (shape.batch, shape.shared))
    return sections


def _recent_sections(shape: PromptShape | DecodeShape) -> dict[str, tuple[int, ...]]:
    if not shape.recent:
        return {}
    return {"recent_blocks": (shape.batch * shape.recent,), "recent_starts": (shape.batch,)}


def _parts(
    shape: MixedShape, sections: Mapping[str, Section], groups: LayerGroups | None = None
) -> tuple[dict[str, Section], dict[str, Section]]:
    """The decode batch's and the chunks' parts of the sections of a mixed batch, as views.

    Without ``groups``, of the sections of one group.
    """
    of_decode, of_prompt = (
        _sections_of_one(part) if groups is None else _sections(part, groups)
        for part in (shape.decode, shape.prompt)
    )
    decode = {name: sections[name][:size] for name, (size,) in of_decode.items()}
    prompt = {
        name: sections[name][len(sections[name]) - size :] for name, (size,) in of_prompt.items()
    }
    return decode, prompt


def _pack(
    shape: ForwardShape, sampler_words: IntArray | None, groups: LayerGroups
) -> tuple[IntArray, dict[str, IntArray]]:
    """An array for a batch, with the sampler's words at its end, and its sections as views."""
    sections = _sections(shape, groups)
    sizes = [math.prod(size) for size in sections.values()]
    total = sum(sizes)
    tail = 0 if sampler_words is None else sampler_words.size
    packed = np.zeros(total + tail, np.int32)
    if sampler_words is not None:
        packed[total:] = sampler_words.reshape(-1)
    ends = itertools.accumulate(sizes)
    views = (
        packed[end - size : end].reshape(section)
        for end, size, section in zip(ends, sizes, sections.values(), strict=True)
    )
    return packed, dict(zip(sections, views, strict=True))


def _uploaded(
    packed: IntArray,
    shape: ForwardShape,
    cache: KVCache,
    upload: Upload,
    sampler_words: IntArray | None,
    sampled_ids: torch.Tensor | None = None,
) -> ModelInput:
    words = 0 if sampler_words is None else sampler_words.shape[1]
    uploaded = upload(torch.from_numpy(packed))
    return ModelInput(shape, uploaded, cache, words, sampled_ids=sampled_ids)


def _context(shape: ForwardShape, views: dict[str, torch.Tensor], cache: KVCache) -> PagedContext:
    """The context of a batch, with those of all block groups where there are several."""
    groups = cache.groups
    found = _context_of_one(shape, views, cache)
    if groups.num_groups == 1:
        return found
    contexts = [found]
    for group in range(1, groups.num_groups):
        of_group, first = _of_group(views, groups, group), groups.first_alike(group)
        of_shape = _shape_in_group(shape, group)
        if first == group:
            contexts.append(_context_of_one(of_shape, of_group, cache))
        else:
            contexts.append(_with_blocks(contexts[first], of_shape, of_group))
    return attrs.evolve(found, groups=tuple(contexts), group_of=groups.group_of)


def _with_blocks(context: Any, shape: ForwardShape, views: Mapping[str, torch.Tensor]) -> Any:
    """The context of a block group from that of another one with its window."""
    if isinstance(shape, MixedShape):
        decode, prompt = _parts(shape, views)
        return attrs.evolve(
            context,
            decode=_with_blocks(context.decode, shape.decode, decode),
            prompt=_with_blocks(context.prompt, shape.prompt, prompt),
        )
    if isinstance(shape, DecodeShape):
        return attrs.evolve(
            context,
            write_blocks=views["write_blocks"],
            extra_blocks=views.get("extra_blocks"),
            narrowed={},
        )
    chunks = (
        chunk if chunk.context_blocks is None else attrs.evolve(chunk, context_blocks=blocks)
        for chunk, blocks in zip(context.chunks, _blocks_of_chunks(shape, views), strict=True)
    )
    return attrs.evolve(context, write_blocks=views["write_blocks"], chunks=tuple(chunks))


def _context_of_one(
    shape: ForwardShape, views: dict[str, torch.Tensor], cache: KVCache
) -> PagedContext:
    if isinstance(shape, PromptShape):
        return _prompt_context(shape, views, cache)
    if isinstance(shape, RaggedShape):
        return _ragged_context(shape, views, cache)
    if isinstance(shape, DecodeShape):
        return _decode_context(shape, views, cache)
    decode, prompt = _parts(shape, views)
    return MixedContext(
        cache,
        shape.decode.num_tokens,
        _decode_context(shape.decode, decode, cache),
        _ragged_context(shape.prompt, prompt, cache),
        positions=views["position_ids"],
    )


def _prompt_context(
    shape: PromptShape, views: dict[str, torch.Tensor], cache: KVCache
) -> PromptContext:
    context = views.get("context_blocks")
    return PromptContext(
        cache,
        shape.batch,
        views["write_blocks"].flatten(),
        views["write_offsets"].flatten(),
        context,
        None
        if context is None
        else _context_mask(views["context_tokens"], shape, cache.block_size),
        positions=views["position_ids"].flatten(),
        recent_blocks=views.get("recent_blocks"),
        recent_starts=views.get("recent_starts"),
    )


def _ragged_context(
    shape: RaggedShape, views: dict[str, torch.Tensor], cache: KVCache
) -> RaggedContext:
    context = _blocks_of_chunks(shape, views)
    mask = _last_rows(shape)
    chunks, end = [], 0
    for size, blocks in zip(shape.chunks, context, strict=True):
        start, end = end, end + size.tokens
        if not size.context_tokens:
            chunks.append(RaggedChunk(start, end, None, None))
            continue
        # All masks are equal when read from their last row and column.
        part = mask[-size.tokens :, -(size.context_tokens + size.tokens) :]
        chunks.append(RaggedChunk(start, end, blocks, part))
    return RaggedContext(
        cache,
        views["write_blocks"],
        views["write_offsets"],
        tuple(chunks),
        positions=views["position_ids"],
    )


def _blocks_of_chunks(shape: Any, views: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The blocks of the context of each chunk."""
    sizes = [size.context_blocks for size in shape.chunks]
    return torch.split(views["context_blocks"], sizes)


def _last_rows(shape: RaggedShape) -> torch.Tensor:
    """The last rows of the largest mask of a chunk with context, at most `MASK_ROWS`."""
    sizes = [size for size in shape.chunks if size.context_tokens]
    rows = min(MASK_ROWS, max((size.tokens for size in sizes), default=0))
    width = max((size.context_tokens + size.tokens for size in sizes), default=0)
    return torch.ones(rows, width, dtype=torch.bool).tril_(width - rows)


def _decode_context(
    shape: DecodeShape, views: dict[str, torch.Tensor], cache: KVCache
) -> DecodeContext:
    filled = views["filled"]
    offsets = torch.arange(cache.block_size, device=filled.device)
    # ``[N, 1, 1, S]``: 0 at the filled positions of each block, `MASKED` at the others.
    bias = torch.where(offsets < filled[:, None], 0.0, MASKED)[:, None, None, :]
    has_groups = cache.groups.num_groups > 1
    return DecodeContext(
        cache,
        shape.blocks,
        views["write_blocks"],
        views["write_offsets"],
        views["owners"],
        views["readers"],
        bias,
        views.get("extra_blocks"),
        views.get("shared_filled"),
        positions=views["position_ids"],
        starts=views["starts"],
        shared_starts=views.get("shared_starts"),
        narrowed={} if has_groups else None,
        masks={} if has_groups else None,
        recent_blocks=views.get("recent_blocks"),
        recent_starts=views.get("recent_starts"),
    )


def _context_mask(starts: torch.Tensor, shape: PromptShape, block_size: int) -> torch.Tensor:
    """``[B, 1, Q, C * S + Q]``: true for a query's context, then causally for its chunk."""
    device = starts.device
    width = shape.context_blocks * block_size
    held = torch.arange(width, device=device) < starts[:, None]
    context = held[:, None, None, :].expand(-1, 1, shape.query, -1)
    query = torch.arange(shape.query, device=device)
    causal = query <= query.unsqueeze(1)  # an index would not be traced on every device
    return torch.cat((context, causal.expand(shape.batch, 1, -1, -1)), dim=-1)
