"""The decision of a step, and the tokens that came of it, as plain values."""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.kvcache import CopyPlan
from trencadis.scheduler.request import FinishReason


class ScheduledSequence(NamedTuple):
    """The tokens of one sequence to compute in this step.

    - ``start``: position of the first token; all positions before it are in the KV cache.
    - ``block_table``: ``int32[num_blocks]``, the blocks of the sequence in token order. It covers
      all tokens and is valid until the next ``schedule()``.
    - ``samples``: whether the logits of the last token are needed; False for a prefill chunk that
      is not the last of its prompt.
    - ``forks``: ids of further sequences that continue from the same row of logits. Sample from
      that row once for ``seq_id`` and once for each of them.
    - ``num_candidates``: above 0 for a beam. Return that many most probable tokens with their
      log-probabilities instead of a sampled token.
    """

    seq_id: int
    start: int
    token_ids: abc.Sequence[int]
    block_table: npt.NDArray[np.int32]
    samples: bool
    forks: tuple[int, ...] = ()
    num_candidates: int = 0

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Ids of the sequences that need a token from this row of logits."""
        return (self.seq_id, *self.forks) if self.samples else ()


@attrs.frozen
class SchedulerOutput:
    """The decision of one step.

    - ``prompts``: prefill chunks of two or more tokens.
    - ``decodes``: single tokens whose context is in the KV cache. Run them as a forward pass of
      their own.
    - ``moves``: copy-on-write, swaps and defragmentation, to carry out in this order before the
      forward passes. There may be moves without anything to compute.
    - ``preempted_seq_ids``: sequences that lost their device blocks in this step.
    - ``max_running_seqs``: the running limit of this step, in sequences.
    """

    step: int
    prompts: tuple[ScheduledSequence, ...] = ()
    decodes: tuple[ScheduledSequence, ...] = ()
    moves: CopyPlan = attrs.field(factory=CopyPlan, eq=False)
    preempted_seq_ids: tuple[int, ...] = ()
    max_running_seqs: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the step computes no tokens; it may have moves."""
        return not self.prompts and not self.decodes


class SequenceUpdate(NamedTuple):
    """A new token of a sequence, and the finish reason if it was the last one.

    The tokens of running beams may still change. So a beam search reports only once it has ended:
    one update per result, best first, with its last token.
    """

    seq_id: int
    request_id: str
    token_id: int
    finish_reason: FinishReason | None = None
