"""The model runner: executes a scheduled step, and warms up and captures buckets.

`BatchBuilder` makes the batches, each padded to a bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from trencadis.bucketing import Bucket
from trencadis.engine.api.inspection import GridUsage
from trencadis.engine.devices import Device, PendingCopy
from trencadis.engine.errors import BucketMiss, ModelError
from trencadis.engine.runner.batch_builder import BatchBuilder, Scheduled, requests_of
from trencadis.engine.runner.block_moves import copy_blocks
from trencadis.engine.runner.bucket_choice import BucketChoice, RecordMiss
from trencadis.engine.runner.forward_runner import ForwardOutput, ForwardRunner
from trencadis.engine.runner.grids import Grids
from trencadis.engine.runner.model_input import ModelInput
from trencadis.engine.runner.recorded_traffic import TrafficLog
from trencadis.engine.runner.sampling_rows import (
    NOTHING,
    PendingRows,
    RowRequest,
    RowResult,
    Sampler,
)
from trencadis.engine.runner.shapes import ChunkSize, DecodeRead, PromptShape, RaggedShape
from trencadis.kvcache import Direction, ceil_div
from trencadis.kvcache.tensors import KVCache
from trencadis.scheduler import SchedulerOutput
from trencadis.warmup import GraphCapture, Phase

logger = logging.getLogger("trencadis.engine")

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

        A sequence whose logits are not numbers is added to ``failed`` and has no result.
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
    batches are not padded.
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
        self._sampler = sampler
        self._device = device
        self._device_is_idle = True
        self._cache = cache
        self._grids = grids
        self._buckets = BucketChoice(forward_runner, cache, grids, read)
        self._batches = BatchBuilder(
            forward_runner, sampler, device.upload, cache, grids, read, self._buckets
        )

    @property
    def padded_tokens(self) -> int:
        """Padding in the tokens of all forward passes since the start."""
        return self._batches.padded_tokens

    @property
    def bucket_misses(self) -> int:
        """Batches larger than every bucket, since the start."""
        return self._buckets.num_misses

    @property
    def num_graphs(self) -> int:
        """Graphs that are captured now; a decode bucket may have two."""
        return self.forward_runner.num_graphs

    @property
    def num_ready_buckets(self) -> int:
        """Buckets that are ready: warmed up, or compiled by live traffic."""
        return self._buckets.num_ready

    @property
    def grid_usage(self) -> tuple[GridUsage, ...]:
        """The state and the hits of the buckets of both phases."""
        return self._buckets.usage(is_padded=self._batches.pads_to_buckets)

    def use_cache(self, cache: KVCache) -> None:
        """Serve from another cache of the same layout, between two steps."""
        self._cache = cache
        self._batches.use_cache(cache)
        self.forward_runner.use_cache(cache)

    def prefer_ready_buckets(self, record_miss: RecordMiss) -> None:
        """Let a batch whose bucket is not ready use a larger one that is.

        Calls ``record_miss`` for each batch whose own bucket was not ready yet.
        """
        self._buckets.prefer_ready(record_miss)

    def record_traffic(self, traffic: TrafficLog) -> None:
        """Record the shapes of all batches from now on."""
        self._buckets.record_traffic(traffic)

    def capture_in_traffic(self, capture: GraphCapture) -> None:
        """Capture the graphs of the buckets that live traffic uses, after their first use."""
        self._buckets.capture_in_traffic(capture)

    def capture_used_buckets(self) -> None:
        """Capture the graphs of buckets that were used first since the last call.

        Call it between two steps. After an error no more graphs are captured; serving goes on.
        """
        self._buckets.capture_used()

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
        self._run_forward_passes(output, step)
        outputs = step.outputs
        began_idle, self._device_is_idle = self._device_is_idle, self._ends_idle(output, outputs)
        is_timed = began_idle and self._device_is_idle
        copy = self._device.fetch(outputs)
        return PendingStep(swap_s, step.failed, is_timed, step.sampled, copy)

    def _run_forward_passes(self, output: SchedulerOutput, step: _StepInProgress) -> None:
        if self._batches.pads_to_buckets:
            if output.decodes:
                self._run_divided(self._run_decodes, output.decodes, step)
            if output.prompts:
                for chunks in self._batches.prompt_parts(output.prompts):
                    self._run_divided(self._run_prompts, chunks, step)
        elif output.decodes or output.prompts:
            for part in self._batches.unpadded_parts((*output.decodes, *output.prompts)):
                self._run_divided(self._run_together, part, step)

    def pays_to_jump(self, start: int, num_forced: int, num_seqs: int) -> bool:
        """Whether a chunk of a token at ``start`` and ``num_forced`` more beats a step for each.

        It does where chunks share the forward pass of the decodes. Elsewhere it is one more pass,
        as long as a decode, for which all of the ``num_seqs`` sequences wait; it saves
        ``num_forced`` of the decodes that they share. No shape is made for it.
        """
        if not self._batches.pads_to_buckets:
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
        padded = self._grids.padded_prompt(bucket.shape, exact)
        return not self.forward_runner.needs_warmup or self.forward_runner.is_warm(padded)

    def probe(self) -> None:
        """Run the smallest forward pass on the padding block. Raises if the device has failed."""
        self.forward_runner.run(self._batches.smallest_dummy())
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
                    logger.warning("Sequence %d is rejected: %s", scheduled[0].seq_id, error)
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
        for part, batch in self._batches.decode_batches(decodes, step.requests):
            sampled.extend(self._run_batch(part, batch, step))
        step.sampled.extend(sampled)

    def _run_together(self, scheduled: Scheduled, step: _StepInProgress) -> None:
        """Decodes and prefill chunks in one forward pass: the weights are read once."""
        decodes = [sequence for sequence in scheduled if len(sequence.token_ids) == 1]
        chunks = [sequence for sequence in scheduled if len(sequence.token_ids) > 1]
        if not chunks:
            self._run_decodes(decodes, step)
        elif not decodes:
            self._run_prompts(chunks, step)
        else:
            batch = self._batches.mixed_batch(decodes, chunks, step.requests)
            step.sampled.extend(self._run_batch([*decodes, *chunks], batch, step))

    def _run_prompts(self, chunks: Scheduled, step: _StepInProgress) -> None:
        batch = self._batches.prompt_batch(chunks, step.requests)
        step.sampled.extend(self._run_batch(chunks, batch, step))

    def _run_batch(
        self, sequences: Scheduled, batch: ModelInput, step: _StepInProgress
    ) -> list[_SampledBatch]:
        """Run a batch and start its sampling; nothing is read where no row is sampled."""
        computed = self.forward_runner.run(batch)
        requests = requests_of(sequences, step.requests)
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
            alone = [request if j == i else NOTHING for j in range(len(requests))]
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
        for shape in self._buckets.shapes(phase, bucket):
            self._device.begin_step()
            self.forward_runner.prepare(self._batches.dummy(shape))

    def is_kept(self, phase: Phase, bucket: Bucket) -> bool:
        """Whether the compile cache has the programs of the bucket's shapes."""
        shapes = self._buckets.shapes(phase, bucket)
        return all(self.forward_runner.is_kept(self._batches.dummy(shape)) for shape in shapes)

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        """Capture the bucket's shapes as graphs, and replay each graph once.

        The replay makes a lazy device compile the copy of a batch into the graph's inputs, too.
        """
        for shape in self._buckets.shapes(phase, bucket):
            self.forward_runner.capture(self._batches.dummy(shape))
            self.forward_runner.prepare(self._batches.dummy(shape))
        self._buckets.mark_captured(phase, bucket)

    def release(self, phase: Phase, bucket: Bucket) -> None:
        """Release the bucket's graphs."""
        self._buckets.mark_released(phase, bucket)
        for shape in self._buckets.shapes(phase, bucket):
            self.forward_runner.release(shape)

    def synchronize(self) -> None:
        self._device.synchronize()

    def free_memory(self) -> int:
        return self._device.free_memory()
