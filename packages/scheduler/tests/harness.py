"""A model and a KV cache made of dictionaries, to test schedulers.

The model reads its context through the moves and the block tables, not from the sequences. So a
block that is lost, exchanged or overwritten changes the tokens that follow.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trencadis.kvcache import BlockManager, CacheConfig, Direction
from trencadis.scheduler import (
    Candidate,
    FinishReason,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    SequenceUpdate,
)

VOCABULARY = 17
STOP = 3


def num_scheduled_tokens(output: SchedulerOutput) -> int:
    """Tokens that a step computes, without padding."""
    return sum(len(scheduled.token_ids) for scheduled in (*output.prompts, *output.decodes))


def next_token(tokens: Sequence[int], sample: int) -> int:
    """A token that depends on every token before it and on the index of the sample."""
    return hash((*tokens, 1000 + sample)) % VOCABULARY


def top_tokens(tokens: Sequence[int], count: int) -> tuple[Candidate, ...]:
    """The most probable next tokens; no two log-probabilities are equal."""
    scored = [
        Candidate(token, -(hash((*tokens, token)) % 100_003) / 20_000 - token * 1e-7)
        for token in range(VOCABULARY)
    ]
    return tuple(sorted(scored, key=lambda candidate: -candidate.logprob)[:count])


@attrs.define
class Memory:
    """The KV cache: which token each slot of the device and host blocks holds."""

    block_size: int
    device: dict[tuple[int, int], int] = attrs.field(factory=dict)
    host: dict[tuple[int, int], int] = attrs.field(factory=dict)

    def carry_out(self, output: SchedulerOutput) -> None:
        spaces = {
            Direction.WITHIN: (self.device, self.device),
            Direction.OUT: (self.device, self.host),
            Direction.IN: (self.host, self.device),
        }
        for direction, copies in output.moves:
            source, target = spaces[direction]
            read = [
                {i: source[copy.src, i] for i in range(self.block_size) if (copy.src, i) in source}
                for copy in copies
            ]
            for copy, content in zip(copies, read, strict=True):
                for i in range(self.block_size):
                    target.pop((copy.dst, i), None)
                target.update({(copy.dst, i): token for i, token in content.items()})


@attrs.define
class Runner:
    """Executes steps. ``sample_of``: the index of each sample in its request, by sequence id."""

    scheduler: Scheduler
    memory: Memory
    sample_of: dict[int, int] = attrs.field(factory=dict)

    def add(self, request: Request) -> SequenceGroup:
        group = self.scheduler.add(request).group
        self.sample_of.update(
            {sequence.seq_id: i for i, sequence in enumerate(group.unfinished_seqs)}
        )
        return group

    def step(self) -> tuple[SchedulerOutput, tuple[SequenceUpdate, ...]]:
        output = self.scheduler.schedule()
        return output, self.finish(output)

    def finish(self, output: SchedulerOutput) -> tuple[SequenceUpdate, ...]:
        """Execute a scheduled step."""
        self.memory.carry_out(output)
        sampled: dict[int, int] = {}
        logprobs: dict[int, float] = {}
        candidates: dict[int, tuple[Candidate, ...]] = {}
        size, device = self.memory.block_size, self.memory.device
        for scheduled in (*output.decodes, *output.prompts):
            table = [int(block) for block in scheduled.block_table]
            context = tuple(device[table[i // size], i % size] for i in range(scheduled.start))
            for position, token in enumerate(scheduled.token_ids, scheduled.start):
                assert table[position // size] != 0, "no sequence has the padding block"
                device[table[position // size], position % size] = token
            seen = (*context, *scheduled.token_ids)
            if scheduled.samples and scheduled.num_candidates:
                candidates[scheduled.seq_id] = top_tokens(seen, scheduled.num_candidates)
                continue
            for seq_id in scheduled.sample_ids:
                sampled[seq_id] = next_token(seen, self.sample_of[seq_id])
                logprobs[seq_id] = -(sampled[seq_id] % 7) / 3
        return self.scheduler.update(output, sampled, logprobs=logprobs, candidates=candidates)

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"requests are unfinished after {max_steps} steps")


def outcome(group: SequenceGroup) -> list[tuple[tuple[int, ...], FinishReason | None]]:
    """The tokens and finish reason of each result."""
    return [
        (tuple(sequence.output_token_ids), sequence.finish_reason) for sequence in group.results
    ]


def alone(
    request: Request, max_model_len: int
) -> list[tuple[tuple[int, ...], FinishReason | None]]:
    """The outcome of a request that runs alone, with its prompt in one chunk."""
    blocks = BlockManager(CacheConfig(num_blocks=4000, block_size=4, enable_prefix_caching=False))
    config = SchedulerConfig(
        max_num_seqs=request.num_seqs, max_num_batched_tokens=4096, max_model_len=max_model_len
    )
    runner = Runner(Scheduler(config, blocks), Memory(4))
    group = runner.add(request)
    runner.run()
    return outcome(group)
