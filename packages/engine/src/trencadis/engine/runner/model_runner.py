"""The model runner: executes a scheduled step; every batch is padded to a bucket."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch

from trencadis.bucketing import Bucket, BucketGrid
from trencadis.engine.devices import Device, PendingCopy
from trencadis.engine.errors import BucketMiss, ModelError
from trencadis.engine.inspection import GridUsage
from trencadis.engine.runner.block_moves import copy_blocks
from trencadis.engine.runner.bucket_usage import BucketUsage
from trencadis.engine.runner.forward_runner import REFUSED, ForwardOutput, ForwardRunner
from trencadis.engine.runner.grids import Grids
from trencadis.engine.runner.model_input import (
    ModelInput,
    build_decode,
    build_mixed,
    build_prompt,
    lay_out_decodes,
)
from trencadis.engine.runner.recorded_traffic import TrafficLog
from trencadis.engine.runner.sampling_rows import (
    PendingRows,
    RowRequest,
    RowResult,
    Sampler,
)
from trencadis.engine.runner.shapes import (
    BucketShape,
    ChunkSize,
    DecodeRead,
    DecodeShape,
    MixedShape,
    PromptShape,
    RaggedShape,
    decode_size,
    most_prefix_pairs,
    padded_decode,
    prompt_shape,
    ragged_shape,
    split_prompts,
)
from trencadis.kvcache import DecodeLayout, Direction, ceil_div
from trencadis.kvcache.tensors import KVCache
from trencadis.scheduler import ScheduledSequence, SchedulerOutput
from trencadis.warmup import GraphCapture, Phase

logger = logging.getLogger("trencadis.engine")

_FORWARD_COST = 32.0
"""Cost of one more forward pass, in padded tokens: about what its launches cost on the CPU."""

_MAX_OVERSIZE = 4
"""A warmed-up bucket may replace a cold one if it is at most this many times as large."""

_TOKENS = 16
"""Where no program needs a bucket's size, longer prefill is padded to a multiple of this many
tokens: oneDNN prepares a product for each number of rows, and keeps a limited number of them.
Decodes have the small numbers anyway."""

RecordMiss = Callable[[Phase, Bucket], None]

Scheduled = Sequence[ScheduledSequence]


_NOTHING = RowRequest()

_NO_LOGITS = (
    "the model computed NaN, or every token is forbidden: check the checkpoint and its dtype, or "
    "the request's stop_token_ids with min_tokens"
)


@attrs.frozen(eq=False)
class _SampledBatch:
    """The sequences of a batch, what is asked of each, and the sampling that was started."""

    seq_ids: Sequence[int]
    requests: Sequence[RowRequest]
    rows: PendingRows


@attrs.define(eq=False)
class _StepInProgress:
    """What a step samples, the batches whose sampling was started, and the failed sequences."""

    requests: Mapping[int, RowRequest]
    sampled: list[_SampledBatch] = attrs.field(factory=list)
    failed: dict[int, Exception] = attrs.field(factory=dict)

    @property
    def outputs(self) -> list[torch.Tensor]:
        """What the host reads of the sampling, batch after batch."""
        return [tensor for batch in self.sampled for tensor in batch.rows.outputs]

    def requests_of(self, sequences: Scheduled) -> list[RowRequest]:
        """The request of each row, in the order of the batch."""
        return [self.requests.get(sequence.seq_id, _NOTHING) for sequence in sequences]


@attrs.frozen(eq=False)
class PendingStep:
    """A step that the device may still be working on.

    - ``swap_s``: seconds that its swap transfers took, by direction.
    - ``failed``: by sequence id, the error of each sequence whose forward pass or sampling failed.
    - ``is_timed``: whether the step began on an idle device and `wait` ends with an idle one, so
      that the time between tells how long its forward passes took.
    """

    swap_s: Mapping[Direction, float]
    failed: dict[int, Exception]
    is_timed: bool
    _sampled: Sequence[_SampledBatch]
    _copy: PendingCopy

    def wait(self) -> dict[int, RowResult]:
        """The results by the sequence ids of the sampled rows. Blocks until they have arrived.

        A sequence whose logits are no numbers is added to ``failed`` and has no result.
        """
        copies = iter(self._copy.wait())
        results: dict[int, RowResult] = {}
        for batch in self._sampled:
            rows = batch.rows.read([next(copies) for _ in batch.rows.outputs])
            sampled = zip(batch.seq_ids, batch.requests, rows, strict=True)
            for seq_id, asked, result in sampled:
                if asked.is_empty:
                    continue
                if result.is_valid:
                    results[seq_id] = result
                else:
                    logger.error("Sequence %d: %s", seq_id, _NO_LOGITS)
                    self.failed[seq_id] = ModelError(_NO_LOGITS)
        return results


class ModelRunner:
    """Executes steps on a model and a KV cache. Implements warm-up's ``GraphRuntime``.

    ``read`` says how decode reads the cache, as the decode grid assumes it. Without ``grids``,
    batches are not padded. ``padded_tokens`` and ``bucket_misses`` count since
    the start; a bucket miss is a batch larger than every bucket.
    """

    def __init__(
        self,
        forward_runner: ForwardRunner,
        sampler: Sampler,
        device: Device,
        cache: KVCache,
        grids: Grids | None,
        read: DecodeRead = DecodeRead.PREFIX,
    ) -> None:
        self.forward_runner = forward_runner
        self.padded_tokens = 0
        self.bucket_misses = 0
        self._sampler = sampler
        self._device = device
        self._device_is_idle = True
        self._cache = cache
        self._grids = grids
        self._read = read
        self._ready_buckets: set[tuple[Phase, Bucket]] = set()
        self._captured_buckets: set[tuple[Phase, Bucket]] = set()
        self._usage = BucketUsage(grids, read)
        self._record_miss: RecordMiss | None = None
        self._traffic: TrafficLog | None = None
        self._capture: GraphCapture | None = None
        self._never_used: dict[Phase, set[Bucket]] = {}
        self._not_captured: dict[tuple[Phase, Bucket], None] = {}

    @property
    def num_graphs(self) -> int:
        """Graphs that are captured now; a decode bucket may have two."""
        return self.forward_runner.num_graphs

    @property
    def num_ready_buckets(self) -> int:
        """Buckets that are warmed up."""
        return len(self._ready_buckets)

    @property
    def grid_usage(self) -> tuple[GridUsage, ...]:
        """The state and the hits of the buckets of both phases."""
        # Copies, because a thread may warm up the next bucket meanwhile. Without graphs, those that
        # the buckets had were released with the memory of the device.
        captured = self._captured_buckets.copy() if self.num_graphs else set()
        return self._usage.tables(
            self._ready_buckets.copy(), captured, is_padded=self._pads_to_buckets
        )

    def use_cache(self, cache: KVCache) -> None:
        """Serve from another cache of the same layout, between two steps."""
        self._cache = cache
        self.forward_runner.use_cache(cache)

    def prefer_ready_buckets(self, record_miss: RecordMiss) -> None:
        """Let a batch whose bucket is not warmed up use a larger one that is.

        Calls ``record_miss`` for each batch whose own bucket was not warmed up yet.
        """
        self._record_miss = record_miss

    def record_traffic(self, traffic: TrafficLog) -> None:
        """Record the shapes of all batches from now on."""
        self._traffic = traffic

    def capture_in_traffic(self, capture: GraphCapture) -> None:
        """Capture the graphs of the buckets that live traffic uses, after their first use."""
        self._capture = capture
        if self._grids is not None:
            self._never_used = {
                Phase.PROMPT: set(self._grids.prompt.buckets),
                Phase.DECODE: set(self._grids.decode.buckets),
            }

    def capture_used_buckets(self) -> None:
        """Capture the graphs of buckets that were used first since the last call.

        Call it between two steps. After an error no more graphs are captured; serving goes on.
        """
        while self._not_captured and self._capture is not None:
            phase, bucket = next(iter(self._not_captured))
            try:
                self._capture.capture_bucket(phase, bucket)
            except Exception:
                logger.exception("Capturing a graph failed; no more graphs are captured")
                self._capture = None
            self._not_captured.pop((phase, bucket))

    @torch.inference_mode()
    def run(self, output: SchedulerOutput, requests: Mapping[int, RowRequest]) -> PendingStep:
        """Start a step: block copies, decodes, prefill chunks, sampling.

        ``requests`` says by sequence id what is sampled; a sequence without an entry samples
        nothing. The host waits for swaps only, and later in `PendingStep.wait`. A batch whose
        forward pass raises is divided until only the sequences fail that raise alone.
        """
        self._device.begin_step()
        step = _StepInProgress(requests)
        swap_s: Mapping[Direction, float] = {}
        if output.moves:
            with self.forward_runner.count_compilations("block copy"):
                swap_s = copy_blocks(output.moves, self._cache, self._device)
        if self._pads_to_buckets:
            if output.decodes:
                self._run_divided(self._run_decodes, output.decodes, step)
            if output.prompts:
                for chunks in split_prompts(output.prompts, self._prompt_cost):
                    self._run_divided(self._run_prompts, chunks, step)
        elif output.decodes or output.prompts:
            for part in self._unpadded_parts((*output.decodes, *output.prompts)):
                self._run_divided(self._run_together, part, step)
        outputs = step.outputs
        began_idle, self._device_is_idle = self._device_is_idle, self._ends_idle(output, outputs)
        is_timed = began_idle and self._device_is_idle
        copy = self._device.fetch(outputs)
        return PendingStep(swap_s, step.failed, is_timed, step.sampled, copy)

    def pays_to_jump(self, start: int, num_forced: int, num_seqs: int) -> bool:
        """Whether a chunk of a token at ``start`` and ``num_forced`` more beats a step for each.

        It does where chunks share the forward pass of the decodes. Elsewhere it is one more pass,
        as long as a decode, for which all of the ``num_seqs`` sequences wait; it saves
        ``num_forced`` of the decodes that they share. No shape is made for it.
        """
        if not self._pads_to_buckets:
            return True
        if num_forced <= num_seqs:
            return False
        if self._grids is None:
            return True
        # The scheduler may divide the chunk, and its last piece has the longest context.
        tokens, context = 1 + num_forced, ceil_div(start + num_forced, self._cache.block_size)
        exact: PromptShape | RaggedShape = PromptShape(1, tokens, context)
        if self._grids.ragged:
            exact = RaggedShape(tokens, (ChunkSize(tokens, start, context),))
        size = self._grids.prompt_size(exact)
        bucket = None if size is None else self._grids.prompt.find(size)
        if bucket is None:
            return False
        is_warm = (Phase.PROMPT, bucket) in self._ready_buckets
        return is_warm or not self.forward_runner.needs_warmup

    def probe(self) -> None:
        """Run the smallest forward pass on the padding block. Raises if the device has failed."""
        size = (1, 1)
        if self._grids is not None:
            batch, blocks = min(self._grids.decode.buckets, key=_elements).shape
            size = (batch, blocks)
        shape = self._decode_shape(size)
        self.forward_runner.run(self._dummy(shape))
        self._device.synchronize()
        self._device_is_idle = True

    def _run_divided(
        self,
        run: Callable[[Scheduled, _StepInProgress], None],
        scheduled: Scheduled,
        step: _StepInProgress,
    ) -> None:
        """Run a batch. If it raises, run its halves: an error ends only sequences that cause it."""
        try:
            run(scheduled, step)
        except Exception as error:
            if len(scheduled) == 1:
                if isinstance(error, BucketMiss):
                    logger.warning("Sequence %d is refused: %s", scheduled[0].seq_id, error)
                else:
                    logger.exception("The forward pass of sequence %d failed", scheduled[0].seq_id)
                step.failed[scheduled[0].seq_id] = error
                return
            logger.warning(
                "The forward pass of %d sequences failed (%s) and is repeated in two halves",
                len(scheduled),
                error,
            )
        else:
            return
        # After the except clause, so that the tensors in the frames of its traceback are freed.
        half = len(scheduled) // 2
        for part in (scheduled[:half], scheduled[half:]):
            self._run_divided(run, part, step)

    def _run_decodes(self, decodes: Scheduled, step: _StepInProgress) -> None:
        sampled: list[_SampledBatch] = []
        for part, batch in self._decode_batches(decodes, step):
            sampled.extend(self._run_batch(part, batch, step))
        step.sampled.extend(sampled)

    def _unpadded_parts(self, scheduled: Scheduled) -> Iterator[Scheduled]:
        """What shares a forward pass: all, unless the decodes gather more than was profiled.

        Then the prefill chunks run apart, and the decodes in halves.
        """
        decodes = [sequence for sequence in scheduled if len(sequence.token_ids) == 1]
        most = most_prefix_pairs(self._cache.num_blocks)
        if len(decodes) < 2 or self._num_pairs(decodes) <= most:
            yield scheduled
            return
        if len(decodes) < len(scheduled):
            yield [sequence for sequence in scheduled if len(sequence.token_ids) > 1]
        half = len(decodes) // 2
        yield from self._unpadded_parts(decodes[:half])
        yield from self._unpadded_parts(decodes[half:])

    def _num_pairs(self, decodes: Scheduled) -> int:
        """(block, sequence) pairs that a decode batch scores without padding, or somewhat more."""
        size = decode_size(decodes, self._read, self._cache.block_size)
        blocks = self._decode_shape(size).blocks
        of_all = sum(ceil_div(decode.start + 1, self._cache.block_size) for decode in decodes)
        if blocks + of_all <= most_prefix_pairs(self._cache.num_blocks):
            return blocks + of_all  # an upper bound, without a look at what is shared
        return blocks + lay_out_decodes(decodes, blocks, self._cache.block_size).num_extra

    def _run_together(self, scheduled: Scheduled, step: _StepInProgress) -> None:
        """Decodes and prefill chunks in one forward pass: the weights are read once."""
        decodes = [sequence for sequence in scheduled if len(sequence.token_ids) == 1]
        chunks = [sequence for sequence in scheduled if len(sequence.token_ids) > 1]
        if not chunks:
            self._run_decodes(decodes, step)
        elif not decodes:
            self._run_prompts(chunks, step)
        else:
            batch = self._mixed_batch(decodes, chunks, step)
            step.sampled.extend(self._run_batch([*decodes, *chunks], batch, step))

    def _run_prompts(self, chunks: Scheduled, step: _StepInProgress) -> None:
        step.sampled.extend(self._run_batch(chunks, self._prompt_batch(chunks, step), step))

    def _run_batch(
        self, sequences: Scheduled, batch: ModelInput, step: _StepInProgress
    ) -> list[_SampledBatch]:
        """Run a batch and start its sampling; nothing is read where no row is sampled."""
        computed = self.forward_runner.run(batch)
        requests = step.requests_of(sequences)
        if all(request.is_empty for request in requests):
            return []
        seq_ids = [sequence.seq_id for sequence in sequences]
        with self.forward_runner.count_compilations(f"sampling {batch.shape.batch} rows"):
            try:
                rows = self._sampler.launch(computed.logits, computed.sampler_words, requests)
            except Exception as error:
                logger.warning("Sampling failed (%s) and is repeated for each row", error)
            else:
                return [_SampledBatch(seq_ids, requests, rows)]
            return self._sample_each(computed, seq_ids, requests, step)

    def _sample_each(
        self,
        computed: ForwardOutput,
        seq_ids: Sequence[int],
        requests: Sequence[RowRequest],
        step: _StepInProgress,
    ) -> list[_SampledBatch]:
        """Sample each row alone: an error ends only the request that causes it."""
        sampled: list[_SampledBatch] = []
        for i, (seq_id, request) in enumerate(zip(seq_ids, requests, strict=True)):
            if request.is_empty:
                continue
            alone = [request if j == i else _NOTHING for j in range(len(requests))]
            try:
                rows = self._sampler.launch(computed.logits, computed.sampler_words, alone)
            except Exception as error:
                logger.exception("Sampling sequence %d failed", seq_id)
                step.failed[seq_id] = error
            else:
                sampled.append(_SampledBatch(seq_ids, alone, rows))
        return sampled

    def _ends_idle(self, output: SchedulerOutput, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether the device is idle once the host has read ``outputs``."""
        ran = bool(output.decodes or output.prompts)
        return self._device.shares_host_memory or bool(outputs) or not ran

    # Warm-up's GraphRuntime. Dummy batches write to the padding block only.

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        """Compile for the bucket's shapes where the device compiles, and run each on dummy data.

        Leaves out a shape whose program serves any number of tokens and has run in another bucket;
        see `ForwardRunner.prepare`.
        """
        for shape in self._shapes(phase, bucket):
            self._device.begin_step()
            self.forward_runner.prepare(self._dummy(shape))
        self._ready_buckets.add((phase, bucket))

    def is_kept(self, phase: Phase, bucket: Bucket) -> bool:
        """Whether the compile cache has the programs of the bucket's shapes."""
        shapes = self._shapes(phase, bucket)
        return all(self.forward_runner.is_kept(self._dummy(shape)) for shape in shapes)

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        """Capture the bucket's shapes as graphs, and replay each graph once.

        The replay makes a lazy device compile the copy of a batch into the graph's inputs, too.
        """
        for shape in self._shapes(phase, bucket):
            self.forward_runner.capture(self._dummy(shape))
            self.forward_runner.prepare(self._dummy(shape))
        self._captured_buckets.add((phase, bucket))

    def release(self, phase: Phase, bucket: Bucket) -> None:
        """Release the bucket's graphs."""
        self._captured_buckets.discard((phase, bucket))
        for shape in self._shapes(phase, bucket):
            self.forward_runner.release(shape)

    def synchronize(self) -> None:
        self._device.synchronize()

    def free_memory(self) -> int:
        return self._device.free_memory()

    def _shapes(self, phase: Phase, bucket: Bucket) -> list[BucketShape]:
        """The shapes that batches of a bucket have.

        A decode bucket that reads a prefix has two: without gathered blocks, and with as many as
        it has blocks.
        """
        if phase is Phase.PROMPT:
            return list(self._grids.prompt_shapes(bucket.shape)) if self._grids else []
        batch, blocks = bucket.shape
        shape = self._decode_shape((batch, blocks))
        if shape.batch == 1 or not shape.blocks or not self.forward_runner.needs_warmup:
            return [shape]
        return [shape, attrs.evolve(shape, extra=shape.blocks)]

    def _dummy(self, shape: BucketShape) -> ModelInput:
        cache, upload = self._cache, self._device.upload
        words = self._sampler.words((), shape.batch)
        if isinstance(shape, PromptShape | RaggedShape):
            return build_prompt((), shape, cache, upload, words)
        layout = lay_out_decodes((), shape.blocks, cache.block_size)
        return build_decode((), layout, shape, cache, upload, words)

    # Batches.

    @property
    def _pads_to_buckets(self) -> bool:
        """Whether each phase has forward passes of its own, in the shapes of its buckets.

        Otherwise the prefill chunks are ragged, and no program depends on the number of tokens.
        """
        ragged = self._grids is not None and self._grids.ragged
        return not (ragged and self.forward_runner.takes_any_tokens)

    def _prompt_batch(self, chunks: Scheduled, step: _StepInProgress) -> ModelInput:
        shape = self._prompt_shape(chunks)
        self.padded_tokens += shape.num_tokens - sum(len(chunk.token_ids) for chunk in chunks)
        words = self._sampler.words(step.requests_of(chunks), shape.batch)
        return build_prompt(chunks, shape, self._cache, self._device.upload, words)

    def _prompt_shape(self, chunks: Scheduled) -> PromptShape | RaggedShape:
        """The padded shape of a prefill batch, which is recorded."""
        if self._grids is None:
            shape = prompt_shape(chunks, self._cache.block_size)
            self._record(Phase.PROMPT, attrs.astuple(shape))
            self._usage.count_unpadded(Phase.PROMPT, shape.batch, shape.query)
            return shape
        exact = self._grids.exact_prompt(chunks, self._cache.block_size)
        if isinstance(exact, RaggedShape):
            self._record_padded(chunks)
            if not self._pads_to_buckets:
                self._usage.count_unpadded(Phase.PROMPT, exact.batch, exact.num_tokens)
                return _rounded(exact)
            size: tuple[int, ...] = (1, exact.num_tokens, 0)
        else:
            # A batch that is no size of the grid was not made by `split_prompts`.
            size = self._grids.prompt_size(exact) or (exact.batch, exact.query)
            self._record(Phase.PROMPT, size)
        return self._grids.padded_prompt(self._bucket(Phase.PROMPT, size), exact)

    def _mixed_batch(
        self, decodes: Scheduled, chunks: Scheduled, step: _StepInProgress
    ) -> ModelInput:
        self._record_padded(chunks)
        decode, layout = self._exact_decode(decodes)
        exact = ragged_shape(chunks, self._cache.block_size)
        self._usage.count_unpadded(Phase.PROMPT, exact.batch, exact.num_tokens)
        prompt = _rounded(exact, decode.num_tokens)
        shape = MixedShape(decode, prompt)
        scheduled = [*decodes, *chunks]
        self.padded_tokens += shape.num_tokens - sum(len(item.token_ids) for item in scheduled)
        words = self._sampler.words(step.requests_of(scheduled), shape.batch)
        cache, upload = self._cache, self._device.upload
        return build_mixed(decodes, layout, chunks, shape, cache, upload, words)

    def _decode_batches(
        self, decodes: Scheduled, step: _StepInProgress
    ) -> Iterator[tuple[Scheduled, ModelInput]]:
        """One batch; several where the sequences have more blocks to gather than the bucket."""
        if not self._pads_to_buckets:
            shape, layout = self._exact_decode(decodes)
            yield decodes, self._decode_input(decodes, layout, shape, step)
            return
        size = decode_size(decodes, self._read, self._cache.block_size)
        if self._is_better_divided(decodes, size):
            half = len(decodes) // 2
            yield from self._decode_batches(decodes[:half], step)
            yield from self._decode_batches(decodes[half:], step)
            return
        self._record(Phase.DECODE, size)
        batch, blocks = self._bucket(Phase.DECODE, size)
        shape = self._decode_shape((batch, blocks))
        layout = lay_out_decodes(decodes, shape.blocks, self._cache.block_size)
        num_extra = layout.num_extra
        if num_extra and shape.blocks:
            if self.forward_runner.needs_warmup and num_extra > shape.blocks:
                half = len(decodes) // 2
                yield from self._decode_batches(decodes[:half], step)
                yield from self._decode_batches(decodes[half:], step)
                return
            shape = attrs.evolve(shape, extra=self._padded_extra(num_extra, shape.blocks))
        yield decodes, self._decode_input(decodes, layout, shape, step)

    def _exact_decode(self, decodes: Scheduled) -> tuple[DecodeShape, DecodeLayout]:
        """The shape of a decode batch without padding, which is recorded, and its layout."""
        size = decode_size(decodes, self._read, self._cache.block_size)
        self._record(Phase.DECODE, size)
        self._usage.count_unpadded(Phase.DECODE, *size)
        shape = self._decode_shape(size)
        layout = lay_out_decodes(decodes, shape.blocks, self._cache.block_size)
        return attrs.evolve(shape, extra=layout.num_extra), layout

    def _decode_input(
        self, decodes: Scheduled, layout: DecodeLayout, shape: DecodeShape, step: _StepInProgress
    ) -> ModelInput:
        self.padded_tokens += shape.batch - len(decodes)
        words = self._sampler.words(step.requests_of(decodes), shape.batch)
        return build_decode(decodes, layout, shape, self._cache, self._device.upload, words)

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

    def _decode_shape(self, size: tuple[int, int]) -> DecodeShape:
        return padded_decode(size, self._read, self._cache.block_size, self._cache.num_blocks)

    def _padded_extra(self, num_extra: int, blocks: int) -> int:
        """Padded number of gathered (block, sequence) pairs.

        As many as blocks where shapes are warmed up (one shape per bucket), else the next power of
        two from 8.
        """
        if self.forward_runner.needs_warmup:
            return blocks
        return max(8, 1 << (num_extra - 1).bit_length())

    def _prompt_cost(self, chunks: Scheduled) -> float | None:
        """Cost of one forward pass for these chunks, in padded tokens; None for a bucket miss.

        A grid of sequence lengths has the buckets that seed 002 tells: all prompts together.
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
        if self._traffic is None or self._grids is None:
            return
        budget, block_size = self._grids.max_chunk_tokens, self._cache.block_size

        def cost(part: Scheduled) -> float | None:
            tokens = prompt_shape(part, block_size).num_tokens
            return None if tokens > budget and len(part) > 1 else tokens + _FORWARD_COST

        for part in split_prompts(chunks, cost):
            self._record(Phase.PROMPT, attrs.astuple(prompt_shape(part, block_size)))

    def _record(self, phase: Phase, shape: tuple[int, ...]) -> None:
        if self._traffic is not None:
            self._traffic.record(phase, shape)

    def _bucket(self, phase: Phase, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape to pad to. Logs a bucket miss, which may compile in live traffic."""
        if self._grids is None:
            self._usage.count_unpadded(phase, *shape[:2])
            return shape
        grid = self._grids.prompt if phase is Phase.PROMPT else self._grids.decode
        found = bucket = grid.find(shape)
        if bucket is None:
            self.bucket_misses += 1
            if self.forward_runner.refuse_cold:
                raise BucketMiss(f"{_describe_miss(phase, shape, grid)}, and {REFUSED}")
            bucket = grid.fallback(shape)
            logger.warning(
                "%s bucket miss: shape %s is past every bucket, padded to %s",
                phase.value,
                shape,
                bucket.shape,
            )
        if self._record_miss is not None and (phase, bucket) not in self._ready_buckets:
            self._record_miss(phase, bucket)
            bucket = self._ready_substitute(phase, bucket, grid)
        if self._capture is not None and bucket in self._never_used[phase]:
            # Once for each bucket: a graph that does not fit when it first comes is not captured.
            self._never_used[phase].discard(bucket)
            self._not_captured[phase, bucket] = None
        if found is not None:
            self._usage.count(phase, bucket.shape)
        return bucket.shape

    def _ready_substitute(self, phase: Phase, bucket: Bucket, grid: BucketGrid) -> Bucket:
        """The smallest warmed-up bucket that holds ``bucket`` and is not much larger, or itself."""
        size = _elements(bucket)
        larger = (
            candidate
            for candidate in grid.buckets
            if size < _elements(candidate) <= _MAX_OVERSIZE * size
            and all(map(operator.le, bucket.shape, candidate.shape))
            and (phase, candidate) in self._ready_buckets
        )
        return min(larger, key=_elements, default=bucket)


def _rounded(shape: RaggedShape, preceding: int = 0) -> RaggedShape:
    """``shape``, padded so that its tokens with the ``preceding`` ones fill `_TOKENS`.

    A batch of fewer tokens is not padded: decodes have these numbers, too.
    """
    tokens = preceding + shape.num_tokens
    if tokens > _TOKENS:
        tokens = ceil_div(tokens, _TOKENS) * _TOKENS
    return attrs.evolve(shape, num_tokens=tokens - preceding)


def _describe_miss(phase: Phase, shape: tuple[int, ...], grid: BucketGrid) -> str:
    """The batch that no bucket holds, and what sets the largest bucket, which is too small."""
    sizes = ", ".join(f"{axis} {size}" for axis, size in zip(grid.axes, shape, strict=True))
    message = f"no {phase.value.lower()} bucket holds a batch of {sizes}"
    for axis, size in zip(grid.axes, shape, strict=True):
        if size > grid.values(axis)[-1]:
            variable = f"VLLM_{phase.name}_{_VARIABLES[axis]}_BUCKET_MAX"
            return (
                f"{message} (the largest {axis} is {grid.values(axis)[-1]}: {variable}, or the "
                "bucket file)"
            )
    return message


_VARIABLES = {
    "batch": "BS",
    "query": "QUERY",
    "context_blocks": "CTX",
    "blocks": "BLOCK",
    "seq": "SEQ",
}


def _elements(bucket: Bucket) -> int:
    return math.prod(size or 1 for size in bucket.shape)
