"""Beam search: selects the continuations of a step, the finished hypotheses, and the end.

The rules are those of beam search in ``transformers`` (``generation/utils.py``), so the same
log-probabilities give the same hypotheses. This module works on tokens and scores only; its caller
forks and frees the blocks of the beams.
"""

from __future__ import annotations

import math
from collections import abc
from typing import NamedTuple

import attrs

from trencadis.scheduler.request import BeamSearch, FinishReason, Request


class Candidate(NamedTuple):
    """A possible next token of a beam, and its log-probability given that beam."""

    token_id: int
    logprob: float


class Continuation(NamedTuple):
    """A beam (its index in the step), a next token, and the cumulative log-probability of both."""

    beam: int
    token_id: int
    cumulative_logprob: float


@attrs.frozen
class Hypothesis:
    """A finished output of a beam search, with the score that ranks it."""

    score: float
    output_token_ids: tuple[int, ...] = attrs.field(repr=False)
    cumulative_logprob: float
    finish_reason: FinishReason


class BeamSearchState:
    """The state of one beam search, except for its running beams.

    - ``hypotheses``: the finished hypotheses, best first, at most ``search.width``.
    - ``candidates_per_beam``: number of most probable tokens that a beam provides per step.
    - ``candidates``: what the beams have provided in this step, by sequence id.

    ``max_output`` is the number of output tokens at which every beam finishes.
    """

    def __init__(self, request: Request, search: BeamSearch, max_output: int) -> None:
        self.search = search
        self.hypotheses: list[Hypothesis] = []
        self.candidates: dict[int, tuple[Candidate, ...]] = {}
        self.candidates_per_beam = max(2, 1 + len(request.stop_token_ids)) * search.width
        self._request = request
        self._max_output = max_output
        self._can_improve = True

    def advance(
        self,
        outputs: abc.Sequence[abc.Sequence[int]],
        logprobs: abc.Sequence[float],
        candidates: abc.Sequence[abc.Sequence[Candidate]],
    ) -> list[Continuation]:
        """Select the beams of the next step, best first; none once the search has ended.

        The arguments have one entry per running beam: its output tokens, its cumulative
        log-probability, and its candidates.
        """
        width = self.search.width
        length = len(outputs[0]) + 1
        ranked = self._rank(logprobs, candidates)
        reasons = [self._finish_reason(continuation.token_id, length) for continuation in ranked]
        running = [
            continuation
            for continuation, reason in zip(ranked, reasons, strict=True)
            if reason is None
        ][:width]
        # Only a continuation among the best `width` may finish. The others replace those that do.
        self._add_hypotheses(
            [
                self._hypothesis(continuation, outputs[continuation.beam], reason)
                for continuation, reason in zip(ranked[:width], reasons[:width], strict=True)
                if reason is not None
            ]
        )
        self.candidates.clear()
        if not running or self._has_ended(running[0].cumulative_logprob, length):
            return []
        return running

    def _rank(
        self, logprobs: abc.Sequence[float], candidates: abc.Sequence[abc.Sequence[Candidate]]
    ) -> list[Continuation]:
        continuations = [
            Continuation(beam, candidate.token_id, logprob + candidate.logprob)
            for beam, (logprob, offered) in enumerate(zip(logprobs, candidates, strict=True))
            for candidate in offered
        ]
        continuations.sort(key=lambda continuation: -continuation.cumulative_logprob)
        return continuations[: self.candidates_per_beam]

    def _finish_reason(self, token_id: int, length: int) -> FinishReason | None:
        request = self._request
        if token_id in request.stop_token_ids and length >= request.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self._max_output else None

    def _hypothesis(
        self, continuation: Continuation, output: abc.Sequence[int], reason: FinishReason
    ) -> Hypothesis:
        logprob = continuation.cumulative_logprob
        score = self._score(logprob, len(output) + 1)
        return Hypothesis(score, (*output, continuation.token_id), logprob, reason)

    def _add_hypotheses(self, hypotheses: list[Hypothesis]) -> None:
        """Keep the best ``width``; all hypotheses of a step are added before any is dropped."""
        self.hypotheses.extend(hypotheses)
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.search.width :]

    def _has_ended(self, best_logprob: float, length: int) -> bool:
        """``best_logprob`` is the cumulative log-probability of the best running beam."""
        if len(self.hypotheses) < self.search.width:
            return False
        early_stopping = self.search.early_stopping
        if early_stopping is True:
            return True
        # Log-probabilities are negative, so with a positive penalty the longest output scores best.
        is_open_ended = early_stopping == "never" and self.search.length_penalty > 0
        best_length = self._max_output if is_open_ended else length
        self._can_improve &= self._score(best_logprob, best_length) > self.hypotheses[-1].score
        return not self._can_improve

    def _score(self, logprob: float, length: int) -> float:
        """``logprob / length ** length_penalty``; its limit where that is beyond a float."""
        penalty = self.search.length_penalty
        try:
            return logprob / length**penalty
        except OverflowError:
            return -0.0 if logprob > -math.inf else -math.inf
        except ZeroDivisionError:
            return -math.inf if logprob < 0 else 0.0
