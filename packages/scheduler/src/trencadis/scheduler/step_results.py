"""Applies the results of a step to the groups: new tokens, forks, and finished sequences."""

from __future__ import annotations

import math
from collections import abc
from itertools import chain
from typing import Any

import attrs

from trencadis.kvcache import BlockManager
from trencadis.scheduler.beams import BeamSearchState, Candidate, Continuation
from trencadis.scheduler.errors import InvalidResults
from trencadis.scheduler.fair_share import OUTPUT_WEIGHT
from trencadis.scheduler.group import Sequence, SequenceGroup
from trencadis.scheduler.group_blocks import GroupBlocks
from trencadis.scheduler.group_states import GroupStates
from trencadis.scheduler.output import (
    PENDING_TOKEN,
    ScheduledSequence,
    SchedulerOutput,
    SequenceUpdate,
)
from trencadis.scheduler.request import FinishReason
from trencadis.scheduler.validators import (
    MAX_TOKEN_ID,
    are_token_ids,
    as_token_ids,
    integer,
    is_number,
)

_TOKEN_ID = integer(0, MAX_TOKEN_ID, error=InvalidResults)


@attrs.frozen
class StepResults:
    """The results of a step by sequence id; see `Scheduler.update`."""

    tokens: abc.Mapping[int, int]
    logprobs: abc.Mapping[int, float]
    candidates: abc.Mapping[int, abc.Sequence[Candidate]]
    forced: abc.Mapping[int, abc.Sequence[int]]

    @classmethod
    def of(
        cls,
        tokens: abc.Mapping[int, int],
        logprobs: abc.Mapping[int, float] | None,
        candidates: abc.Mapping[int, abc.Sequence[Candidate]] | None,
        forced: abc.Mapping[int, abc.Sequence[int]] | None,
    ) -> StepResults:
        """The arguments of `Scheduler.update`.

        Raises `InvalidResults` unless they are mappings, and for tokens that are none.
        """
        results = cls(
            tokens,
            {} if logprobs is None else logprobs,
            {} if candidates is None else candidates,
            {} if forced is None else forced,
        )
        for name in ("tokens", "logprobs", "candidates", "forced"):
            value = getattr(results, name)
            if not isinstance(value, abc.Mapping):
                argument = "sampled" if name == "tokens" else name
                raise InvalidResults(
                    f"{argument} must be a mapping from sequence id, got {value!r}"
                )
        if not are_token_ids(results.tokens.values()):
            plain = {
                seq_id: _TOKEN_ID.checked(f"the token of sequence {seq_id}", token_id)
                for seq_id, token_id in results.tokens.items()
            }
            results = attrs.evolve(results, tokens=plain)
        if not results.forced:
            return results
        checked = {
            seq_id: as_token_ids(token_ids, f"forced of sequence {seq_id}", InvalidResults)
            for seq_id, token_ids in results.forced.items()
        }
        return attrs.evolve(results, forced=checked)

    def check_values(self) -> None:
        """Raises `InvalidResults` for a log-probability that is none.

        And for forced tokens of a sequence without a sampled one.
        """
        for seq_id, logprob in self.logprobs.items():
            _check_logprob(logprob, f"the log-probability of sequence {seq_id}")
        for seq_id in self.forced:
            if seq_id not in self.tokens:
                raise InvalidResults(
                    f"update() got forced tokens for sequence {seq_id} and no sampled one, which "
                    "they follow: pass it in sampled"
                )

    def offered(self, seq_id: int) -> tuple[Candidate, ...]:
        """The candidates of a beam. Raises `InvalidResults` if missing or invalid."""
        offered = self.candidates.get(seq_id)
        if not offered:
            raise InvalidResults(
                f"update() got no candidates for sequence {seq_id}, a beam: pass its most probable "
                "tokens, as many as num_candidates"
            )
        try:
            candidates = tuple(Candidate(*candidate) for candidate in offered)
        except TypeError as error:
            raise InvalidResults(
                f"the candidates of sequence {seq_id} must be pairs of token id and "
                f"log-probability, got {offered!r}"
            ) from error
        name = f"of a candidate of sequence {seq_id}"
        for candidate in candidates:
            _check_logprob(candidate.logprob, f"the log-probability {name}")
        return tuple(
            Candidate(_TOKEN_ID.checked(f"the token {name}", candidate.token_id), candidate.logprob)
            for candidate in candidates
        )


def _check_logprob(logprob: Any, name: str) -> None:
    """A log-probability is a number that is not NaN: -inf for a token that was masked out."""
    if not is_number(logprob) or math.isnan(logprob):
        raise InvalidResults(f"{name} must be a number, got {logprob!r}")


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

    def check(self, output: SchedulerOutput, results: StepResults) -> None:
        """Check the results of ``output`` before anything changes.

        Raises `InvalidResults` for missing and for invalid ones. Those of sequences that were
        aborted since may be missing.
        """
        if results.logprobs or results.forced:
            results.check_values()
        for seq_id in results.forced:
            sequence = self._states.sequences.get(seq_id)
            if sequence is not None and sequence.request.is_scored:
                raise InvalidResults(
                    f"update() got forced tokens for sequence {seq_id}, which is ranked by "
                    "log-probabilities: forced tokens have none, so sample its tokens one by one"
                )
            if sequence is not None and sequence.is_pending:
                raise InvalidResults(
                    f"update() got forced tokens for sequence {seq_id}, whose next token is in "
                    "flight: call schedule() after update() where tokens may be forced"
                )
        tokens = results.tokens
        decodes: abc.Iterable[ScheduledSequence] = output.decodes
        if not self._states.num_scored:
            # A decode with a token and no forks needs nothing else. Few steps have other decodes,
            # and a loop over all of them would cost a third of update().
            decodes = [item for item in decodes if item.forks or item.seq_id not in tokens]
        for scheduled in chain(decodes, output.prompts):
            if scheduled.samples and scheduled.seq_id in self._states.sequences:
                self._check_sample(scheduled, results)

    def assume(self, output: SchedulerOutput) -> None:
        """Go on as if the step ``output``, which is in flight, were computed.

        Each sequence that samples and does not end by its length gets a pending token, which
        `apply` replaces. A sequence that ends with this token computes a row in vain.
        """
        for scheduled in chain(output.decodes, output.prompts):
            sequence = self._states.sequences.get(scheduled.seq_id)
            if sequence is None:
                continue
            sequence.num_computed_tokens = scheduled.start + len(scheduled.token_ids)
            if scheduled.samples and not self._ends_by_length(sequence, num_more=1):
                sequence.token_ids.append(PENDING_TOKEN)
                sequence.is_pending = True

    def take_back(self, output: SchedulerOutput) -> None:
        """Undo `assume` for a step that is discarded."""
        for scheduled in chain(output.decodes, output.prompts):
            sequence = self._states.sequences.get(scheduled.seq_id)
            if sequence is None:
                continue
            if sequence.is_pending:
                self._group_blocks.drop_pending_token(sequence)
            sequence.num_computed_tokens = scheduled.start

    def _ends_by_length(self, sequence: Sequence, num_more: int = 0) -> bool:
        """Whether ``num_more`` tokens after those of a sequence are the last ones it may have."""
        num_tokens = len(sequence.token_ids) + num_more
        request = sequence.request
        return (
            num_tokens - len(request.prompt_token_ids) >= request.max_tokens
            or num_tokens >= self._max_model_len
        )

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
                updates.extend(self._beams.apply(group, group.beam_state, scheduled, results))
        return updates

    def _check_sample(self, scheduled: ScheduledSequence, results: StepResults) -> None:
        if scheduled.num_candidates:
            results.offered(scheduled.seq_id)
            return
        for seq_id in scheduled.sample_ids:
            if seq_id not in results.tokens:
                raise InvalidResults(
                    f"update() got no token for sequence {seq_id}: sample one for each of the "
                    "sample_ids of the step"
                )
            is_ranked = self._states.sequences[seq_id].request.is_ranked
            if is_ranked and seq_id not in results.logprobs:
                raise InvalidResults(
                    f"update() got no log-probability for sequence {seq_id}: best_of ranks samples "
                    "by them, so pass logprobs"
                )

    def finish_sample(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish a sample of a running group and free its blocks."""
        self._group_blocks.free_sequence(sequence)
        self._states.finish_sample(sequence, reason)

    def _append(
        self, sequence: Sequence, results: StepResults, updates: list[SequenceUpdate]
    ) -> None:
        """Append the sampled token of a sequence and those forced after it, until it finishes."""
        if results.logprobs:
            sequence.cumulative_logprob += results.logprobs.get(sequence.seq_id, 0.0)
        forced = results.forced.get(sequence.seq_id, ()) if results.forced else ()
        sequence.num_forced_tokens = len(forced)
        update = self._append_token(sequence, results.tokens[sequence.seq_id])
        updates.append(update)
        for token_id in forced:
            if update.finish_reason is not None:
                return
            update = self._append_token(sequence, token_id)
            updates.append(update)

    def _append_token(self, sequence: Sequence, token_id: int) -> SequenceUpdate:
        if sequence.is_pending:
            self._group_blocks.set_pending_token(sequence, token_id)
        else:
            sequence.token_ids.append(token_id)
        sequence.group.client.service += OUTPUT_WEIGHT
        request = sequence.request
        num_output_tokens = len(sequence.token_ids) - len(request.prompt_token_ids)
        reason: FinishReason | None = None
        if token_id in request.stop_token_ids and num_output_tokens >= request.min_tokens:
            reason = FinishReason.STOP
        elif self._ends_by_length(sequence):
            reason = FinishReason.LENGTH
        if reason is not None:
            self.finish_sample(sequence, reason)
        return SequenceUpdate(sequence.seq_id, request.request_id, token_id, reason)


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
        results: StepResults,
    ) -> list[SequenceUpdate]:
        """Take the candidates of one row of logits. Returns updates once the search has ended."""
        offered = results.offered(scheduled.seq_id)
        for seq_id in scheduled.sample_ids:
            state.candidates[seq_id] = offered
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
        beams[0].group.client.service += OUTPUT_WEIGHT * len(continuations)
        by_beam: dict[int, list[Continuation]] = {}
        for continuation in continuations:
            by_beam.setdefault(continuation.beam, []).append(continuation)
        for index, beam in enumerate(beams):
            if index not in by_beam:  # first of all: then others may take its slot
                self._group_blocks.free_sequence(beam)
                self._states.drop_beam(beam)
        for index, (first, *others) in sorted(by_beam.items()):
            beam = beams[index]
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
