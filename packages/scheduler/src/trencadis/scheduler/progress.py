"""What a step has computed: tokens, branches, beams that fork and drop, and ends."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import chain

import attrs

from trencadis.kvcache import BlockManager
from trencadis.scheduler.beams import BeamTracker, Candidate, Continuation
from trencadis.scheduler.errors import StepOrderError
from trencadis.scheduler.group import Sequence, SequenceGroup
from trencadis.scheduler.ledger import Ledger
from trencadis.scheduler.memory import GroupMemory
from trencadis.scheduler.output import ScheduledSequence, SchedulerOutput, SequenceUpdate
from trencadis.scheduler.request import FinishReason


@attrs.frozen
class Sampled:
    """What came out of a step, by sequence id; see `Scheduler.update`."""

    tokens: Mapping[int, int]
    logprobs: Mapping[int, float]
    candidates: Mapping[int, Items[Candidate]]


class Progress:
    """Carries the results of steps into the groups. ``ended`` counts seats given back so far."""

    def __init__(
        self, ledger: Ledger, memory: GroupMemory, blocks: BlockManager, max_model_len: int
    ) -> None:
        self.ended = 0
        self._ledger = ledger
        self._memory = memory
        self._blocks = blocks
        self._max_model_len = max_model_len

    def learn(self, output: SchedulerOutput, sampled: Sampled) -> list[SequenceUpdate]:
        """Take in a step; whoever was cancelled meanwhile is left out."""
        updates: list[SequenceUpdate] = []
        sequences = self._ledger.sequences
        mark_computed = self._blocks.mark_computed
        for scheduled in chain(output.decodes, output.prompts):
            one = sequences.get(scheduled.seq_id)
            if one is None:
                continue
            one.num_computed = end = scheduled.start + len(scheduled.token_ids)
            mark_computed(one.seq_id, end)
            group = one.group
            if group.unforked and end == one.num_slots:
                self._memory.fork_all(group)
            if not scheduled.samples:
                continue
            if group.beams is None:
                self._append(one, sampled, updates)
                for fork in scheduled.forks:
                    self._append(sequences[fork], sampled, updates)
            else:
                updates.extend(self._gather(group, group.beams, scheduled, sampled))
        return updates

    def end(self, one: Sequence, reason: FinishReason) -> None:
        """A sample of a running group has all its tokens: its blocks and its seat are free."""
        self._memory.free(one)
        self._ledger.end_sample(one, reason)
        self.ended += 1

    def _append(self, one: Sequence, sampled: Sampled, updates: list[SequenceUpdate]) -> None:
        token_id = sampled.tokens[one.seq_id]
        one.token_ids.append(token_id)
        if sampled.logprobs:
            one.cumulative_logprob += sampled.logprobs.get(one.seq_id, 0.0)
        request = one.request
        generated = len(one.token_ids) - len(request.prompt_token_ids)
        reason: FinishReason | None = None
        if token_id in request.stop_token_ids and generated >= request.min_tokens:
            reason = FinishReason.STOP
        elif generated >= request.max_tokens or len(one.token_ids) >= self._max_model_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.end(one, reason)
        updates.append(SequenceUpdate(one.seq_id, request.request_id, token_id, reason))

    # Beams.

    def _gather(
        self,
        group: SequenceGroup,
        beams: BeamTracker,
        scheduled: ScheduledSequence,
        sampled: Sampled,
    ) -> list[SequenceUpdate]:
        """Beams advance together, once all of them have their candidates."""
        for seq_id in scheduled.sample_ids:
            offered = sampled.candidates.get(scheduled.seq_id)
            if not offered:
                raise StepOrderError(
                    f"update() got no candidates for sequence {scheduled.seq_id}, a beam: "
                    f"pass its {beams.candidates_per_beam} most probable tokens"
                )
            beams.gathered[seq_id] = tuple(offered)
        if any(one.seq_id not in beams.gathered for one in group.live):
            return []
        parents = list(group.live)
        chosen = beams.advance(
            [one.output_token_ids for one in parents],
            [one.cumulative_logprob for one in parents],
            [beams.gathered[one.seq_id] for one in parents],
        )
        if not chosen:
            return self._end_beams(group, beams)
        self._branch(parents, chosen)
        return []

    def _branch(self, parents: list[Sequence], chosen: list[Continuation]) -> None:
        """The first continuation of a beam goes on in its place, the others fork from it."""
        successors: dict[int, list[Continuation]] = {}
        for continuation in chosen:
            successors.setdefault(continuation.beam, []).append(continuation)
        for beam, parent in enumerate(parents):
            if beam not in successors:
                self._memory.free(parent)
                self._ledger.drop_sequence(parent)
                continue
            first, *others = successors[beam]
            for other in others:
                child = self._ledger.new_sequence(parent.group, [*parent.token_ids, other.token_id])
                child.cumulative_logprob = other.cumulative_logprob
                child.num_cached_prompt_tokens = parent.num_cached_prompt_tokens
                self._memory.fork(parent, child)
                parent.group.live.append(child)
            parent.token_ids.append(first.token_id)
            parent.cumulative_logprob = first.cumulative_logprob

    def _end_beams(self, group: SequenceGroup, beams: BeamTracker) -> list[SequenceUpdate]:
        cached = group.live[0].num_cached_prompt_tokens
        for one in group.active:
            self._memory.free(one)
        self.ended += group.seats
        self._ledger.finish(group)
        group.live, group.active = [], []
        for found in beams.hypotheses:
            tokens = [*group.request.prompt_token_ids, *found.output_token_ids]
            one = self._ledger.new_result(group, tokens)
            one.cumulative_logprob = found.cumulative_logprob
            one.num_cached_prompt_tokens = cached
            one.finish_reason = found.finish_reason
            group.finished.append(one)
        group.finish_reason = group.finished[0].finish_reason
        return [
            SequenceUpdate(one.seq_id, one.request_id, one.token_ids[-1], one.finish_reason)
            for one in group.results
        ]
