"""Applies the candidates of a step to running beams: forks, drops, and the end of the search."""

from __future__ import annotations

from collections import abc

from trencadis.scheduler.beams import BeamSearchState, Candidate, Continuation
from trencadis.scheduler.errors import StepOrderError
from trencadis.scheduler.group import Sequence, SequenceGroup
from trencadis.scheduler.group_blocks import GroupBlocks
from trencadis.scheduler.group_states import GroupStates
from trencadis.scheduler.output import ScheduledSequence, SequenceUpdate


class BeamResultProcessor:
    """Advances the beams of a group together, once each of them has its candidates."""

    def __init__(self, states: GroupStates, group_blocks: GroupBlocks) -> None:
        self._states = states
        self._group_blocks = group_blocks

    def apply(
        self,
        group: SequenceGroup,
        state: BeamSearchState,
        scheduled: ScheduledSequence,
        candidates: abc.Mapping[int, abc.Sequence[Candidate]],
    ) -> list[SequenceUpdate]:
        """Take the candidates of one row of logits. Returns updates once the search has ended.

        Raises `StepOrderError` where the row has no candidates.
        """
        offered = candidates.get(scheduled.seq_id)
        if not offered:
            raise StepOrderError(
                f"update() got no candidates for sequence {scheduled.seq_id}, a beam: "
                f"pass its {state.candidates_per_beam} most probable tokens"
            )
        for seq_id in scheduled.sample_ids:
            state.candidates[seq_id] = tuple(offered)
        beams = list(group.unfinished_seqs)
        if any(beam.seq_id not in state.candidates for beam in beams):
            return []
        continuations = state.advance(
            [beam.output_token_ids for beam in beams],
            [beam.cumulative_logprob for beam in beams],
            [state.candidates[beam.seq_id] for beam in beams],
        )
        if not continuations:
            return self._finish(group, state)
        self._continue(beams, continuations)
        return []

    def _continue(self, beams: list[Sequence], continuations: list[Continuation]) -> None:
        """Append the first continuation of each beam to it, and fork the beam for the others."""
        by_beam: dict[int, list[Continuation]] = {}
        for continuation in continuations:
            by_beam.setdefault(continuation.beam, []).append(continuation)
        for index, beam in enumerate(beams):
            if index not in by_beam:
                self._group_blocks.free_sequence(beam)
                self._states.drop_beam(beam)
                continue
            first, *others = by_beam[index]
            for continuation in others:
                self._fork(beam, continuation)
            beam.token_ids.append(first.token_id)
            beam.cumulative_logprob = first.cumulative_logprob

    def _fork(self, beam: Sequence, continuation: Continuation) -> None:
        tokens = [*beam.token_ids, continuation.token_id]
        child = self._states.add_sequence(beam.group, tokens)
        child.cumulative_logprob = continuation.cumulative_logprob
        child.num_cached_tokens = beam.num_cached_tokens
        self._group_blocks.fork(beam, child)
        beam.group.unfinished_seqs.append(child)

    def _finish(self, group: SequenceGroup, state: BeamSearchState) -> list[SequenceUpdate]:
        """Replace the running beams by the hypotheses."""
        num_cached_tokens = group.unfinished_seqs[0].num_cached_tokens
        for beam in group.allocated_seqs:
            self._group_blocks.free_sequence(beam)
        results: list[Sequence] = []
        for hypothesis in state.hypotheses:
            tokens = [*group.request.prompt_token_ids, *hypothesis.output_token_ids]
            result = self._states.create_sequence(group, tokens)
            result.cumulative_logprob = hypothesis.cumulative_logprob
            result.num_cached_tokens = num_cached_tokens
            result.finish_reason = hypothesis.finish_reason
            results.append(result)
        self._states.finish_beam_search(group, results)
        return [
            SequenceUpdate(
                result.seq_id, result.request_id, result.token_ids[-1], result.finish_reason
            )
            for result in group.results
        ]
