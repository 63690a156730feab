"""What a step decides and what it learns, as plain values."""

from __future__ import annotations

from collections.abc import Sequence as Ids

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.kvcache import BlockCopy
from trencadis.scheduler.request import FinishReason


@attrs.frozen(eq=False)
class ScheduledSequence:
    """Tokens of one sequence to compute in this step.

    ``token_ids`` stand at positions ``start``, ``start + 1``, …; positions before ``start`` are
    in the cache. ``block_table`` ``int32[blocks]`` holds the sequence's block ids in order and
    covers them all; it is valid until the next ``schedule()``. ``samples`` says whether the logits after the last
    token are wanted (they are not after a prompt chunk that is not the last).
    """

    seq_id: int
    start: int
    token_ids: Ids[int]
    block_table: npt.NDArray[np.int32]
    samples: bool


@attrs.frozen
class SchedulerOutput:
    """The decision of one step.

    ``prompts`` are chunks of two tokens and more, ``decodes`` single tokens with all context in
    the cache: they run as separate forwards. ``copies`` must be carried out on the cache before
    either. ``preempted`` lost their blocks and wait again.
    """

    step: int
    prompts: tuple[ScheduledSequence, ...] = ()
    decodes: tuple[ScheduledSequence, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, without padding."""
        return sum(len(s.token_ids) for s in self.prompts) + len(self.decodes)

    @property
    def is_empty(self) -> bool:
        return not self.prompts and not self.decodes


@attrs.frozen
class SequenceUpdate:
    """One new token of a sequence, and whether it was the last."""

    seq_id: int
    request_id: str
    token_id: int
    finish_reason: FinishReason | None = None
