"""A model and a KV cache made of dictionaries, to test schedulers.

The model reads its context through the moves and the block tables, not from the sequences. So a
block that is lost, exchanged or overwritten changes the tokens that follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.kvcache import (
    PADDING_BLOCK,
    PADDING_SLOT,
    BlockManager,
    CacheConfig,
    Direction,
    ceil_div,
)
from trencadis.scheduler import (
    PENDING_TOKEN,
    Candidate,
    FinishReason,
    Request,
    ScheduledSequence,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    SequenceUpdate,
)

POLICY_SETTINGS = {"power": {"budget_w": 500.0}, "two_phase": {"budget_w": 500.0}}
"""Settings of thermal policies that limit something only with these."""

VOCABULARY = 17
STOP = 3


def num_scheduled_tokens(output: SchedulerOutput) -> int:
    """Tokens that a step computes, without padding."""
    return sum(len(scheduled.token_ids) for scheduled in (*output.prompts, *output.decodes))


def next_token(tokens: Sequence[int], sample: int, vocabulary: int = VOCABULARY) -> int:
    """A token that depends on every token before it and on the index of the sample."""
    return hash((*tokens, 1000 + sample)) % vocabulary


def logprob_of(token: int) -> float:
    """The log-probability of a sampled token."""
    return -(token % 7) / 3


def top_tokens(tokens: Sequence[int], count: int) -> tuple[Candidate, ...]:
    """The most probable next tokens; no two log-probabilities are equal."""
    scored = [
        Candidate(token, -(hash((*tokens, token)) % 100_003) / 20_000 - token * 1e-7)
        for token in range(VOCABULARY)
    ]
    return tuple(sorted(scored, key=lambda candidate: -candidate.logprob)[:count])


Block = list[int | None]


class Memory:
    """The KV cache: the token of each slot of the device and host blocks; None before a write.

    And the states in their slots: the tokens that each has taken in, in order.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.device: defaultdict[int, Block] = defaultdict(self._unwritten)
        self.host: defaultdict[int, Block] = defaultdict(self._unwritten)
        self.states: dict[int, tuple[int, ...]] = {}
        self.host_states: dict[int, tuple[int, ...]] = {}

    def carry_out(self, output: SchedulerOutput) -> None:
        """Copy blocks: the copies of one entry of the plan read everything before they write."""
        device, host = self.device, self.host
        spaces = {
            Direction.WITHIN: (device, device),
            Direction.OUT: (device, host),
            Direction.IN: (host, device),
        }
        for direction, copies in output.moves:
            source, target = spaces[direction]
            contents = [source[copy.src].copy() for copy in copies]
            for copy, content in zip(copies, contents, strict=True):
                target[copy.dst] = content
        states = {
            Direction.WITHIN: (self.states, self.states),
            Direction.OUT: (self.states, self.host_states),
            Direction.IN: (self.host_states, self.states),
        }
        for direction, copies in output.state_moves or ():
            of_source, of_target = states[direction]
            assert len({copy.dst for copy in copies}) == len(copies), "a slot is written once"
            found = [of_source[copy.src] for copy in copies]
            of_target.update(zip((copy.dst for copy in copies), found, strict=True))

    def advance(self, scheduled: ScheduledSequence) -> tuple[int, ...]:
        """Let the state of a sequence take in the scheduled tokens; returns what it has before."""
        assert scheduled.state_slot != PADDING_SLOT, "no sequence has the padding slot"
        before = self.states[scheduled.state_slot] if scheduled.start else ()
        self.states[scheduled.state_slot] = (*before, *scheduled.token_ids)
        return before

    def context(
        self,
        scheduled: ScheduledSequence,
        windows: Sequence[int | None] = (None,),
        known: Sequence[int] = (),
    ) -> list[int | None]:
        """The tokens before those that are scheduled, as the block tables give them.

        Those that the windows of all block groups have passed are ``known``.
        """
        num_blocks = ceil_div(scheduled.start, self.block_size)
        context: list[int | None] = list(known[: scheduled.start])
        for table, window in zip(_tables(scheduled), windows, strict=True):
            tokens: list[int | None] = []
            for block in table[:num_blocks].tolist():
                tokens += self.device[block]
            first = 0 if window is None else max(0, scheduled.start - window + 1)
            seen = tokens[first : scheduled.start]
            if window is None:
                context = seen
            assert seen == context[first:], "a group has other tokens"
        return context

    def write(self, scheduled: ScheduledSequence) -> None:
        """Write the scheduled tokens to their slots."""
        size = self.block_size
        for table in _tables(scheduled):
            for position, token in enumerate(scheduled.token_ids, scheduled.start):
                block = int(table[position // size])
                assert block != PADDING_BLOCK, "no sequence has the padding block"
                self.device[block][position % size] = token

    def _unwritten(self) -> Block:
        return [None] * self.block_size


def _tables(scheduled: ScheduledSequence) -> tuple[npt.NDArray[np.int32], ...]:
    """The block table of each group."""
    return (scheduled.block_table, *scheduled.further_tables)


@attrs.define
class Results:
    """What a device has computed for a step: the arguments of `Scheduler.update`."""

    sampled: dict[int, int] = attrs.field(factory=dict)
    logprobs: dict[int, float] = attrs.field(factory=dict)
    candidates: dict[int, tuple[Candidate, ...]] = attrs.field(factory=dict)
    forced: dict[int, list[int]] = attrs.field(factory=dict)


@attrs.define
class Runner:
    """Executes steps. ``sample_of``: the index of each sample in its request, by sequence id.

    Samples draw from ``vocabulary`` tokens: the fewer, the longer the prefixes that they share.
    ``most_forced``: tokens that follow a sampled one at once, as if forced. They are those that the
    model would sample next, so that no outcome depends on them.
    ``in_flight``: the steps that the device has computed and the scheduler has no results of.
    """

    scheduler: Scheduler
    memory: Memory
    sample_of: dict[int, int] = attrs.field(factory=dict)
    vocabulary: int = VOCABULARY
    most_forced: int = 0
    in_flight: list[tuple[SchedulerOutput, Results]] = attrs.field(factory=list)

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
        """Execute a scheduled step, the only one in flight."""
        self.launch(output)
        return self.finish_oldest()

    def check_slots(self) -> None:
        """The block manager has the slots and the tokens that the scheduler has given it."""
        for sequence in self.scheduler._states.sequences.values():
            if sequence.seq_id not in self.scheduler._blocks:
                continue
            state = self.scheduler._blocks._sequences[sequence.seq_id]
            assert list(state.token_ids) == sequence.token_ids[: sequence.num_slots]

    def finish_oldest(self) -> tuple[SequenceUpdate, ...]:
        """Give the scheduler the results of the oldest step in flight."""
        output, results = self.in_flight.pop(0)
        return self.scheduler.update(
            output,
            results.sampled,
            logprobs=results.logprobs,
            candidates=results.candidates,
            forced=results.forced,
        )

    def launch(self, output: SchedulerOutput) -> None:
        """Let the device compute a step, after those that are in flight."""
        seq_ids = [scheduled.seq_id for scheduled in (*output.decodes, *output.prompts)]
        assert len(seq_ids) == len(set(seq_ids)), "a sequence is scheduled once"
        keeps_states = self.scheduler._group_blocks.state_slots is not None
        windows = self.scheduler._blocks.config.windows
        self.memory.carry_out(output)
        results = Results()
        for scheduled in (*output.decodes, *output.prompts):
            known = self._with_pending_token(scheduled)
            tokens = self.scheduler._states.sequences[known.seq_id].token_ids
            context = self.memory.context(known, windows, tokens)
            self.memory.write(known)
            if keeps_states:
                assert self.memory.advance(known) == tuple(context), "a state has other tokens"
            if not known.samples:
                continue
            assert None not in context, "every slot of the context has been written"
            seen = (*context, *known.token_ids)
            if known.num_candidates:
                results.candidates[known.seq_id] = top_tokens(seen, known.num_candidates)
                continue
            for seq_id in known.sample_ids:
                token = next_token(seen, self.sample_of[seq_id], self.vocabulary)
                results.sampled[seq_id] = token
                results.logprobs[seq_id] = logprob_of(token)
                following = self._forced(seq_id, [*seen, token])
                if following:
                    results.forced[seq_id] = following
        self.in_flight.append((output, results))

    def _with_pending_token(self, scheduled: ScheduledSequence) -> ScheduledSequence:
        """A decode with the token that the step before has sampled on the device."""
        assert PENDING_TOKEN not in scheduled.token_ids[1:]
        if scheduled.token_ids[0] != PENDING_TOKEN:
            return scheduled
        _, results = self.in_flight[-1]
        return scheduled._replace(token_ids=[results.sampled[scheduled.seq_id]])

    def _forced(self, seq_id: int, tokens: list[int]) -> list[int]:
        """The next tokens of a sequence, 0 to ``most_forced``: as many as its last token says."""
        sequence = self.scheduler._states.sequences.get(seq_id)
        if sequence is None or sequence.request.is_scored:
            return []
        start = len(tokens)
        for _ in range(tokens[-1] % (1 + self.most_forced)):
            tokens.append(next_token(tokens, self.sample_of[seq_id], self.vocabulary))
        return tokens[start:]

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
