"""The runner of a simulated device: a scheduler's decision in, tokens out, and time has passed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import attrs

from trencadis.bucketing import Bucket, BucketGrid
from trencadis.engine.grids import Grids
from trencadis.engine.prompt_batches import split_prompts
from trencadis.engine.shapes import decode_shape, prompt_shape
from trencadis.engine.simulated.runtime import SimulatedRuntime
from trencadis.kvcache import CopyPlan, Direction
from trencadis.scheduler import ScheduledSequence, SchedulerOutput, StepTiming
from trencadis.warmup import Phase


@attrs.define
class Padding:
    """How many were needed, and how many there were after padding."""

    real: int = 0
    padded: int = 0

    def add(self, real: int, padded: int) -> None:
        self.real += real
        self.padded += padded

    @property
    def share(self) -> float:
        """Padding as a share of what was needed."""
        return self.padded / self.real - 1 if self.real else 0.0


class SimulatedRunner:
    """Executes steps as `ModelRunner` does, on a `SimulatedRuntime`.

    Tokens depend on ``seed``, the sequence's id and the position alone. Counted since the start:
    tokens of prompt forwards (``prompt_tokens``), rows and prefix blocks of decode forwards
    (``decode_rows``, ``decode_blocks``; ``longest_prefix`` is the most blocks of one), forwards
    past every bucket (``bucket_misses``), and the blocks and seconds of copies (``copied_blocks``,
    ``copy_s``). ``timing`` is that of the last
    step, for `Scheduler.update`; None where it has nothing to learn from.
    """

    def __init__(self, runtime: SimulatedRuntime, grids: Grids, seed: int = 0) -> None:
        self.prompt_tokens = Padding()
        self.decode_rows = Padding()
        self.decode_blocks = Padding()
        self.longest_prefix = 0
        self.bucket_misses = 0
        self.copied_blocks = dict.fromkeys(Direction, 0)
        self.copy_s = dict.fromkeys(Direction, 0.0)
        self.timing: StepTiming | None = None
        self._runtime = runtime
        self._grids = grids
        self._salt = seed * 0x9E3779B1
        self._vocab_size = runtime.costs.model.vocab_size
        self._block_size = runtime.costs.block_size

    def run(self, output: SchedulerOutput) -> dict[int, int]:
        """Carry a step out; the next token of each sequence that samples, by its id."""
        copy_s = self._carry_out(output.moves) if output.moves else {}
        if output.decodes:
            self._run_decodes(output.decodes)
        prompts_s = None
        if output.prompts:
            batches = split_prompts(output.prompts, self._prompt_cost)
            prompts_s = sum(map(self._run_prompts, batches))
        self.timing = None
        if copy_s or output.prompts:
            self.timing = StepTiming(
                prompts_s=prompts_s,
                swap_out_s=copy_s.get(Direction.OUT),
                swap_in_s=copy_s.get(Direction.IN),
            )
        return self._sample(output)

    def _carry_out(self, moves: CopyPlan) -> dict[Direction, float]:
        """Copies of a step, one batch after the other; seconds by direction."""
        seconds: dict[Direction, float] = {}
        for direction, copies in moves:
            took = self._runtime.copy_blocks(direction, len(copies))
            self.copied_blocks[direction] += len(copies)
            self.copy_s[direction] += took
            seconds[direction] = seconds.get(direction, 0.0) + took
        return seconds

    def _run_decodes(self, decodes: Sequence[ScheduledSequence]) -> None:
        exact = decode_shape(decodes)
        bucket = self._bucket(self._grids.decode, (exact.batch, exact.blocks))
        self.decode_rows.add(exact.batch, bucket.shape[0])
        self.decode_blocks.add(exact.blocks, bucket.shape[1])
        self.longest_prefix = max(self.longest_prefix, exact.blocks)
        self._runtime.forward(Phase.DECODE, bucket)

    def _run_prompts(self, chunks: Sequence[ScheduledSequence]) -> float:
        exact = prompt_shape(chunks, self._block_size)
        bucket = self._bucket(self._grids.prompt, (exact.batch, exact.query, exact.context_blocks))
        real = sum(len(chunk.token_ids) for chunk in chunks)
        self.prompt_tokens.add(real, bucket.shape[0] * bucket.shape[1])
        return self._runtime.forward(Phase.PROMPT, bucket)

    def _prompt_cost(self, chunks: Sequence[ScheduledSequence]) -> float | None:
        """Seconds on the device of these chunks as one forward."""
        exact = prompt_shape(chunks, self._block_size)
        found = self._grids.prompt.find((exact.batch, exact.query, exact.context_blocks))
        return None if found is None else self._runtime.device_s(Phase.PROMPT, found)

    def _bucket(self, grid: BucketGrid, shape: tuple[int, ...]) -> Bucket:
        found = grid.find(shape)
        if found is None:
            self.bucket_misses += 1
            found = grid.fallback(shape)
        return found

    def _sample(self, output: SchedulerOutput) -> dict[int, int]:
        tokens: dict[int, int] = {}
        for scheduled in chain(output.decodes, output.prompts):
            if not scheduled.samples:
                continue
            position = scheduled.start + len(scheduled.token_ids)
            tokens[scheduled.seq_id] = self._token(scheduled.seq_id, position)
            for fork in scheduled.forks:
                tokens[fork] = self._token(fork, position)
        if tokens:
            self._runtime.sample(len(tokens))
        return tokens

    def _token(self, seq_id: int, position: int) -> int:
        # Multiplying by large odd numbers spreads neighbours; the low bits of a product are poor.
        mixed = self._salt + seq_id * 0x85EBCA77 + position * 0xC2B2AE3D
        return (mixed >> 8) % self._vocab_size
