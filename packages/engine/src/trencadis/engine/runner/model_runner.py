"""The model runner: executes a scheduled step, and warms up and captures buckets.

`BatchBuilder` makes the batches, each padded to a bucket.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs
import numpy as np
import torch

from trencadis.bucketing import Bucket
from trencadis.engine.api.outputs import PositionLogprobs
from trencadis.engine.devices import Device, PendingCopy
from trencadis.engine.errors import BucketMiss, ModelError
from trencadis.engine.runner.adapter_store import AdapterStore
from trencadis.engine.runner.batch_builder import Batch, BatchBuilder, Rows, Scheduled
from trencadis.engine.runner.block_moves import copy_blocks, copy_states
from trencadis.engine.runner.bucket_choice import BucketChoice
from trencadis.engine.runner.forward_runner import ForwardOutput, ForwardRunner
from trencadis.engine.runner.grids import Grids
from trencadis.engine.runner.model_input import first_rows
from trencadis.engine.runner.prompt_scorer import PendingPrompts, PromptScorer
from trencadis.engine.runner.sampling_rows import NO_TOKEN, PendingRows, Sampler
from trencadis.engine.runner.shapes import (
    BucketShape,
    ChunkSize,
    DecodeRead,
    PromptShape,
    RaggedShape,
)
from trencadis.engine.runner.step import (
    ChunkScores,
    PromptTargets,
    RowRequest,
    StepInput,
    StepResult,
)
from trencadis.kvcache import Direction, ceil_div
from trencadis.kvcache.tensors import KVCache
from trencadis.scheduler import Candidate, StepTiming
from trencadis.warmup import Phase

logger = logging.getLogger("trencadis.engine")

_NO_LOGITS = (
    "the model computed NaN, or every token is forbidden: check the checkpoint and its dtype, or "
    "the request's stop_token_ids with min_tokens"
)


@attrs.frozen(eq=False)
class _SampledBatch:
    """A batch, what is asked of each of its rows, and the sampling that was started."""

    sequences: Scheduled
    requests: Sequence[RowRequest | None]
    rows: PendingRows


@attrs.define(eq=False)
class ModelStep:
    """A step that the device may still be working on: a `PendingStep`.

    ``swap_s``: seconds that its swap transfers took, by direction. ``copy``: what the host reads of
    the results, the ``scored`` prompts first; None for nothing.
    """

    runner: ModelRunner
    step: StepInput
    began_s: float
    began_idle: bool
    swap_s: Mapping[Direction, float] = attrs.field(factory=dict)
    scored: list[PendingPrompts] = attrs.field(factory=list)
    sampled: list[_SampledBatch] = attrs.field(factory=list)
    failed: dict[int, Exception] = attrs.field(factory=dict)
    copy: PendingCopy | None = None

    def wait(self) -> StepResult:
        """See `PendingStep`. A sequence whose logits are not numbers has failed."""
        copies: Iterator[torch.Tensor] = iter(())
        if self.copy is not None:
            copies = iter(self.copy.wait())
            self.runner.device_is_idle |= self.runner.last_step == self.step.number
        # A step with decodes does not tell how long its prefill chunks took.
        tells_prompts = self.began_idle and bool(self.step.prompts) and not self.step.decodes
        timing = self._timing(tells_prompts) if self.swap_s or tells_prompts else None
        prompt_logprobs = self._read_prompts(copies) if self.scored else {}
        token_ids: dict[int, int] = {}
        logprobs: dict[int, PositionLogprobs] = {}
        embeddings: dict[int, bytes] = {}
        candidates: dict[int, Sequence[Candidate]] = {}
        for batch in self.sampled:
            rows = batch.rows.read([next(copies) for _ in batch.rows.outputs])
            for sequence, request, row in zip(batch.sequences, batch.requests, rows, strict=True):
                if request is None or sequence.seq_id in self.failed:
                    continue
                is_number = not any(math.isnan(logprob) for _, logprob in row.candidates)
                if not is_number or any(token.token_id == NO_TOKEN for token in row.tokens):
                    logger.error("Sequence %d: %s", sequence.seq_id, _NO_LOGITS)
                    self.failed[sequence.seq_id] = ModelError(_NO_LOGITS)
                elif request.num_candidates:
                    candidates[sequence.seq_id] = [Candidate(*token) for token in row.candidates]
                else:
                    seq_ids = (sequence.seq_id, *sequence.forks)
                    for seq_id, token in zip(seq_ids, row.tokens, strict=True):
                        token_ids[seq_id] = token.token_id
                        if token.logprobs is not None:
                            logprobs[seq_id] = token.logprobs
                        if token.embedding is not None:
                            embeddings[seq_id] = token.embedding
        return StepResult(
            token_ids=token_ids,
            logprobs=logprobs,
            embeddings=embeddings,
            candidates=candidates,
            prompt_logprobs=prompt_logprobs,
            failed=self.failed,
            timing=timing,
        )

    def _read_prompts(self, copies: Iterator[torch.Tensor]) -> dict[int, ChunkScores]:
        """The scores of prompt tokens. A sequence whose scores are not numbers has failed."""
        known: dict[int, ChunkScores] = {}
        for prompts in self.scored:
            known |= prompts.read([next(copies) for _ in prompts.outputs])
        for seq_id, scores in tuple(known.items()):
            if np.isnan(scores.values).any():
                logger.error("Sequence %d: %s", seq_id, _NO_LOGITS)
                self.failed[seq_id] = ModelError(_NO_LOGITS)
                del known[seq_id]
        return known

    def _timing(self, tells_prompts: bool) -> StepTiming:
        """The durations that are known now, when the host has read what the step computed."""
        compute_s = time.perf_counter() - self.began_s - sum(self.swap_s.values())
        return StepTiming(
            prompts_s=compute_s if tells_prompts and self.runner.device_is_idle else None,
            swap_out_s=self.swap_s.get(Direction.OUT),
            swap_in_s=self.swap_s.get(Direction.IN),
        )


class ModelRunner:
    """Executes steps on a model and a KV cache. Implements warm-up's ``GraphRuntime``.

    ``read`` says how decode reads the cache, as the decode grid assumes it. Without ``grids``,
    batches are not padded. ``scorer``: None for a model that does not generate.
    ``adapters``: those that steps name. ``divides_failed_batches``: see `run`; otherwise an error
    of a forward pass is that of the step, except `BucketMiss`.
    ``device_is_idle``: nothing runs that the host has not waited for. ``last_step``: the number of
    the last one with forward passes.
    """

    def __init__(
        self,
        forward_runner: ForwardRunner,
        sampler: Sampler,
        device: Device,
        cache: KVCache,
        grids: Grids | None,
        read: DecodeRead = DecodeRead.PREFIX,
        scorer: PromptScorer | None = None,
        *,
        divides_failed_batches: bool = True,
        adapters: AdapterStore | None = None,
    ) -> None:
        self._adapters = adapters
        self.forward_runner = forward_runner
        self._divides_failed_batches = divides_failed_batches
        if grids is not None:
            windows = forward_runner.windows
            grids = attrs.evolve(grids, windows=windows, block_size=cache.block_size)
        self.buckets = BucketChoice(forward_runner, cache, grids, read)
        self.batches = BatchBuilder(
            forward_runner, sampler, device.upload, cache, grids, read, self.buckets
        )
        self._sampler = sampler
        self.scorer = scorer
        self._device = device
        self.device_is_idle = True
        self.last_step = 0
        self._cache = cache
        self._grids = grids

    def use_cache(self, cache: KVCache) -> None:
        """Serve from another cache of the same layout, between two steps."""
        self._cache = cache
        self.batches.use_cache(cache)
        self.forward_runner.use_cache(cache)

    @torch.inference_mode()
    def run(self, step: StepInput) -> ModelStep:
        """Start a step: block copies, decodes, prefill chunks, sampling. See `Executor.execute`.

        First, graphs are captured of buckets whose first use was in an earlier step. A batch whose
        forward pass raises is divided until only the sequences fail that raise alone.
        """
        if self.buckets.not_captured:
            self.buckets.capture_used(passes_errors=not self._divides_failed_batches)
        began_s = time.perf_counter()
        step = self.batches.begin_step(step)
        pending = ModelStep(self, step, began_s, self.device_is_idle)
        self._device.begin_step()
        if step.moves:
            with self.forward_runner.count_compilations("block copy"):
                pending.swap_s = copy_blocks(step.moves, self._cache, self._device)
        if step.state_moves and self._cache.states is not None:
            states = self._cache.states
            with self.forward_runner.count_compilations("state copy"):
                pending.swap_s = copy_states(step.state_moves, states, self._device, pending.swap_s)
        if step.adapter_slots and self._adapters is not None:
            self._adapters.place(step.adapter_slots)
        if step.decodes or step.prompts:
            self.last_step, self.device_is_idle = step.number, self._device.shares_host_memory
            self._run_forward_passes(pending)
            self.batches.end_step()
            outputs = [tensor for prompts in pending.scored for tensor in prompts.outputs]
            outputs += [tensor for batch in pending.sampled for tensor in batch.rows.outputs]
            pending.copy = self._device.fetch(outputs) if outputs else None
        return pending

    def _run_forward_passes(self, step: ModelStep) -> None:
        decodes, prompts = step.step.decodes, step.step.prompts
        if not self.batches.pads_to_buckets:
            for part in self.batches.unpadded_parts((*decodes, *prompts)):
                self._run_divided(self.batches.unpadded_batches, part, step)
            return
        if decodes:
            self._run_divided(self.batches.decode_batches, decodes, step)
        if prompts:
            for chunks in self.batches.prompt_parts(prompts):
                self._run_divided(self.batches.prompt_batches, chunks, step)

    def pays_to_jump(self, start: int, num_forced: int, num_seqs: int) -> bool:
        """Whether a chunk of a token at ``start`` and ``num_forced`` more beats a step for each.

        It does where chunks share the forward pass of the decodes. Elsewhere it is one more pass,
        as long as a decode, for which all of the ``num_seqs`` sequences wait; it saves
        ``num_forced`` of the decodes that they share. No shape is made for it.
        """
        if not self.batches.pads_to_buckets:
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
        self._probed()

    def check_values(self) -> None:
        """As `probe`. Raises `ModelError` where the weights compute NaN."""
        # On the host: a device that compiles each operation would compile this one.
        if self._probed().cpu().isnan().any():
            raise ModelError(
                "the model computes NaN for a first token: its weights are damaged, or too large "
                "for the dtype. Check the checkpoint, or choose another dtype"
            )

    def _probed(self) -> torch.Tensor:
        """The logits of the smallest forward pass."""
        output = self.forward_runner.probe(self.batches.smallest_dummy())
        self._device.synchronize()
        self.device_is_idle = True
        return output.logits

    def _run_divided(
        self,
        make_batches: Callable[[Scheduled, Rows], Iterable[Batch]],
        scheduled: Scheduled,
        step: ModelStep,
    ) -> None:
        """Run and sample batches of ``scheduled``. If that raises, do so with each of its halves:
        an error ends only sequences that cause it."""
        try:
            launched = [
                self._run_batch(batch, step.step.targets, step.failed)
                for batch in make_batches(scheduled, step.step.rows)
            ]
        except Exception as error:
            if self.forward_runner.states is not None:
                self.forward_runner.states.drop()
            if not (self._divides_failed_batches or isinstance(error, BucketMiss)):
                raise
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
            if self.forward_runner.states is not None:
                # Not before: of the batches of a part that is repeated, some may have passed.
                self.forward_runner.states.commit()
            for scored, sampled in launched:
                step.scored += scored
                step.sampled += sampled
            return
        # After the except clause, so that the tensors in the frames of its traceback are freed.
        half = len(scheduled) // 2
        for part in (scheduled[:half], scheduled[half:]):
            self._run_divided(make_batches, part, step)

    def _run_batch(
        self, batch: Batch, targets: Mapping[int, PromptTargets], failed: dict[int, Exception]
    ) -> tuple[list[PendingPrompts], list[_SampledBatch]]:
        """Run a batch, start the scoring of its prompt tokens and its sampling.

        Nothing is read where no row is sampled and no token is scored.
        """
        computed = self.forward_runner.run(batch.input)
        scored: list[PendingPrompts] = []
        sampled: list[_SampledBatch] = []
        counting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.forward_runner.needs_warmup:
            cause = f"sampling {batch.input.shape.batch} rows"
            counting = self.forward_runner.count_compilations(cause)
        with counting:
            if targets:
                scored.extend(self._score_prompts(batch, computed, targets))
            if any(request is not None for request in batch.requests):
                rows: PendingRows | None = None
                try:
                    rows = self._sampler.launch(
                        computed.logits, computed.sampler_words, batch.requests
                    )
                except Exception as error:
                    logger.warning("Sampling failed (%s) and is repeated for each row", error)
                sampled = (
                    self._sample_each(batch, computed, failed)
                    if rows is None
                    else [_SampledBatch(batch.sequences, batch.requests, rows)]
                )
        return scored, sampled

    def _score_prompts(
        self, batch: Batch, computed: ForwardOutput, targets: Mapping[int, PromptTargets]
    ) -> Iterator[PendingPrompts]:
        of_batch = {
            sequence.seq_id: targets[sequence.seq_id]
            for sequence in batch.sequences
            if sequence.seq_id in targets
        }
        if of_batch:
            if self.scorer is None or computed.hidden is None:
                raise ModelError("this model computes no log-probabilities of a prompt")
            rows = first_rows(batch.sequences, batch.input.shape)
            yield self.scorer.launch(computed.hidden, rows, of_batch)

    def _sample_each(
        self, batch: Batch, computed: ForwardOutput, failed: dict[int, Exception]
    ) -> list[_SampledBatch]:
        """Sample each row alone: an error ends only the request that causes it."""
        sampled: list[_SampledBatch] = []
        for i, (sequence, request) in enumerate(zip(batch.sequences, batch.requests, strict=True)):
            if request is None:
                continue
            alone = [request if j == i else None for j in range(len(batch.requests))]
            try:
                # Those of the batch would write the tokens of all rows to their slots.
                words = self.batches.words(batch.sequences, alone, batch.input.shape.batch)
                uploaded = self._device.upload(torch.from_numpy(words))
                rows = self._sampler.launch(computed.logits, uploaded, alone)
            except Exception as error:
                logger.exception("Sampling sequence %d failed", sequence.seq_id)
                failed[sequence.seq_id] = error
            else:
                sampled.append(_SampledBatch(batch.sequences, alone, rows))
        return sampled

    # Warm-up's GraphRuntime. Dummy batches write to the padding block only.

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        """Compile for the bucket's shapes where the device compiles, and run each on dummy data.

        Leaves out a shape whose program serves any number of tokens and has run in another bucket;
        see `ForwardRunner.prepare`.
        """
        for shape in self.buckets.shapes(phase, bucket):
            self._device.begin_step()
            self._prepare(shape)

    def _prepare(self, shape: BucketShape) -> None:
        output = self.forward_runner.prepare(self.batches.dummy(shape))
        if output is not None and output.hidden is not None and self.scorer is not None:
            self.scorer.warm_up(output.hidden)

    def is_kept(self, phase: Phase, bucket: Bucket) -> bool:
        """Whether the compile cache has the programs of the bucket's shapes."""
        shapes = self.buckets.shapes(phase, bucket)
        return all(self.forward_runner.is_kept(self.batches.dummy(shape)) for shape in shapes)

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        """Capture the bucket's shapes as graphs, and replay each graph once.

        The replay makes a lazy device compile the copy of a batch into the graph's inputs, too.
        """
        for shape in self.buckets.shapes(phase, bucket):
            self.forward_runner.capture(self.batches.dummy(shape))
            self._prepare(shape)
        self.buckets.mark_captured(phase, bucket)

    def release(self, phase: Phase, bucket: Bucket) -> None:
        """Release the bucket's graphs."""
        self.buckets.mark_released(phase, bucket)
        for shape in self.buckets.shapes(phase, bucket):
            self.forward_runner.release(shape)

    def synchronize(self) -> None:
        self._device.synchronize()

    def free_memory(self) -> int:
        return self._device.free_memory()
