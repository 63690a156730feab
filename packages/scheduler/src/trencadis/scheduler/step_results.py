"""Applies the results of a step to the groups: new tokens, forks, and finished sequences."""

from __future__ import annotations

from collections import abc
from itertools import chain

import attrs

from trencadis.kvcache import BlockManager
from trencadis.scheduler.beam_results import BeamResultProcessor
from trencadis.scheduler.beams import Candidate
from trencadis.scheduler.group import Sequence
from trencadis.scheduler.group_blocks import GroupBlocks
from trencadis.scheduler.group_states import GroupStates
from trencadis.scheduler.output import SchedulerOutput, SequenceUpdate
from trencadis.scheduler.request import FinishReason


@attrs.frozen
class StepResults:
    """The results of a step by sequence id; see `Scheduler.update`."""

    tokens: abc.Mapping[int, int]
    logprobs: abc.Mapping[int, float]
    candidates: abc.Mapping[int, abc.Sequence[Candidate]]


class StepResultProcessor:
    """Applies results to running groups; those of beams through `BeamResultProcessor`."""

    def __init__(
        self,
        states: GroupStates,
        group_blocks: GroupBlocks,
        blocks: BlockManager,
        max_model_len: int,
    ) -> None:
        self._states = states
        self._group_blocks = group_blocks
        self._blocks = blocks
        self._max_model_len = max_model_len
        self._beams = BeamResultProcessor(states, group_blocks)

    def apply(self, output: SchedulerOutput, results: StepResults) -> list[SequenceUpdate]:
        """Apply the results of ``output``. Skips sequences that were aborted since."""
        updates: list[SequenceUpdate] = []
        sequences = self._states.sequences
        mark_computed = self._blocks.mark_computed
        for scheduled in chain(output.decodes, output.prompts):
            sequence = sequences.get(scheduled.seq_id)
            if sequence is None:
                continue
            sequence.num_computed_tokens = end = scheduled.start + len(scheduled.token_ids)
            mark_computed(sequence.seq_id, end)
            group = sequence.group
            if group.unforked_seqs and end == sequence.num_slots:
                self._group_blocks.fork_all(group)
            if not scheduled.samples:
                continue
            if group.beam_state is None:
                self._append(sequence, results, updates)
                for fork in scheduled.forks:
                    self._append(sequences[fork], results, updates)
            else:
                updates.extend(
                    self._beams.apply(group, group.beam_state, scheduled, results.candidates)
                )
        return updates

    def finish_sample(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish a sample of a running group and free its blocks."""
        self._group_blocks.free_sequence(sequence)
        self._states.finish_sample(sequence, reason)

    def _append(
        self, sequence: Sequence, results: StepResults, updates: list[SequenceUpdate]
    ) -> None:
        token_id = results.tokens[sequence.seq_id]
        sequence.token_ids.append(token_id)
        if results.logprobs:
            sequence.cumulative_logprob += results.logprobs.get(sequence.seq_id, 0.0)
        request = sequence.request
        num_output_tokens = len(sequence.token_ids) - len(request.prompt_token_ids)
        reason: FinishReason | None = None
        if token_id in request.stop_token_ids and num_output_tokens >= request.min_tokens:
            reason = FinishReason.STOP
        elif (
            num_output_tokens >= request.max_tokens
            or len(sequence.token_ids) >= self._max_model_len
        ):
            reason = FinishReason.LENGTH
        if reason is not None:
            self.finish_sample(sequence, reason)
        updates.append(SequenceUpdate(sequence.seq_id, request.request_id, token_id, reason))
