"""The model runner: a scheduler's decision in, logits out, every forward in a bucket's shape."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs
import torch
from torch import nn

from trencadis.bucketing import Bucket
from trencadis.engine.batch import ModelInput, build_decode, build_prompt
from trencadis.engine.devices import Device
from trencadis.engine.grids import Grids
from trencadis.engine.prompt_batches import split_prompts
from trencadis.engine.shapes import DecodeShape, PromptShape, decode_shape, prompt_shape
from trencadis.kvcache.tensors import KVCache
from trencadis.scheduler import ScheduledSequence, SchedulerOutput
from trencadis.warmup import Phase

logger = logging.getLogger("trencadis.engine")

_FORWARD_COST = 32.0
"""Cost of one more forward in padded tokens: what its launches cost on the CPU, roughly."""


@attrs.frozen(eq=False)
class StepLogits:
    """Logits ``[len(seq_ids), vocabulary]`` of the sequences that sample in this step."""

    seq_ids: tuple[int, ...]
    logits: torch.Tensor


class ModelRunner:
    """Executes steps on a model and a KV cache. Implements warm-up's ``Runtime``.

    Without ``grids`` every forward has its exact shape. ``padded_tokens`` and ``bucket_misses``
    count since the start; a miss is a forward larger than every bucket.
    """

    def __init__(
        self, model: nn.Module, device: Device, cache: KVCache, grids: Grids | None
    ) -> None:
        self._model = model
        self._device = device
        self._cache = cache
        self._grids = grids
        self.padded_tokens = 0
        self.bucket_misses = 0

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> StepLogits:
        """Compute a step; what it writes to the cache is there when this returns."""
        seq_ids: list[int] = []
        logits: list[torch.Tensor] = []
        if output.moves:
            self._cache.carry_out(output.moves)
            self._cache.wait()
        if output.decodes:
            self._collect(output.decodes, self._run_decodes(output.decodes), seq_ids, logits)
        for chunks in split_prompts(output.prompts, self._prompt_cost):
            self._collect(chunks, self._run_prompts(chunks), seq_ids, logits)
        return StepLogits(tuple(seq_ids), torch.cat(logits) if logits else torch.empty(0))

    # Warm-up's Runtime.

    @torch.inference_mode()
    def execute(self, phase: Phase, bucket: Bucket) -> None:
        """Run a dummy batch of this bucket; it writes to the padding block alone."""
        if phase is Phase.PROMPT:
            shape = PromptShape(*bucket.shape)
            self._forward(build_prompt((), shape, self._cache, self._device.torch_device))
        else:
            decode = DecodeShape(*bucket.shape)
            self._forward(build_decode((), decode, self._cache, self._device.torch_device))

    def synchronize(self) -> None:
        self._device.synchronize()

    def free_memory(self) -> int:
        return self._device.free_memory()

    # Forwards.

    def _run_prompts(self, chunks: Sequence[ScheduledSequence]) -> torch.Tensor:
        exact = prompt_shape(chunks, self._cache.block_size)
        bucket = self._bucket(Phase.PROMPT, (exact.batch, exact.query, exact.context_blocks))
        shape = PromptShape(*bucket)
        self.padded_tokens += shape.batch * shape.query - sum(len(c.token_ids) for c in chunks)
        return self._forward(build_prompt(chunks, shape, self._cache, self._device.torch_device))

    def _run_decodes(self, decodes: Sequence[ScheduledSequence]) -> torch.Tensor:
        exact = decode_shape(decodes)
        shape = DecodeShape(*self._bucket(Phase.DECODE, (exact.batch, exact.blocks)))
        # A bucket may ask for more blocks than the cache has; there are none to read past it.
        shape = DecodeShape(shape.batch, min(shape.blocks, self._cache.num_blocks))
        self.padded_tokens += shape.batch - len(decodes)
        return self._forward(build_decode(decodes, shape, self._cache, self._device.torch_device))

    def _forward(self, batch: ModelInput) -> torch.Tensor:
        out = self._model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            paged=batch.paged,
        )
        logits: torch.Tensor = out.logits[0, : batch.num_rows]
        return logits

    def _prompt_cost(self, chunks: Sequence[ScheduledSequence]) -> float | None:
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
        return found.shape

    @staticmethod
    def _collect(
        scheduled: Sequence[ScheduledSequence],
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
