"""Makes batches of scheduled sequences: which share a forward pass, and its padded shape.

`bucket_choice` knows the buckets, `model_input` the tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import attrs
import torch

from trencadis.engine.runner.bucket_choice import BucketChoice, num_elements
from trencadis.engine.runner.forward_runner import ForwardRunner
from trencadis.engine.runner.grids import Grids
from trencadis.engine.runner.model_input import (
    ModelInput,
    Upload,
    adapter_slots,
    build_decode,
    build_mixed,
    build_prompt,
    lay_out_decodes,
    lay_out_groups,
    state_rows,
    with_dummy_slots,
)
from trencadis.engine.runner.recorded_traffic import TrafficLog
from trencadis.engine.runner.sampling_rows import Sampler
from trencadis.engine.runner.shapes import (
    BucketShape,
    DecodeRead,
    DecodeShape,
    MixedShape,
    PromptShape,
    RaggedShape,
    decode_size,
    in_groups,
    most_group_pairs,
    most_prefix_pairs,
    padded_decode,
    prompt_shape,
    ragged_shape,
    split_prompts,
    with_shared,
)
from trencadis.engine.runner.step import IntArray, RowRequest, StepInput
from trencadis.kvcache import DecodeLayout, ceil_div
from trencadis.kvcache.tensors import KVCache
from trencadis.scheduler import PENDING_TOKEN, ScheduledSequence
from trencadis.warmup import Phase

_FORWARD_COST = 32.0
"""Cost of one more forward pass, in padded tokens: about what its launches cost on the CPU."""

_TOKENS = 16
"""Where no program needs a bucket's size, longer prefill is padded to a multiple of this many
tokens: oneDNN prepares a product for each number of rows, and keeps a limited number of them.
Decodes have the small numbers anyway."""

Scheduled = Sequence[ScheduledSequence]

Rows = Mapping[int, RowRequest]
"""What is sampled, by sequence id; a sequence without an entry samples nothing."""


class Batch(NamedTuple):
    """The sequences that share a forward pass, what is sampled of each, and its input."""

    sequences: Scheduled
    requests: Sequence[RowRequest | None]
    input: ModelInput


class BatchBuilder:
    """Makes the batches of a step, and dummy batches. ``padded_tokens`` counts their padding.

    ``traffic`` records the shapes of batches before padding, if it is set. ``read`` says how decode
    reads the cache, as the decode grid assumes it. Without ``grids``, batches are not padded.
    """

    def __init__(
        self,
        forward_runner: ForwardRunner,
        sampler: Sampler,
        upload: Upload,
        cache: KVCache,
        grids: Grids | None,
        read: DecodeRead,
        buckets: BucketChoice,
    ) -> None:
        self.padded_tokens = 0
        self.traffic: TrafficLog | None = None
        self._slots: dict[int, int] = {}
        self._adapter_slots: Mapping[str, int] = {}
        self._sampled_ids: torch.Tensor | None = None
        self._forward_runner = forward_runner
        self._sampler = sampler
        self._upload = upload
        self._grids = grids
        self._read = read
        self._buckets = buckets
        self.use_cache(cache)

    def use_cache(self, cache: KVCache) -> None:
        """Make batches for another cache of the same layout."""
        self._cache = cache
        self._num_groups = cache.groups.num_groups
        self._padded_decode = functools.partial(
            padded_decode,
            read=self._read,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            windows=self._forward_runner.windows,
        )
        self.end_step()

    def begin_step(self, step: StepInput) -> StepInput:
        """``step`` with the slots of its pending tokens in their place, see `ModelInput`.

        Its rows get slots of their own.
        """
        self._adapter_slots = step.adapter_slots
        self._sampled_ids = self._sampler.sampled_ids
        if self._sampled_ids is None:
            return step
        previous, self._slots = self._slots, {key: i for i, key in enumerate(step.rows, 1)}
        decodes = tuple(
            # Without a slot, the step before has failed, and the request with it.
            decode._replace(token_ids=(-previous.get(decode.seq_id, 0),))
            if decode.token_ids[0] == PENDING_TOKEN
            else decode
            for decode in step.decodes
        )
        return attrs.evolve(step, decodes=decodes)

    def end_step(self) -> None:
        """Keep nothing of a step that was launched, so that its ids can leave the device."""
        self._sampled_ids = None

    def words(
        self, sequences: Scheduled, requests: Sequence[RowRequest | None], batch: int
    ) -> IntArray:
        """What the sampler needs of these requests, see `Sampler.words`."""
        slots: Sequence[int] = ()
        if self._slots:
            slots = [
                0 if request is None else self._slots.get(sequence.seq_id, 0)
                for sequence, request in zip(sequences, requests, strict=True)
            ]
        return self._sampler.words(requests, batch, slots)

    @property
    def pads_to_buckets(self) -> bool:
        """Whether each phase has forward passes of its own, in the shapes of its buckets.

        Otherwise the prefill chunks are ragged, and no program depends on the number of tokens.
        """
        ragged = self._grids is not None and self._grids.ragged
        return not (ragged and self._forward_runner.takes_any_tokens)

    def prompt_parts(self, prompts: Scheduled) -> Iterable[Scheduled]:
        """The prefill chunks that share a forward pass of a bucket."""
        return split_prompts(prompts, self._prompt_cost)

    def unpadded_parts(self, scheduled: Scheduled) -> Iterator[Scheduled]:
        """What shares a forward pass: all, unless the decodes gather more than was profiled.

        Then the prefill chunks run apart, and the decodes in halves.
        """
        decodes = [sequence for sequence in scheduled if len(sequence.token_ids) == 1]
        if len(decodes) < 2 or self._num_pairs(decodes) <= self._most_pairs(decodes):
            yield scheduled
            return
        if len(decodes) < len(scheduled):
            yield [sequence for sequence in scheduled if len(sequence.token_ids) > 1]
        half = len(decodes) // 2
        yield from self.unpadded_parts(decodes[:half])
        yield from self.unpadded_parts(decodes[half:])

    def _most_pairs(self, decodes: Scheduled) -> int:
        """As many (block, sequence) pairs of a decode batch as memory is planned for."""
        num_blocks, block_size = self._cache.num_blocks, self._cache.block_size
        if self._num_groups == 1:
            return most_prefix_pairs(num_blocks)
        longest = max(ceil_div(decode.start + 1, block_size) for decode in decodes)
        return most_group_pairs(num_blocks, self._num_groups, longest)

    def _num_pairs(self, decodes: Scheduled) -> int:
        """(block, sequence) pairs that a decode batch scores without padding, or somewhat more."""
        num_blocks, block_size = self._cache.num_blocks, self._cache.block_size
        of_all = sum(ceil_div(decode.start + 1, block_size) for decode in decodes)
        if self._num_groups > 1:
            return of_all
        if num_blocks + of_all <= most_prefix_pairs(num_blocks):
            return num_blocks + of_all  # an upper bound, without a look at what is shared
        size = decode_size(decodes, self._read, block_size)
        blocks = self._padded_decode(size).blocks
        return blocks + lay_out_decodes(decodes, blocks, block_size).num_extra

    def unpadded_batches(self, scheduled: Scheduled, rows: Rows) -> Iterable[Batch]:
        """Decodes and prefill chunks in one forward pass: the weights are read once."""
        decodes = [sequence for sequence in scheduled if len(sequence.token_ids) == 1]
        if not decodes:
            return self.prompt_batches(scheduled, rows)
        size = decode_size(decodes, self._read, self._cache.block_size)
        if self.traffic is not None:
            self.traffic.record(Phase.DECODE, size)
        self._buckets.usage.count_unpadded(Phase.DECODE, *size)
        shape = self._padded_decode(size)
        further: Sequence[DecodeLayout] = ()
        if self._num_groups > 1:
            shape, (layout, *further) = self._lay_out_groups(decodes, shape.batch)
        else:
            layout = lay_out_decodes(decodes, shape.blocks, self._cache.block_size)
            shape = attrs.evolve(shape, extra=layout.num_extra)
        if len(decodes) == len(scheduled):
            return (self._decode_batch(decodes, layout, shape, rows, further),)
        chunks = [sequence for sequence in scheduled if len(sequence.token_ids) > 1]
        return (self._mixed_batch(decodes, layout, shape, chunks, rows, further),)

    def _lay_out_groups(
        self, decodes: Scheduled, batch: int
    ) -> tuple[DecodeShape, tuple[DecodeLayout, ...]]:
        """The shape of a batch of this size, and its pairs in each block group."""
        layouts = lay_out_groups(decodes, self._cache.groups, self._cache.block_size)
        first, *further = (layout.num_extra for layout in layouts)
        return DecodeShape(batch, 0, first, further=tuple(further)), layouts

    def prompt_batches(self, chunks: Scheduled, rows: Rows) -> Iterable[Batch]:
        """Prefill chunks as one batch."""
        shape = self._prompt_shape(chunks)
        self.padded_tokens += shape.num_tokens - sum(len(chunk.token_ids) for chunk in chunks)
        requests = [rows.get(chunk.seq_id) for chunk in chunks]
        words = self.words(chunks, requests, shape.batch)
        packed = build_prompt(chunks, shape, self._cache, self._upload, words)
        return (Batch(chunks, requests, self._with_slots(packed, chunks)),)

    def _prompt_shape(self, chunks: Scheduled) -> PromptShape | RaggedShape:
        """The padded shape of a prefill batch, which is recorded."""
        if self._grids is None:
            shape = prompt_shape(chunks, self._cache.block_size)
            if self.traffic is not None:
                self.traffic.record(Phase.PROMPT, shape.size)
            self._buckets.usage.count_unpadded(Phase.PROMPT, shape.batch, shape.query)
            return shape
        exact = self._grids.exact_prompt(chunks, self._cache.block_size)
        if isinstance(exact, RaggedShape):
            self._record_padded(chunks)
            if not self.pads_to_buckets:
                self._buckets.usage.count_unpadded(Phase.PROMPT, exact.batch, exact.num_tokens)
                return _rounded(exact)
            size: tuple[int, ...] = (1, exact.num_tokens, 0)
        else:
            # A batch that is not a size of the grid was not made by `split_prompts`.
            size = self._grids.prompt_size(exact) or (exact.batch, exact.query)
            if self.traffic is not None:
                self.traffic.record(Phase.PROMPT, size)
        return self._grids.padded_prompt(self._buckets.find(Phase.PROMPT, size), exact)

    def _mixed_batch(
        self,
        decodes: Scheduled,
        layout: DecodeLayout,
        decode: DecodeShape,
        chunks: Scheduled,
        rows: Rows,
        further: Sequence[DecodeLayout] = (),
    ) -> Batch:
        self._record_padded(chunks)
        exact = ragged_shape(chunks, self._cache.block_size)
        self._buckets.usage.count_unpadded(Phase.PROMPT, exact.batch, exact.num_tokens)
        prompt = _rounded(exact, decode.num_tokens)
        shape = MixedShape(decode, prompt)
        scheduled = [*decodes, *chunks]
        self.padded_tokens += shape.num_tokens - sum(len(item.token_ids) for item in scheduled)
        requests = [rows.get(item.seq_id) for item in scheduled]
        words = self.words(scheduled, requests, shape.batch)
        cache, upload, ids = self._cache, self._upload, self._sampled_ids
        packed = build_mixed(decodes, layout, chunks, shape, cache, upload, words, ids, further)
        return Batch(scheduled, requests, self._with_slots(packed, scheduled))

    def decode_batches(self, decodes: Scheduled, rows: Rows) -> Iterator[Batch]:
        """One batch; several where the sequences have more blocks to gather than the bucket."""
        size = decode_size(decodes, self._read, self._cache.block_size)
        half = len(decodes) // 2
        if self._is_better_divided(decodes, size):
            yield from self.decode_batches(decodes[:half], rows)
            yield from self.decode_batches(decodes[half:], rows)
            return
        if self.traffic is not None:
            self.traffic.record(Phase.DECODE, size)
        batch, blocks = self._buckets.find(Phase.DECODE, size)
        if self._num_groups > 1:
            shape, (first, *further) = self._lay_out_groups(decodes, batch)
            yield self._decode_batch(decodes, first, shape, rows, further)
            return
        shape = self._padded_decode((batch, blocks))
        layout = lay_out_decodes(decodes, shape.blocks, self._cache.block_size)
        if layout.num_extra and shape.blocks and self._forward_runner.scores_shared:
            shape = with_shared(shape, self._cache.block_size)
            layout = lay_out_decodes(decodes, shape.blocks, self._cache.block_size, shape.shared)
        num_extra = layout.num_extra
        if num_extra and shape.blocks:
            if self._forward_runner.needs_warmup and num_extra > shape.blocks:
                yield from self.decode_batches(decodes[:half], rows)
                yield from self.decode_batches(decodes[half:], rows)
                return
            shape = attrs.evolve(shape, extra=self._padded_extra(num_extra, shape.blocks))
        yield self._decode_batch(decodes, layout, shape, rows)

    def _decode_batch(
        self,
        decodes: Scheduled,
        layout: DecodeLayout,
        shape: DecodeShape,
        rows: Rows,
        further: Sequence[DecodeLayout] = (),
    ) -> Batch:
        self.padded_tokens += shape.batch - len(decodes)
        requests = [rows.get(decode.seq_id) for decode in decodes]
        words = self.words(decodes, requests, shape.batch)
        cache, upload, ids = self._cache, self._upload, self._sampled_ids
        packed = build_decode(decodes, layout, shape, cache, upload, words, ids, further)
        if self._forward_runner.adapters is not None or self._forward_runner.states is not None:
            packed = self._with_slots(packed, decodes)
        return Batch(decodes, requests, packed)

    def _with_slots(self, packed: ModelInput, sequences: Scheduled) -> ModelInput:
        """A batch with the slots of its tokens' adapters, and of its sequences' states."""
        if self._forward_runner.states is not None:
            rows = state_rows(sequences, packed.shape)
            packed = self._forward_runner.with_states(attrs.evolve(packed, state_rows=rows))
        return self._with_adapters(packed, sequences)

    def _with_adapters(self, packed: ModelInput, sequences: Scheduled) -> ModelInput:
        """A batch with the slots of its tokens' adapters, in the shape for their highest rank.

        Where none has an adapter these are left out, and so is all that computes them.
        """
        adapters = self._forward_runner.adapters
        if adapters is None or not any(sequence.adapter for sequence in sequences):
            return packed
        slots = adapter_slots(sequences, packed.shape, self._adapter_slots)
        shape = attrs.evolve(packed.shape, adapter_rank=adapters.rank_of(slots))
        uploaded = self._upload(torch.from_numpy(slots))
        return attrs.evolve(packed, shape=shape, adapter_slots=uploaded)

    def _is_better_divided(self, decodes: Scheduled, size: tuple[int, int]) -> bool:
        """Whether no bucket has as many (block, sequence) pairs as this batch.

        Two smaller batches then need no new shape.
        """
        return (
            self._read is DecodeRead.PAIRS
            and len(decodes) > 1
            and self._grids is not None
            and self._grids.decode.find(size) is None
        )

    def _padded_extra(self, num_extra: int, blocks: int) -> int:
        """Padded number of gathered (block, sequence) pairs.

        As many as blocks where shapes are warmed up (one shape per bucket), else the next power of
        two from 8.
        """
        if self._forward_runner.needs_warmup:
            return blocks
        return max(8, 1 << (num_extra - 1).bit_length())

    def _prompt_cost(self, chunks: Scheduled) -> float | None:
        """Cost of one forward pass for these chunks, in padded tokens; None for a bucket miss.

        A grid of sequence lengths has the buckets that seed 002 describes: all prompts together.
        """
        if self._grids is None:
            return prompt_shape(chunks, self._cache.block_size).num_tokens + _FORWARD_COST
        size = self._grids.prompt_size(self._grids.exact_prompt(chunks, self._cache.block_size))
        bucket = None if size is None else self._grids.prompt.find(size)
        if bucket is None:
            return None
        if not self._grids.has_context:
            return _FORWARD_COST
        return math.prod(bucket.shape[:2]) + _FORWARD_COST

    def _record_padded(self, chunks: Scheduled) -> None:
        """Record a ragged batch as the padded ones within the budget that other devices would run.

        They read what is recorded.
        """
        if self.traffic is None or self._grids is None:
            return
        budget, block_size = self._grids.max_chunk_tokens, self._cache.block_size

        def cost(part: Scheduled) -> float | None:
            tokens = prompt_shape(part, block_size).num_tokens
            return None if tokens > budget and len(part) > 1 else tokens + _FORWARD_COST

        for part in split_prompts(chunks, cost):
            self.traffic.record(Phase.PROMPT, prompt_shape(part, block_size).size)

    @torch.inference_mode()  # as in a step: PyTorch traces again for a tensor of another mode
    def dummy(self, shape: BucketShape) -> ModelInput:
        """A batch of this shape that reads and writes the padding block only."""
        cache, upload = self._cache, self._upload
        words = self._sampler.words((), shape.batch)
        if isinstance(shape, PromptShape | RaggedShape):
            packed = build_prompt((), shape, cache, upload, words)
        else:
            if self._num_groups > 1:
                shape = in_groups(shape, self._num_groups)
            layout = lay_out_decodes((), shape.blocks, cache.block_size, shape.shared)
            ids = self._sampler.sampled_ids
            packed = build_decode((), layout, shape, cache, upload, words, ids)
        return with_dummy_slots(self._forward_runner.with_states(packed), upload)

    def smallest_dummy(self) -> ModelInput:
        """The dummy batch of the smallest decode bucket."""
        size = (1, 1)
        if self._grids is not None:
            batch, blocks = min(self._grids.decode.buckets, key=num_elements).shape
            size = (batch, blocks)
        return self.dummy(self._padded_decode(size))


def _rounded(shape: RaggedShape, preceding: int = 0) -> RaggedShape:
    """``shape``, padded so that its tokens with the ``preceding`` ones fill `_TOKENS`.

    A batch of fewer tokens is not padded: decodes have these numbers, too.
    """
    tokens = preceding + shape.num_tokens
    if tokens > _TOKENS:
        tokens = ceil_div(tokens, _TOKENS) * _TOKENS
    return attrs.evolve(shape, num_tokens=tokens - preceding)
