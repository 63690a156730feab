"""The model runner: a scheduler's decision in, logits out, every forward in a bucket's shape."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from trencadis.bucketing import Bucket, BucketGrid
from trencadis.engine.devices import Device
from trencadis.engine.runner.background_warmup import BackgroundWarmupLoop
from trencadis.engine.runner.block_moves import carry_out
from trencadis.engine.runner.forward_runner import ForwardRunner
from trencadis.engine.runner.grids import Grids
from trencadis.engine.runner.model_input import (
    ModelInput,
    build_decode,
    build_prompt,
    lay_out_decodes,
)
from trencadis.engine.runner.prompt_batches import split_prompts
from trencadis.engine.runner.shapes import (
    DecodeShape,
    ForwardShape,
    PromptShape,
    decode_shape,
    prompt_shape,
)
from trencadis.kvcache import Direction
from trencadis.kvcache.tensors import KVCache
from trencadis.scheduler import ScheduledSequence, SchedulerOutput
from trencadis.warmup import Phase

logger = logging.getLogger("trencadis.engine")

_FORWARD_COST = 32.0
"""Cost of one more forward in padded tokens: what its launches cost on the CPU, roughly."""

_MOST_PADDING = 4
"""Times that a ready bucket may be larger than a cold one, to run in its stead."""

Scheduled = Sequence[ScheduledSequence]


@attrs.frozen(eq=False)
class StepLogits:
    """Logits ``[len(seq_ids), vocabulary]`` of the sequences that sample in this step.

    ``swap_s`` is what its swaps took, in seconds.
    """

    seq_ids: tuple[int, ...]
    logits: torch.Tensor
    swap_s: Mapping[Direction, float]


class ModelRunner:
    """Executes steps on a model and a KV cache. Implements warm-up's ``GraphRuntime``.

    Without ``grids`` every forward has its exact shape. ``padded_tokens`` and ``bucket_misses``
    count since the start; a miss is a forward larger than every bucket.
    """

    def __init__(
        self, forwards: ForwardRunner, device: Device, cache: KVCache, grids: Grids | None
    ) -> None:
        self.forward_runner = forwards
        self.padded_tokens = 0
        self.bucket_misses = 0
        self._device = device
        self._cache = cache
        self._grids = grids
        self._readiness: BackgroundWarmupLoop | None = None

    def prefer_ready(self, readiness: BackgroundWarmupLoop) -> None:
        """Let a batch whose bucket is not ready yet use a larger one that is."""
        self._readiness = readiness

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> StepLogits:
        """Compute a step; what it writes to the cache is there when this returns."""
        seq_ids: list[int] = []
        logits: list[torch.Tensor] = []
        swap_s: Mapping[Direction, float] = {}
        if output.moves:
            with self.forward_runner.watched("moving blocks"):
                swap_s = carry_out(output.moves, self._cache, self._device)
        if output.decodes:
            for decodes, batch in self._decode_batches(output.decodes):
                self._collect(decodes, self.forward_runner.run(batch), seq_ids, logits)
        for chunks in split_prompts(output.prompts, self._prompt_cost):
            batch = self._prompt_batch(chunks)
            self._collect(chunks, self.forward_runner.run(batch), seq_ids, logits)
        rows = torch.cat(logits) if logits else torch.empty(0)
        return StepLogits(tuple(seq_ids), rows, swap_s)

    # Warm-up's GraphRuntime. Dummy batches write to the padding block alone.

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        """Make the bucket's shapes ready, and run them once."""
        for shape in self._shapes(phase, bucket):
            self.forward_runner.prepare(self._dummy(shape))

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        """Record the bucket's shapes as graphs, and replay each once.

        A lazy device also compiles what copies a batch into the graph's own inputs.
        """
        for shape in self._shapes(phase, bucket):
            self.forward_runner.capture(self._dummy(shape))
            self.forward_runner.prepare(self._dummy(shape))

    def release(self, phase: Phase, bucket: Bucket) -> None:
        """Forget the bucket's graphs."""
        for shape in self._shapes(phase, bucket):
            self.forward_runner.release(shape)

    def synchronize(self) -> None:
        self._device.synchronize()

    def free_memory(self) -> int:
        return self._device.free_memory()

    def _shapes(self, phase: Phase, bucket: Bucket) -> list[ForwardShape]:
        """The shapes that traffic of a bucket has: decoding, with and without shared blocks."""
        if phase is Phase.PROMPT:
            return [PromptShape(*bucket.shape)]
        shape = self._decode_shape(*bucket.shape)
        if shape.batch == 1 or not self.forward_runner.fixed_shapes:
            return [shape]
        return [shape, attrs.evolve(shape, extra=shape.blocks)]

    def _dummy(self, shape: ForwardShape) -> ModelInput:
        cache, device = self._cache, self._device.torch_device
        if isinstance(shape, PromptShape):
            return build_prompt((), shape, cache, device)
        layout = lay_out_decodes((), shape.blocks, cache.block_size)
        return build_decode((), layout, shape, cache, device)

    # Batches.

    def _prompt_batch(self, chunks: Scheduled) -> ModelInput:
        exact = prompt_shape(chunks, self._cache.block_size)
        bucket = self._bucket(Phase.PROMPT, (exact.batch, exact.query, exact.context_blocks))
        shape = PromptShape(*bucket)
        self.padded_tokens += shape.batch * shape.query - sum(len(c.token_ids) for c in chunks)
        return build_prompt(chunks, shape, self._cache, self._device.torch_device)

    def _decode_batches(self, decodes: Scheduled) -> Iterator[tuple[Scheduled, ModelInput]]:
        """One forward for all; several where they share more blocks than one has room for."""
        exact = decode_shape(decodes)
        shape = self._decode_shape(*self._bucket(Phase.DECODE, (exact.batch, exact.blocks)))
        layout = lay_out_decodes(decodes, shape.blocks, self._cache.block_size)
        if self.forward_runner.fixed_shapes and layout.num_extra > shape.blocks:
            half = len(decodes) // 2
            yield from self._decode_batches(decodes[:half])
            yield from self._decode_batches(decodes[half:])
            return
        self.padded_tokens += shape.batch - len(decodes)
        shape = attrs.evolve(shape, extra=self._room_for(layout.num_extra, shape.blocks))
        yield (
            decodes,
            build_decode(decodes, layout, shape, self._cache, self._device.torch_device),
        )

    def _decode_shape(self, batch: int, blocks: int) -> DecodeShape:
        # A bucket may ask for more blocks than the cache has; there are none to read past it.
        return DecodeShape(batch, min(blocks, self._cache.num_blocks))

    def _room_for(self, pairs: int, blocks: int) -> int:
        """Shared (block, sequence) pairs to gather: as many as there are blocks, where shapes have
        to be made ready; the next power of two from 8 on elsewhere."""
        if not pairs:
            return 0
        return blocks if self.forward_runner.fixed_shapes else max(8, 1 << (pairs - 1).bit_length())

    def _prompt_cost(self, chunks: Scheduled) -> float | None:
        """Padded tokens of these chunks as one forward, and the price of a forward."""
        exact = prompt_shape(chunks, self._cache.block_size)
        batch, query = exact.batch, exact.query
        if self._grids is not None:
            found = self._grids.prompt.find((batch, query, exact.context_blocks))
            if found is None:
                return None
            batch, query = found.shape[:2]
        return batch * query + _FORWARD_COST

    def _bucket(self, phase: Phase, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape to pad to. One past every bucket is logged: it may compile in live traffic."""
        if self._grids is None:
            return shape
        grid = self._grids.prompt if phase is Phase.PROMPT else self._grids.decode
        found = grid.find(shape)
        if found is None:
            found = grid.fallback(shape)
            self.bucket_misses += 1
            logger.warning(
                "%s shape %s is past every bucket: padded to %s", phase.value, shape, found.shape
            )
        return self._ready_one(phase, found, grid).shape

    def _ready_one(self, phase: Phase, bucket: Bucket, grid: BucketGrid) -> Bucket:
        """The bucket, or one not much larger that is ready where it is not."""
        readiness = self._readiness
        if readiness is None or readiness.is_ready(phase, bucket):
            return bucket
        readiness.want(phase, bucket)
        size = _elements(bucket)
        larger = (
            one
            for one in grid.buckets
            if size < _elements(one) <= _MOST_PADDING * size
            and all(map(operator.le, bucket.shape, one.shape))
            and readiness.is_ready(phase, one)
        )
        return min(larger, key=_elements, default=bucket)

    @staticmethod
    def _collect(
        scheduled: Scheduled,
        rows: torch.Tensor,
        seq_ids: list[int],
        logits: list[torch.Tensor],
    ) -> None:
        """Keep the logits of those that sample."""
        wanted = [i for i, sequence in enumerate(scheduled) if sequence.samples]
        seq_ids.extend(scheduled[i].seq_id for i in wanted)
        if len(wanted) == len(scheduled):
            logits.append(rows)
        elif wanted:
            logits.append(rows[wanted])


def _elements(bucket: Bucket) -> int:
    return math.prod(size or 1 for size in bucket.shape)
