"""The sequences of one request, and the states that they go through together.

The scheduler's parts change what is here; everybody else reads.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as TokenIds

import attrs

from trencadis.kvcache import PrefixKeys
from trencadis.scheduler.beams import BeamTracker
from trencadis.scheduler.errors import IllegalTransition
from trencadis.scheduler.request import FinishReason, Request
from trencadis.scheduler.rounding import ceil_div


class SequenceStatus(enum.Enum):
    """Where a group, and with it each of its sequences, is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


_ARROWS = {
    SequenceStatus.WAITING: {SequenceStatus.RUNNING},
    SequenceStatus.RUNNING: {SequenceStatus.SWAPPED, SequenceStatus.FINISHED},
    SequenceStatus.SWAPPED: {SequenceStatus.RUNNING, SequenceStatus.WAITING},
    SequenceStatus.FINISHED: set[SequenceStatus](),
}
"""The state diagram of seed 003, section 5.

A group whose cache was given up rather than copied is SWAPPED too, with nothing on the host. A
group that its client cancels while SWAPPED goes back to WAITING; from there it leaves the
scheduler, as one does that is cancelled before it ever ran.
"""


@attrs.define(eq=False)
class Sequence:
    """One output in progress. The scheduler alone changes it; others may read.

    ``token_ids`` are prompt and output. The first ``num_computed`` of them have their keys and
    values in the cache, ``num_slots`` of them have cache slots reserved. ``cumulative_logprob``
    is the sum over the output, of beams and where `Scheduler.update` was told.
    """

    seq_id: int
    request: Request
    token_ids: list[int] = attrs.field(repr=False)
    group: SequenceGroup = attrs.field(repr=False)
    num_computed: int = 0
    num_slots: int = 0
    num_cached_prompt_tokens: int = 0
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None

    @property
    def status(self) -> SequenceStatus:
        """A sample that has ended is FINISHED before its group is."""
        if self.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}:
            return SequenceStatus.FINISHED
        return self.group.status

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> TokenIds[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_pending(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed


@attrs.define(eq=False)
class SequenceGroup:
    """The sequences of one request: one, n samples, or beams. They run and are evicted together.

    ``live`` have not ended; those of them in ``active`` have blocks. While the tokens that all
    share (the *trunk*: at first the prompt) are being computed that is one sequence alone; the
    others are in ``unforked`` and then become copies of it. ``finished`` are those that ended, of
    beams the hypotheses, best first. ``arrival`` counts requests, ``started_at_s`` is when it last
    began to run, ``on_host`` whether what it computed is kept there.
    """

    request: Request
    arrival: int
    block_size: int
    turn: tuple[int, int]
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    live: list[Sequence] = attrs.field(factory=list, repr=False)
    active: list[Sequence] = attrs.field(factory=list, repr=False)
    unforked: list[Sequence] = attrs.field(factory=list, repr=False)
    finished: list[Sequence] = attrs.field(factory=list, repr=False)
    beams: BeamTracker | None = attrs.field(default=None, repr=False)
    keys: PrefixKeys | None = attrs.field(default=None, repr=False)
    on_host: bool = False
    passed_over: int = 0
    started_at_s: float = 0.0
    last_scheduled_step: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def seats(self) -> int:
        """Running sequences that it counts for: beams always their width."""
        return len(self.live) if self.beams is None else self.beams.search.width

    @property
    def results(self) -> list[Sequence]:
        """The n sequences that the client gets, best first once the group is finished."""
        n = self.request.n
        if self.beams is None and self.request.num_seqs > n:
            ranked = sorted(self.finished, key=_mean_logprob, reverse=True)
            return ranked[:n]
        if self.beams is None:
            return sorted([*self.finished, *self.live], key=lambda one: one.seq_id)
        return self.finished[:n]

    def get_num_kv_blocks(self) -> int:
        """Device blocks that it holds; what beams share beyond the prompt counts for each."""
        size = self.block_size
        shared = len(self.request.prompt_token_ids) // size
        own = [ceil_div(one.num_slots, size) for one in self.active]
        if len(own) == 1:
            return own[0]
        return shared + sum(max(0, blocks - shared) for blocks in own)

    def become(self, status: SequenceStatus) -> None:
        """Follow an arrow of the state diagram. Raises `IllegalTransition` for any other."""
        if status not in _ARROWS[self.status]:
            raise IllegalTransition(
                f"request {self.request_id!r} is {self.status.value} and cannot become "
                f"{status.value}"
            )
        self.status = status


def _mean_logprob(sequence: Sequence) -> float:
    return sequence.cumulative_logprob / max(1, sequence.num_output_tokens)
