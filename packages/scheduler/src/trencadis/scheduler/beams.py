"""Beam search: which continuations survive a step, which are finished, and when it is over.

The rules are those of ``transformers``' own beam search (its ``generation/utils.py``), so that the
same log-probabilities give the same hypotheses. This module knows tokens and scores; blocks are
forked and dropped by whoever asks it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import attrs

from trencadis.scheduler.request import BeamSearch, FinishReason, Request


class Candidate(NamedTuple):
    """A token that may follow a beam, and its log-probability given that beam."""

    token_id: int
    logprob: float


class Continuation(NamedTuple):
    """A beam (its index in the step), the token that follows it, and the sum with that token."""

    beam: int
    token_id: int
    cumulative_logprob: float


@attrs.frozen
class Hypothesis:
    """A finished output: its generated tokens and the score that it is ranked by."""

    score: float
    output_token_ids: tuple[int, ...] = attrs.field(repr=False)
    cumulative_logprob: float
    finish_reason: FinishReason


class BeamTracker:
    """The state of one beam search beyond the running beams themselves.

    ``max_output``: tokens at which every beam ends. ``candidates_per_beam`` is how many of its
    best tokens each beam has to offer per step.
    """

    def __init__(self, request: Request, search: BeamSearch, max_output: int) -> None:
        self.search = search
        self.hypotheses: list[Hypothesis] = []
        self.gathered: dict[int, tuple[Candidate, ...]] = {}
        self.candidates_per_beam = max(2, 1 + len(request.stop_token_ids)) * search.width
        self._request = request
        self._max_output = max_output
        self._improving = True

    def advance(
        self,
        outputs: Items[Items[int]],
        scores: Items[float],
        candidates: Items[Items[Candidate]],
    ) -> list[Continuation]:
        """Choose the beams of the next step; none when the search is over.

        Per running beam: its generated tokens, its summed log-probability, its best tokens.
        """
        ranked = self._ranked(scores, candidates)
        length = len(outputs[0]) + 1
        reasons = [self._reason(one.token_id, length) for one in ranked]
        going_on = [one for one, why in zip(ranked, reasons, strict=True) if why is None]
        going_on = going_on[: self.search.width]
        # Only a continuation among the best `width` may finish; the rest are there as reserves.
        best = list(zip(ranked, reasons, strict=True))[: self.search.width]
        ended = [(one, why) for one, why in best if why is not None]
        self._finish([self._hypothesis(one, outputs[one.beam], why) for one, why in ended])
        self.gathered.clear()
        if not going_on or self._is_over(going_on[0].cumulative_logprob, length):
            return []
        return going_on

    def _ranked(
        self, scores: Items[float], candidates: Items[Items[Candidate]]
    ) -> list[Continuation]:
        every = [
            Continuation(beam, one.token_id, score + one.logprob)
            for beam, (score, offered) in enumerate(zip(scores, candidates, strict=True))
            for one in offered
        ]
        every.sort(key=lambda one: -one.cumulative_logprob)
        return every[: self.candidates_per_beam]

    def _reason(self, token_id: int, length: int) -> FinishReason | None:
        request = self._request
        if token_id in request.stop_token_ids and length >= request.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self._max_output else None

    def _hypothesis(self, one: Continuation, output: Items[int], why: FinishReason) -> Hypothesis:
        score = one.cumulative_logprob / (len(output) + 1) ** self.search.length_penalty
        return Hypothesis(score, (*output, one.token_id), one.cumulative_logprob, why)

    def _finish(self, found: list[Hypothesis]) -> None:
        """Keep the best; those of one step count together, even if they are more than are free."""
        self.hypotheses.extend(found)
        self.hypotheses.sort(key=lambda known: -known.score)
        del self.hypotheses[self.search.width :]

    def _is_over(self, best_running: float, length: int) -> bool:
        if len(self.hypotheses) < self.search.width:
            return False
        penalty, early = self.search.length_penalty, self.search.early_stopping
        if early is True:
            return True
        hopeful = self._max_output if early == "never" and penalty > 0 else length
        self._improving &= best_running / hopeful**penalty > self.hypotheses[-1].score
        return not self._improving
