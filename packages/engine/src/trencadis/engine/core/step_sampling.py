"""What a step samples for the requests of the table, and the tokens that it reports to the front.

Between them runs the model: the sampler knows rows of logits, the scheduler sequences, the front
requests and their samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from trencadis.engine.api.outputs import FinishReason
from trencadis.engine.core.request_table import Entry, RequestTable, Sample
from trencadis.engine.grammars.compiler import GrammarCompiler
from trencadis.engine.grammars.matcher import GrammarMatcher, StepMasks
from trencadis.engine.ipc.messages import NewToken, RequestError
from trencadis.engine.runner.sampling_rows import (
    RowRequest,
    RowResult,
    SampledToken,
    SamplingRow,
)
from trencadis.scheduler import (
    Candidate,
    ScheduledSequence,
    Scheduler,
    SchedulerOutput,
    SequenceUpdate,
)
from trencadis.scheduler import FinishReason as SchedulerFinishReason
from trencadis.scheduler import Sequence as ScheduledTokens

logger = logging.getLogger("trencadis.engine")

JumpPays = Callable[[int, int], bool]
"""Whether one chunk costs less than a step for each of its tokens: a sampled one, given by its
position, and as many forced ones as the second number."""


@attrs.frozen
class SampledStep:
    """The sampler's results of one step, by sequence id.

    ``logprobs`` has the log-probability of the sampled token where the request asked for it.
    ``candidates`` are the most probable next tokens of each beam. ``forced`` are the tokens that
    grammars force after the sampled ones.
    """

    tokens: Mapping[int, SampledToken]
    token_ids: Mapping[int, int]
    logprobs: Mapping[int, float]
    candidates: Mapping[int, Sequence[Candidate]]
    forced: Mapping[int, Sequence[int]]


class StepSampling:
    """Samples for the requests of a table, lets their grammars follow, reports their tokens.

    ``num_prompt_tokens`` counts the prompt tokens of all requests that have generated a token: each
    prompt once, cached and recomputed tokens not counted again; ``num_cached_tokens`` of them were
    prefix hits. ``num_generation_tokens`` counts reported tokens.
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
        for item in (*output.decodes, *output.prompts):
            if item.num_candidates:
                requests[item.seq_id] = self._beam_request(item, *live[item.seq_id])
            elif item.samples:
                samples = [self._samples[seq_id] for seq_id in item.sample_ids]
                # The samples of a row have the same tokens, and so the same mask.
                matcher = next((s.matcher for s in samples if s.is_unfinished), None)
                if matcher is not None:
                    masks = masks or self._grammars.masks()
                    mask = masks.add(matcher, samples[0].row.forbidden_token_ids)
                    rows = [attrs.evolve(sample.row, mask=mask) for sample in samples]
                    requests[item.seq_id] = RowRequest(tuple(rows))
                elif len(samples) == 1:
                    requests[item.seq_id] = samples[0].request
                else:
                    requests[item.seq_id] = RowRequest(tuple(sample.row for sample in samples))
        if masks is not None:
            masks.start()
        return requests

    def sampled(
        self,
        output: SchedulerOutput,
        results: Mapping[int, RowResult],
        pays: JumpPays,
    ) -> SampledStep:
        """The results of a step by the sequences that they belong to.

        A sequence that failed has no result. Ends requests whose grammars fail on them. ``pays``
        says whether tokens that a grammar forces become output at once.
        """
        tokens: dict[int, SampledToken] = {}
        token_ids: dict[int, int] = {}
        logprobs: dict[int, float] = {}
        candidates: dict[int, Sequence[Candidate]] = {}
        forced: dict[int, Sequence[int]] = {}
        live = self._table.live_beams() if self._table.beam_searches else {}
        for item in (*output.decodes, *output.prompts):
            result = results.get(item.seq_id)
            if result is None:
                continue
            if item.num_candidates:
                beam, entry = live[item.seq_id]
                if not entry.prompt_counted:
                    self._count_prompt(entry, beam.num_cached_tokens)
                candidates[item.seq_id] = [Candidate(*token) for token in result.candidates]
            elif item.samples:
                for seq_id, token in zip(item.sample_ids, result.tokens, strict=True):
                    tokens[seq_id] = token
                    token_ids[seq_id] = token.token_id
                    if token.logprobs is not None:
                        logprobs[seq_id] = token.logprobs.chosen.logprob
                    following = self._follow(seq_id, token.token_id, pays)
                    if following:
                        forced[seq_id] = following
        return SampledStep(tokens, token_ids, logprobs, candidates, forced)

    def report(self, updates: Sequence[SequenceUpdate], step: SampledStep) -> list[NewToken]:
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
                tokens.append(self._new_token(sample, update, step, is_last=is_last))
        self.num_generation_tokens += sum(token.embedding is None for token in tokens)
        return tokens

    def _new_token(
        self, sample: Sample, update: SequenceUpdate, step: SampledStep, *, is_last: bool
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
            step.tokens[update.seq_id].logprobs,
            entry.status,
            is_complete and update.token_id not in self._eos_token_ids,
            sequence.group.queue_s if is_first and not entry.was_parked else None,
            step.tokens[update.seq_id].embedding,
        )
        if reason is not None:
            self._table.end_sample(entry, sample.index)
        return token

    def _beam_request(
        self, item: ScheduledSequence, sequence: ScheduledTokens, entry: Entry
    ) -> RowRequest:
        num_prompt, eos = entry.num_prompt_tokens, self._eos_token_ids
        beam = SamplingRow(entry.params, 0, sequence.token_ids, num_prompt, eos)
        return RowRequest(beam=beam, num_candidates=item.num_candidates)

    def _follow(self, seq_id: int, token_id: int, pays: JumpPays) -> Sequence[int]:
        """Let the grammar of a sample follow its new token. An error ends its request alone.

        Returns the tokens that the grammar forces next, where they become output at once.
        """
        sample = self._samples.get(seq_id)  # None after the failure of another sample
        if sample is None or sample.matcher is None or not sample.is_unfinished:
            return ()
        matcher, params = sample.matcher, sample.entry.params
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
        yield NewToken(entry.key, index, last, reason, cached, None, status, False, queue_s)
        self._table.end_sample(entry, index)

    def _count_prompt(self, entry: Entry, num_cached_tokens: int) -> None:
        entry.prompt_counted = True
        self.num_prompt_tokens += entry.num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens


def _finish_reason(reason: SchedulerFinishReason | None) -> FinishReason | None:
    return None if reason is None else reason.value
