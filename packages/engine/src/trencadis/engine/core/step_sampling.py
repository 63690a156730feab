"""What a step samples for the requests of the table, and the tokens that it reports to the front.

Between them runs the model: the sampler knows rows of logits, the scheduler sequences, the front
requests and their samples.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from trencadis.engine.api.outputs import STEP_TOKENS, FinishReason
from trencadis.engine.core.request_table import Entry, RequestTable, Sample
from trencadis.engine.grammars.compiler import GrammarCompiler
from trencadis.engine.grammars.matcher import GrammarMatcher, StepMasks
from trencadis.engine.ipc.messages import NewToken, RequestError
from trencadis.engine.runner.step import (
    ChunkScores,
    PromptTargets,
    RowRequest,
    SampleSettings,
    StepResult,
)
from trencadis.scheduler import FinishReason as SchedulerFinishReason
from trencadis.scheduler import Scheduler, SchedulerOutput, SequenceUpdate

logger = logging.getLogger("trencadis.engine")

JumpPays = Callable[[int, int], bool]
"""Whether one chunk costs less than a step for each of its tokens: a sampled one, given by its
position, and as many forced ones as the second number."""


@attrs.frozen
class SampledStep:
    """What the scheduler is told of a step, by sequence id, in `Scheduler.update`."""

    token_ids: Mapping[int, int]
    logprobs: Mapping[int, float]
    forced: Mapping[int, Sequence[int]]


class StepSampling:
    """Samples for the requests of a table, lets their grammars follow, reports their tokens.

    ``num_prompt_tokens`` counts the prompt tokens of all requests that have generated a token: each
    prompt once, cached and recomputed tokens not counted again; ``num_cached_tokens`` of them were
    prefix hits. ``num_generation_tokens`` counts reported tokens. ``num_steps_by_tokens``: see
    `EngineStats`.
    """

    def __init__(
        self,
        table: RequestTable,
        scheduler: Scheduler,
        eos_token_ids: frozenset[int],
        grammars: GrammarCompiler,
    ) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.num_steps_by_tokens = [0] * (len(STEP_TOKENS) + 1)
        self._num_tokens = 0
        self.needs_results = False
        """Whether the rows of the last step are followed by rows that depend on the tokens: those
        of penalties and of structured outputs."""
        self._table = table
        self._samples = table.samples
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars

    def row_requests(self, output: SchedulerOutput) -> dict[int, RowRequest]:
        """What is sampled from each row of logits of a step, by the row's sequence id."""
        live = self._table.live_beams() if self._table.beam_searches else {}
        masks: StepMasks | None = None
        requests: dict[int, RowRequest] = {}
        self.needs_results = False
        for item in (*output.decodes, *output.prompts):
            if not item.samples:
                continue
            num_tokens = item.start + len(item.token_ids)
            if item.num_candidates:
                beam, entry = live[item.seq_id]
                settings = SampleSettings.of(
                    entry.params, 0, beam.token_ids, entry.num_prompt_tokens, self._eos_token_ids
                )
                request = RowRequest(num_tokens, (settings,), None, item.num_candidates)
            else:
                sample = self._samples[item.seq_id]
                request = RowRequest(num_tokens, sample.settings)
                if item.forks:
                    forks = [self._samples[seq_id] for seq_id in item.forks]
                    of_forks = [settings for fork in forks for settings in fork.settings]
                    request = RowRequest(num_tokens, (*sample.settings, *of_forks))
                    # The samples of a row have the same tokens, and so the same mask.
                    unfinished = (choice for choice in (sample, *forks) if choice.is_unfinished)
                    sample = next(unfinished, sample)
                if sample.settings[0].history:
                    self.needs_results = True
                if sample.matcher is not None and sample.is_unfinished:
                    self.needs_results = True
                    masks = masks or self._grammars.masks()
                    mask = masks.add(sample.matcher, request.forbidden_token_ids)
                    request = request._replace(mask=mask)
                elif (allowed := sample.entry.params.allowed_token_ids) is not None:
                    listed = self._grammars.listed(allowed, request.forbidden_token_ids)
                    request = request._replace(mask=listed)
            requests[item.seq_id] = request
        if masks is not None:
            masks.start()
        return requests

    def prompt_targets(self, output: SchedulerOutput) -> dict[int, PromptTargets]:
        """The prompt tokens that the tokens of a step score, by sequence id.

        Where several sequences share a prompt, that which computes it first scores it.
        """
        targets: dict[int, PromptTargets] = {}
        for item in (*output.decodes, *output.prompts):
            sample = self._samples.get(item.seq_id)  # None for a beam
            known = None if sample is None else sample.entry.prompt_logprobs
            if sample is None or known is None:
                continue
            entry, tokens = sample.entry, sample.sequence.token_ids
            first = max(item.start, known.num_tokens)
            end = min(item.start + len(item.token_ids), entry.num_prompt_tokens - 1)
            if sample.sequence.group is entry.groups[0] and first < end:
                targets[item.seq_id] = PromptTargets(
                    1 + first,
                    first - item.start,
                    tuple(tokens[1 + first : 1 + end]),
                    entry.params.prompt_logprobs or 0,
                )
        return targets

    def keep_prompt_logprobs(self, results: Mapping[int, ChunkScores]) -> None:
        """Keep what a step has scored until a token of the request is reported."""
        for seq_id, new in results.items():
            sample = self._samples.get(seq_id)  # None after an abort, or the failure of another
            if sample is not None and sample.entry.prompt_logprobs is not None:
                sample.entry.prompt_logprobs.add(new)

    def sampled(self, result: StepResult, pays: JumpPays) -> SampledStep:
        """What the scheduler is told of a step.

        A sequence that failed has no result. Ends requests whose grammars fail on them. ``pays``
        says whether tokens that a grammar forces become output at once.
        """
        forced: dict[int, Sequence[int]] = {}
        if result.candidates:
            live = self._table.live_beams()
            # A beam search that was aborted since the step was started has no beams left.
            for seq_id in result.candidates.keys() & live.keys():
                beam, entry = live[seq_id]
                if not entry.prompt_counted:
                    self._count_prompt(entry, beam.num_cached_tokens)
        for seq_id, token_id in result.token_ids.items():
            sample = self._samples.get(seq_id)  # None after the failure of another sample
            if sample is not None and sample.matcher is not None and sample.is_unfinished:
                following = self._follow(sample, sample.matcher, token_id, pays)
                if following:
                    forced[seq_id] = following
        logprobs = {key: token.chosen.logprob for key, token in result.logprobs.items()}
        return SampledStep(result.token_ids, logprobs, forced)

    def report(
        self, updates: Sequence[SequenceUpdate], result: StepResult, step: SampledStep
    ) -> list[NewToken]:
        """The messages to the front for a step. Tokens of ended samples are left out."""
        tokens: list[NewToken] = []
        number, of = 0, -1
        for update in updates:
            number, of = (number + 1 if update.seq_id == of else 0), update.seq_id
            sample = self._samples.get(update.seq_id)
            if sample is None:
                search = self._table.beam_searches.get(update.request_id)
                if search is not None:
                    tokens.extend(self._hypothesis(search, update.seq_id))
            elif sample.is_unfinished:
                # The matcher is after the last of the tokens that were forced.
                is_last = number == len(step.forced.get(update.seq_id, ()))
                tokens.append(self._new_token(sample, update, result, is_last=is_last))
        self.num_generation_tokens += sum(token.embedding is None for token in tokens)
        self._count_step()
        return tokens

    def _count_step(self) -> None:
        """Count a step by the tokens that it adds to the totals, where there are any."""
        total = self.num_prompt_tokens - self.num_cached_tokens + self.num_generation_tokens
        if total > self._num_tokens:
            self.num_steps_by_tokens[bisect_left(STEP_TOKENS, total - self._num_tokens)] += 1
            self._num_tokens = total

    def _new_token(
        self, sample: Sample, update: SequenceUpdate, result: StepResult, *, is_last: bool
    ) -> NewToken:
        """The message for one token. ``is_last``: no forced token of the step follows it."""
        entry, sequence = sample.entry, sample.sequence
        if not entry.prompt_counted:
            self._count_prompt(entry, sequence.num_cached_tokens)
        ended = update.finish_reason
        reason: FinishReason | None = None if ended is None else ended.value
        is_complete = is_last and sample.matcher is not None and sample.matcher.is_complete
        if is_complete and reason != "stop":
            reason = "stop"
            if ended is None:
                self._scheduler.finish(update.seq_id)
        is_first, sample.is_reported = not sample.is_reported, True
        token = NewToken(
            entry.key,
            sample.index,
            update.token_id,
            reason,
            sequence.num_cached_tokens,
            result.logprobs.get(update.seq_id),
            entry.status,
            is_complete and update.token_id not in self._eos_token_ids,
            sequence.group.queue_s if is_first and not entry.was_parked else None,
            result.embeddings.get(update.seq_id),
            sequence.group.away_s,
            self._table.take_prompt_logprobs(entry) if self._table.scored else None,
            sequence.group.num_preemptions,
        )
        if reason is not None:
            self._table.end_sample(entry, sample.index)
        return token

    def _follow(
        self, sample: Sample, matcher: GrammarMatcher, token_id: int, pays: JumpPays
    ) -> Sequence[int]:
        """Let the grammar of a sample follow its new token. An error ends its request alone.

        Returns the tokens that the grammar forces next, where they become output at once.
        """
        params = sample.entry.params
        matcher.consume(token_id)
        forced: Sequence[int] = ()
        if params.logprobs is None and not params.needs_ranking:
            # The log-probability of a token needs the logits before it.
            forced = matcher.forced_tokens()
        if forced and not self._ends_answer(sample, matcher, forced):
            forced = forced if pays(len(sample.sequence.token_ids), len(forced)) else ()
        matcher.consume_all(forced)
        if matcher.error:
            key = sample.entry.key
            message = f"the grammar of structured_output cannot go on: {matcher.error}"
            logger.warning("Request %s ends: %s", key, message)
            self._table.end_with(RequestError(key, message))
            return ()
        return forced

    def _ends_answer(self, sample: Sample, matcher: GrammarMatcher, forced: Sequence[int]) -> bool:
        """Whether the forced tokens end the answer: then no forward pass computes them."""
        sequence = sample.sequence
        num_left = sequence.request.max_tokens - sequence.num_output_tokens - 1
        return len(forced) >= num_left or matcher.ends_with(forced)

    def _hypothesis(self, entry: Entry, seq_id: int) -> Iterator[NewToken]:
        """All tokens of one result of a beam search that has just ended."""
        results = entry.groups[0].results
        index, result = next((i, s) for i, s in enumerate(results) if s.seq_id == seq_id)
        cached = result.num_cached_tokens
        *tokens, last = result.output_token_ids
        status = entry.status
        queue_s = None if entry.was_parked else entry.groups[0].queue_s
        for token_id in tokens:
            yield NewToken(entry.key, index, token_id, None, cached, None, status, False, queue_s)
            queue_s = None
        reason = _finish_reason(result.finish_reason)
        group = entry.groups[0]
        yield NewToken(
            *(entry.key, index, last, reason, cached, None, status, False, queue_s),
            away_s=group.away_s,
            num_preemptions=group.num_preemptions,
        )
        self._table.end_sample(entry, index)

    def _count_prompt(self, entry: Entry, num_cached_tokens: int) -> None:
        entry.prompt_counted = True
        self.num_prompt_tokens += entry.num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens


def _finish_reason(reason: SchedulerFinishReason | None) -> FinishReason | None:
    return None if reason is None else reason.value
