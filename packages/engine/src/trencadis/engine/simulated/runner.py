"""The executor of steps on a simulated device: takes time, computes no logits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import attrs

from trencadis.bucketing import Bucket, BucketGrid
from trencadis.engine.runner.grids import Grids
from trencadis.engine.runner.shapes import decode_size, prompt_shape, split_prompts
from trencadis.engine.runner.step import StepInput, StepResult
from trencadis.engine.simulated.cost_model import NOT_SHARED, Sharing
from trencadis.engine.simulated.runtime import SimulatedRuntime
from trencadis.kvcache import CopyPlan, Direction, lay_out
from trencadis.scheduler import ScheduledSequence, StepTiming
from trencadis.warmup import Phase


@attrs.define
class Padding:
    """Sizes before and after padding."""

    real: int = 0
    padded: int = 0

    def add(self, real: int, padded: int) -> None:
        """Add the sizes of a batch."""
        self.real += real
        self.padded += padded

    @property
    def share(self) -> float:
        """Padding relative to the real size."""
        return self.padded / self.real - 1 if self.real else 0.0


@attrs.frozen
class SimulatedStep:
    """A step whose result arrives ``at_s``."""

    result: StepResult
    runtime: SimulatedRuntime
    at_s: float

    def wait(self) -> StepResult:
        self.runtime.wait(self.at_s)
        return self.result


class SimulatedRunner:
    """Executes steps as an `Executor` does, on a `SimulatedRuntime`.

    Tokens depend only on ``seed``, sequence id and position. Counters since the start:
    ``prompt_tokens`` of prefill batches, ``decode_rows`` and ``decode_blocks`` (rows and prefix
    blocks of decode batches), ``longest_prefix`` in blocks, ``bucket_misses``, ``copied_blocks``
    and ``copy_s`` (seconds) by direction.
    """

    def __init__(self, runtime: SimulatedRuntime, grids: Grids, seed: int) -> None:
        self.prompt_tokens = Padding()
        self.decode_rows = Padding()
        self.decode_blocks = Padding()
        self.longest_prefix = 0
        self.bucket_misses = 0
        self.copied_blocks = dict.fromkeys(Direction, 0)
        self.copy_s = dict.fromkeys(Direction, 0.0)
        self._runtime = runtime
        self._grids = grids
        self._salt = seed * 0x9E3779B1
        self._vocab_size = runtime.costs.model.vocab_size
        self._block_size = runtime.costs.block_size

    def execute(self, step: StepInput) -> SimulatedStep:
        """Pass the time of a step. Every scheduled sequence that may sample does: ``rows`` are not
        read."""
        num_seqs = len(step.decodes) + len(step.prompts)
        if num_seqs:
            self._runtime.schedule(num_seqs)
        copy_s = self._copy_blocks(step.moves) if step.moves else {}
        if step.decodes:
            self._run_decodes(step.decodes)
        prompts_s = None
        if step.prompts:
            batches = split_prompts(step.prompts, self._prompt_cost)
            prompts_s = sum(map(self._run_prompts, batches))
        timing = None
        if copy_s or step.prompts:
            timing = StepTiming(
                prompts_s=prompts_s,
                swap_out_s=copy_s.get(Direction.OUT),
                swap_in_s=copy_s.get(Direction.IN),
            )
        token_ids = self._tokens(step)
        if token_ids:
            self._runtime.sample(len(token_ids))
        result = StepResult(token_ids=token_ids, timing=timing)
        return SimulatedStep(result, self._runtime, self._runtime.free_at_s)

    def _copy_blocks(self, moves: CopyPlan) -> dict[Direction, float]:
        """Copy blocks as planned; returns the seconds spent, by direction."""
        seconds: dict[Direction, float] = {}
        for direction, copies in moves:
            elapsed = self._runtime.copy_blocks(direction, len(copies))
            self.copied_blocks[direction] += len(copies)
            self.copy_s[direction] += elapsed
            seconds[direction] = seconds.get(direction, 0.0) + elapsed
        return seconds

    def _run_decodes(self, decodes: Sequence[ScheduledSequence]) -> None:
        batch, blocks = decode_size(decodes, self._grids.read, self._block_size)
        bucket = self._bucket(self._grids.decode, (batch, blocks))
        sharing = self._sharing(decodes, bucket.shape[1])
        if sharing.gathered > bucket.shape[1]:
            half = len(decodes) // 2
            self._run_decodes(decodes[:half])
            self._run_decodes(decodes[half:])
            return
        self.decode_rows.add(batch, bucket.shape[0])
        self.decode_blocks.add(blocks, bucket.shape[1])
        self.longest_prefix = max(self.longest_prefix, blocks)
        if sharing.gathered:
            sharing = Sharing(sharing.scored, bucket.shape[1])
        self._runtime.forward(Phase.DECODE, bucket, sharing)

    def _sharing(self, decodes: Sequence[ScheduledSequence], blocks: int) -> Sharing:
        """What a batch of a bucket with so many blocks reads more than once, before padding.

        As `BatchBuilder.decode_batches` of the engine.
        """
        most = self._runtime.num_shared_blocks
        if most is None or len(decodes) == 1:
            return NOT_SHARED
        tables = [decode.block_table for decode in decodes]
        tokens = [decode.start + 1 for decode in decodes]
        layout = lay_out(tables, tokens, self._block_size, blocks)
        if not layout.num_extra:
            return NOT_SHARED
        scored = min(blocks, most)
        if scored:
            layout = lay_out(tables, tokens, self._block_size, blocks, scored)
        return Sharing(scored, layout.num_extra)

    def _run_prompts(self, chunks: Sequence[ScheduledSequence]) -> float:
        exact = prompt_shape(chunks, self._block_size)
        bucket = self._bucket(self._grids.prompt, (exact.batch, exact.query, exact.context_blocks))
        real = sum(len(chunk.token_ids) for chunk in chunks)
        self.prompt_tokens.add(real, bucket.shape[0] * bucket.shape[1])
        return self._runtime.forward(Phase.PROMPT, bucket)

    def _prompt_cost(self, chunks: Sequence[ScheduledSequence]) -> float | None:
        """Seconds on the device of one forward pass for these chunks; None for a bucket miss."""
        exact = prompt_shape(chunks, self._block_size)
        bucket = self._grids.prompt.find((exact.batch, exact.query, exact.context_blocks))
        return None if bucket is None else self._runtime.device_s(Phase.PROMPT, bucket)

    def _bucket(self, grid: BucketGrid, shape: tuple[int, ...]) -> Bucket:
        bucket = grid.find(shape)
        if bucket is None:
            self.bucket_misses += 1
            bucket = grid.fallback(shape)
        return bucket

    def _tokens(self, step: StepInput) -> dict[int, int]:
        tokens: dict[int, int] = {}
        for scheduled in chain(step.decodes, step.prompts):
            if not scheduled.samples:
                continue
            position = scheduled.start + len(scheduled.token_ids)
            tokens[scheduled.seq_id] = self._token(scheduled.seq_id, position)
            for fork in scheduled.forks:
                tokens[fork] = self._token(fork, position)
        return tokens

    def _token(self, seq_id: int, position: int) -> int:
        # Multiplicative hashing. The low bits of a product are not random enough.
        mixed = self._salt + seq_id * 0x85EBCA77 + position * 0xC2B2AE3D
        return (mixed >> 8) % self._vocab_size
