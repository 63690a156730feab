"""A model and a cache made of dictionaries, to run schedulers on in tests.

What the model sees is what the moves and the block tables brought to where it looks, not what a
sequence believes: a block that is lost, mixed up or overwritten changes the tokens that follow.
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


def next_token(tokens: Sequence[int], sample: int) -> int:
    """A token that depends on every token before it, and on which sample it is for."""
    return hash((*tokens, 1000 + sample)) % VOCABULARY


def top_tokens(tokens: Sequence[int], count: int) -> tuple[Candidate, ...]:
    """The most probable next tokens; no two log-probabilities are equal."""
    scored = [
        Candidate(token, -(hash((*tokens, token)) % 100_003) / 20_000 - token * 1e-7)
        for token in range(VOCABULARY)
    ]
    return tuple(sorted(scored, key=lambda one: -one.logprob)[:count])


@attrs.define
class Memory:
    """Device and host blocks: what token is where."""

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
    """Carries out steps. ``sample_of`` tells which sample of its request a sequence is."""

    scheduler: Scheduler
    memory: Memory
    sample_of: dict[int, int] = attrs.field(factory=dict)

    def add(self, request: Request) -> SequenceGroup:
        group = self.scheduler.add(request).group
        self.sample_of.update({one.seq_id: i for i, one in enumerate(group.live)})
        return group

    def step(self) -> tuple[SchedulerOutput, tuple[SequenceUpdate, ...]]:
        output = self.scheduler.schedule()
        return output, self.finish(output)

    def finish(self, output: SchedulerOutput) -> tuple[SequenceUpdate, ...]:
        """Compute a step that has been scheduled."""
        self.memory.carry_out(output)
        sampled: dict[int, int] = {}
        logprobs: dict[int, float] = {}
        candidates: dict[int, tuple[Candidate, ...]] = {}
        size, device = self.memory.block_size, self.memory.device
        for one in (*output.decodes, *output.prompts):
            table = [int(block) for block in one.block_table]
            context = tuple(device[table[i // size], i % size] for i in range(one.start))
            for position, token in enumerate(one.token_ids, one.start):
                assert table[position // size] != 0, "the padding block is nobody's"
                device[table[position // size], position % size] = token
            seen = (*context, *one.token_ids)
            if one.samples and one.num_candidates:
                candidates[one.seq_id] = top_tokens(seen, one.num_candidates)
                continue
            for seq_id in one.sample_ids:
                sampled[seq_id] = next_token(seen, self.sample_of[seq_id])
                logprobs[seq_id] = -(sampled[seq_id] % 7) / 3
        return self.scheduler.update(output, sampled, logprobs=logprobs, candidates=candidates)

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"there is still work after {max_steps} steps")


def outcome(group: SequenceGroup) -> list[tuple[tuple[int, ...], FinishReason | None]]:
    """What the client gets."""
    return [(tuple(one.output_token_ids), one.finish_reason) for one in group.results]


def alone(
    request: Request, max_model_len: int
) -> list[tuple[tuple[int, ...], FinishReason | None]]:
    """What a request gets with a machine to itself, each prompt in one piece."""
    blocks = BlockManager(CacheConfig(num_blocks=4000, block_size=4, enable_prefix_caching=False))
    config = SchedulerConfig(
        max_num_seqs=request.num_seqs, max_num_batched_tokens=4096, max_model_len=max_model_len
    )
    runner = Runner(Scheduler(config, blocks), Memory(4))
    group = runner.add(request)
    runner.run()
    return outcome(group)
