"""What a step decides and what it learns, as plain values."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.kvcache import BlockCopy, CopyPlan, Direction
from trencadis.scheduler.request import FinishReason


class ScheduledSequence(NamedTuple):
    """Tokens of one sequence to compute in this step.

    ``token_ids`` stand at positions ``start``, ``start + 1``, …; positions before ``start`` are
    in the cache. ``block_table`` holds the sequence's block ids in order and covers all of them;
    it is valid until the next ``schedule()``. ``samples`` says whether the logits after the last
    token are wanted (they are not after a prompt chunk that is not the last).

    ``forks`` are further sequences that go on from the same row of logits: sample the row once for
    ``seq_id`` and once for each of them. ``num_candidates`` above 0 marks a beam: give its so many
    most probable tokens with their log-probabilities instead of sampling one.
    """

    seq_id: int
    start: int
    token_ids: Ids[int]
    block_table: npt.NDArray[np.int32]
    samples: bool
    forks: tuple[int, ...] = ()
    num_candidates: int = 0

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """The sequences that want a token from this row of logits; () for none."""
        return (self.seq_id, *self.forks) if self.samples else ()


@attrs.frozen
class SchedulerOutput:
    """The decision of one step.

    ``prompts`` are chunks of two tokens and more, ``decodes`` single tokens with all context in
    the cache: they run as separate forwards. ``moves`` must be carried out before either, in its
    order: copies on write, swaps, defragmentation. ``preempted`` are the ids of sequences that
    lost their device blocks and wait to be resumed. ``max_running`` is the cap that held.
    """

    step: int
    prompts: tuple[ScheduledSequence, ...] = ()
    decodes: tuple[ScheduledSequence, ...] = ()
    moves: CopyPlan = attrs.field(factory=CopyPlan, eq=False)
    preempted: tuple[int, ...] = ()
    max_running: int = 0

    @property
    def copies(self) -> tuple[BlockCopy, ...]:
        """The moves within the device; with neither swap space nor defragmenter, all of them."""
        return tuple(
            copy
            for direction, copies in self.moves
            if direction is Direction.WITHIN
            for copy in copies
        )

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, without padding."""
        return sum(len(s.token_ids) for s in self.prompts) + len(self.decodes)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed; there may be moves all the same."""
        return not self.prompts and not self.decodes


class SequenceUpdate(NamedTuple):
    """One new token of a sequence, and whether it was the last.

    Beams change their past while they run, so a beam search reports at its end alone: one update
    per result, best first, with its last token.
    """

    seq_id: int
    request_id: str
    token_id: int
    finish_reason: FinishReason | None = None
