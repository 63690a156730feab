"""Sequences and sequence groups, the states of a group, and the transitions between them.

A group holds all sequences of one request; they run and are preempted together.

Only the modules of the scheduler change these objects; other code reads them.
"""

from __future__ import annotations

import enum
import math
from collections import abc
from typing import NamedTuple

import attrs

from trencadis.kvcache import CacheConfig, PrefixKeys, ceil_div, num_passed_blocks
from trencadis.scheduler.beams import BeamSearchState
from trencadis.scheduler.config import QueuePolicy
from trencadis.scheduler.errors import IllegalTransition
from trencadis.scheduler.fair_share import Client
from trencadis.scheduler.request import FinishReason, Request


class SequenceStatus(enum.Enum):
    """The state of a sequence group and of its unfinished sequences.

    - WAITING: not admitted yet.
    - RUNNING: on the device.
    - SWAPPED: preempted; its computed blocks are on the host.
    - PREEMPTED: preempted; its blocks were freed, its tokens are kept, and it is recomputed.
    - FINISHED: all its sequences have finished, or its client aborted it while it was running.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    PREEMPTED = "preempted"
    FINISHED = "finished"


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING}),
    SequenceStatus.RUNNING: frozenset(
        {SequenceStatus.SWAPPED, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}
    ),
    SequenceStatus.SWAPPED: frozenset({SequenceStatus.RUNNING, SequenceStatus.WAITING}),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.RUNNING, SequenceStatus.WAITING}),
    SequenceStatus.FINISHED: frozenset(),
}
"""The state diagram: that of seed 003, section 5, and vLLM's PREEMPTED, for recomputation.

A group that its client aborts while SWAPPED or PREEMPTED becomes WAITING and leaves the scheduler,
as a group does that is aborted while WAITING.
"""


@attrs.define(eq=False)
class Sequence:
    """One output of a request.

    - ``token_ids``: prompt and output.
    - ``num_computed_tokens``: tokens, from the first, whose keys and values are in the KV cache.
    - ``num_slots``: tokens, from the first, that have a slot in the blocks of the sequence.
    - ``num_cached_tokens``: prompt tokens whose blocks came from the prefix cache.
    - ``is_pending``: the last token is `PENDING_TOKEN`, which the step in flight samples.
    - ``num_forced_tokens``: the newest tokens, which were forced with the last sampled one; see
      `Scheduler.update`.
    - ``cumulative_logprob``: sum over the output tokens; of a sample, only where
      `Scheduler.update` got log-probabilities.
    """

    seq_id: int
    request: Request
    token_ids: list[int] = attrs.field(repr=False)
    group: SequenceGroup = attrs.field(repr=False)
    num_computed_tokens: int = 0
    num_slots: int = 0
    num_cached_tokens: int = 0
    num_forced_tokens: int = 0
    is_pending: bool = False
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> abc.Sequence[int]:
        """The generated tokens so far, a copy."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def is_in_prefill(self) -> bool:
        """Whether it computes a prompt, or is recomputed.

        False while it computes no more than the last sampled token and those forced with it. They
        are the newest: a leader that is recomputed with a part of its tokens has none among them.
        """
        return len(self.token_ids) - self.num_computed_tokens > 1 + self.num_forced_tokens


class QueueKey(NamedTuple):
    """The position of a group among those of its client: groups with a lower key run first.

    Under the ``fcfs`` policy ``priority`` is 0. An overdue group precedes all that are not: its
    priority is minus infinity. To add a queue order: a value of `QueuePolicy`, and its key in `of`.
    """

    priority: float
    arrival: int

    @classmethod
    def of(
        cls, request: Request, arrival: int, policy: QueuePolicy, *, is_overdue: bool
    ) -> QueueKey:
        """The key of a request; ``arrival`` is its number in order of arrival."""
        if is_overdue:
            return cls(-math.inf, arrival)
        return cls(0 if policy == "fcfs" else request.priority, arrival)


@attrs.define(eq=False)
class SequenceGroup:
    """The sequences of one request: a single sequence, n samples, or beams.

    - ``arrival``: the number of requests that were added before this one.
    - ``client``: the client to whose service its tokens are added.
    - ``unfinished_seqs``: sequences that have not finished.
    - ``allocated_seqs``: unfinished sequences that have blocks. While the group computes the
      common prefix of its sequences (at first the prompt), only one of them, the leader, has.
    - ``unforked_seqs``: the others during that time; then they become forks of the leader.
    - ``finished_seqs``: finished sequences; of a beam search the hypotheses, best first.
    - ``prefix_keys``: the prefix-cache keys of the prompt, None without prefix caching.
    - ``snapshot_points``: after how many tokens of the prompt its state is kept, in ascending
      order; ``last_snapshot``: after how many it last was, or its prefix hit. See `SnapshotPoints`.
    - ``num_bypasses``: how often later groups were served instead; see `AdmissionControl`.
    - ``added_at_s``, ``started_at_s``: when the request came, and when the group last began to run,
      in seconds.
    - ``queue_s``: seconds from the request's arrival until the group first ran; None before that.
    - ``away_s``: seconds that the group was preempted, until it last resumed;
      ``num_preemptions``: how often it was.
    - ``cache``: the settings of the KV cache, whose windows decide which blocks it holds; None:
      one group of blocks that holds all.
    """

    request: Request
    arrival: int
    block_size: int
    queue_key: QueueKey
    client: Client = attrs.field(factory=Client, repr=False)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    unfinished_seqs: list[Sequence] = attrs.field(factory=list, repr=False)
    allocated_seqs: list[Sequence] = attrs.field(factory=list, repr=False)
    unforked_seqs: list[Sequence] = attrs.field(factory=list, repr=False)
    finished_seqs: list[Sequence] = attrs.field(factory=list, repr=False)
    beam_state: BeamSearchState | None = attrs.field(default=None, repr=False)
    prefix_keys: PrefixKeys | None = attrs.field(default=None, repr=False)
    snapshot_points: list[int] = attrs.field(factory=list, repr=False)
    last_snapshot: int = 0
    num_bypasses: int = 0
    added_at_s: float = 0.0
    started_at_s: float = 0.0
    queue_s: float | None = None
    preempted_at_s: float = 0.0
    away_s: float = 0.0
    num_preemptions: int = 0
    last_scheduled_step: int = 0
    cache: CacheConfig | None = attrs.field(default=None, repr=False)

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def priority(self) -> int:
        """The priority of the request; lower values run first under the policy ``priority``."""
        return self.request.priority

    @property
    def num_seqs(self) -> int:
        """Sequences that the group counts for against ``max_num_seqs``; beams: the beam width."""
        if self.beam_state is not None:
            return self.beam_state.search.width
        return len(self.unfinished_seqs)

    @property
    def num_tokens_left(self) -> int:
        """Tokens that its sequences may still generate, by ``max_tokens``."""
        most = self.request.max_tokens
        return sum(most - sequence.num_output_tokens for sequence in self.unfinished_seqs)

    @property
    def order(self) -> tuple[float, int, int, int]:
        """The position among all groups of a queue now: those with a lower one start first.

        Of equal priority, groups of the client that got the least service; of equal service, of the
        client with the fewest that wait. Overdue ones in order of arrival, whatever their client.
        """
        priority, arrival = self.queue_key
        if priority == -math.inf:
            return priority, 0, 0, arrival
        return priority, self.client.service, self.client.num_waiting, arrival

    @property
    def results(self) -> list[Sequence]:
        """The n sequences for the client, best first once the group has finished.

        ``best_of`` samples are ranked by their mean log-probability per token, then by their ids.
        """
        n = self.request.n
        if self.beam_state is not None:
            return self.finished_seqs[:n]
        if self.request.num_seqs > n:
            return sorted(self.finished_seqs, key=_rank)[:n]
        samples = [*self.finished_seqs, *self.unfinished_seqs]
        return sorted(samples, key=lambda sequence: sequence.seq_id)

    def get_num_kv_blocks(self) -> int:
        """Device blocks of the group. Blocks of the prompt count once, all others per sequence."""
        if self.cache is None:
            return self._num_blocks_held(None, None)
        ahead = self.cache.tokens_ahead
        return sum(self._num_blocks_held(window, ahead) for window in self.cache.windows)

    def _num_blocks_held(self, window: int | None, ahead: int | None) -> int:
        """Those of a block group with this window, and `CacheConfig.tokens_ahead`."""
        held = [self._held_blocks(sequence, window, ahead) for sequence in self.allocated_seqs]
        if len(held) <= 1:
            return sum(map(len, held))
        end = self.request.num_prompt_tokens // self.block_size
        of_prompt = max(0, end - min(blocks.start for blocks in held))
        return of_prompt + sum(len(range(max(blocks.start, end), blocks.stop)) for blocks in held)

    def _held_blocks(self, sequence: Sequence, window: int | None, ahead: int | None) -> range:
        """Which blocks of a sequence it has, by their places in it."""
        num_computed, end, num_passed = sequence.num_computed_tokens, sequence.num_slots, 0
        if window is not None:
            num_passed = num_passed_blocks(num_computed, window, self.block_size)
            end = end if ahead is None else min(end, num_computed + ahead)
        return range(num_passed, ceil_div(end, self.block_size))

    def transition_to(self, status: SequenceStatus) -> None:
        """Change the status. Raises `IllegalTransition` for one the state diagram does not have."""
        if status not in TRANSITIONS[self.status]:
            raise IllegalTransition(
                f"request {self.request_id!r} is {self.status.value} and cannot become "
                f"{status.value}"
            )
        self.status = status


def _rank(sample: Sequence) -> tuple[float, int]:
    return -sample.cumulative_logprob / max(1, sample.num_output_tokens), sample.seq_id
