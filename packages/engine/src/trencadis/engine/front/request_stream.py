"""One request in the front, and its samples: takes tokens from the core, emits text deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trencadis.engine.api.outputs import (
    CompletionDelta,
    FinishReason,
    PromptLogprobs,
    TokenLogprob,
)
from trencadis.engine.api.requests import EngineRequest
from trencadis.engine.errors import RequestFailed
from trencadis.engine.front.detokenizer import IncrementalDetokenizer
from trencadis.engine.ipc.messages import NewToken

if TYPE_CHECKING:
    from trencadis.engine.front.tokenizer import Tokenizer


class RequestStream:
    """Calls ``emit`` with the deltas of each sample; the last one has the finish reason.

    With ``best_of`` above ``n`` and with beam search, the results are known only at the end. Each
    is then emitted as one delta, and the best has index 0. Samples are ranked here, not in the
    scheduler, because stop strings are found here: tokens after a stop string must not count.
    `push` raises `RequestFailed` where a sample to rank lacks log-probabilities.
    """

    def __init__(
        self,
        request_id: str,
        request: EngineRequest,
        tokenizer: Tokenizer,
        emit: Callable[[CompletionDelta], None],
    ) -> None:
        self.request_id = request_id
        self.request = request
        self._params = request.params
        self._tokenizer = tokenizer
        self._emit = emit
        self._prompt_logprobs: tuple[PromptLogprobs | None, ...] | None = None
        # The prompt of a request that goes on after tokens was reported before.
        is_new = not request.output_token_ids
        self._awaits_prompt = is_new and request.params.prompt_logprobs is not None
        self._waiting: list[CompletionDelta] = []
        """The deltas that came before the log-probabilities of the prompt."""
        self._begin()

    def _begin(self) -> None:
        # For beam search the core reports only the n results, not every beam.
        count = self._params.n if self._params.use_beam_search else self._params.num_seqs
        self._samples = [
            SampleStream(self.request_id, index, self.request, self._tokenizer)
            for index in range(count)
        ]
        self._held: list[list[CompletionDelta]] = [[] for _ in range(count)]

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.finished for sample in self._samples)

    def has_ended(self, index: int) -> bool:
        """Whether sample ``index`` has ended."""
        return self._samples[index].finished

    def to_resume(self) -> dict[int | None, tuple[int, ...]]:
        """The tokens that each unfinished sample has, by its index, for a core that knows none.

        None instead of an index: the request begins again, because it has no tokens, or because
        its samples are compared in the end and nothing was emitted yet.
        """
        unfinished: dict[int | None, tuple[int, ...]] = {
            index: tuple(sample.token_ids)
            for index, sample in enumerate(self._samples)
            if not sample.finished
        }
        if self._params.needs_ranking:
            self._begin()
            return {None: ()}
        if len(unfinished) == len(self._samples) and not any(unfinished.values()):
            return {None: ()}
        return unfinished

    def push(self, token: NewToken) -> bool:
        """Add a token. True if a stop string ended the sample: the core cannot see it."""
        sample = self._samples[token.index]
        if sample.finished:
            return False  # the core sent it before it knew that a stop string ended the sample
        delta = sample.push(token)
        if token.prompt_logprobs is not None and self._awaits_prompt:
            self._awaits_prompt = False
            self._prompt_logprobs = _read_prompt(self.request, token.prompt_logprobs)
        if not self._params.needs_ranking:
            self._emit_with_prompt(delta)
        else:
            self._held[token.index].append(delta)
            if self.finished:
                self._emit_best()
        return delta.finish_reason is not None and token.finish_reason is None

    def abort(self) -> None:
        """End every sample with the text it has so far; unranked samples end with no text."""
        if self._params.needs_ranking:
            samples = self._samples[: self._params.n]
            ended = [attrs.evolve(sample.abort(), text="") for sample in samples]
        else:
            ended = [sample.abort() for sample in self._samples if not sample.finished]
        for delta in (*self._waiting, *ended):
            self._emit(delta)

    def _emit_best(self) -> None:
        ranked = self._held
        if not self._params.use_beam_search:
            ranked = sorted(self._held, key=self._mean_logprob, reverse=True)
        for rank, deltas in enumerate(ranked[: self._params.n]):
            self._emit_with_prompt(self._joined(deltas, rank))

    def _emit_with_prompt(self, delta: CompletionDelta) -> None:
        """Emit a delta; the first one has the log-probabilities of the prompt, if these are asked.

        They come with the first token of the sequence that computes the prompt. The first token of
        another sample may come before, where that sequence was preempted.
        """
        self._waiting.append(delta)
        if self._awaits_prompt and not self.finished:
            return
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            prompt, self._prompt_logprobs = self._prompt_logprobs, None
            self._emit(each if prompt is None else attrs.evolve(each, prompt_logprobs=prompt))

    def _mean_logprob(self, deltas: Sequence[CompletionDelta]) -> float:
        """Mean log-probability of a sample's tokens, by which OpenAI's API ranks ``best_of``."""
        num_tokens = sum(len(delta.token_ids) for delta in deltas)
        logprobs = [position.chosen.logprob for delta in deltas for position in delta.logprobs]
        if not logprobs or len(logprobs) != num_tokens:
            raise RequestFailed(
                f"request {self.request_id}: a sample has log-probabilities for {len(logprobs)} of "
                f"its {num_tokens} tokens, and best_of {self._params.best_of} ranks by them: send "
                "it again, or without best_of"
            )
        return sum(logprobs) / num_tokens

    def _joined(self, deltas: Sequence[CompletionDelta], index: int) -> CompletionDelta:
        last = deltas[-1]
        logprobs = () if self._params.logprobs is None else sum((d.logprobs for d in deltas), ())
        return CompletionDelta(
            self.request_id,
            index,
            "".join(delta.text for delta in deltas),
            tuple(token_id for delta in deltas for token_id in delta.token_ids),
            logprobs,
            last.finish_reason,
            last.stop_reason,
            last.num_prompt_tokens,
            last.num_cached_tokens,
            deltas[0].request_status,
            deltas[0].queue_s,
            away_s=last.away_s,
            num_preemptions=last.num_preemptions,
        )


def _read_prompt(request: EngineRequest, encoded: bytes) -> tuple[PromptLogprobs | None, ...]:
    """The log-probabilities of each token of a prompt, from those of `NewToken`."""
    token_ids = request.prompt_token_ids[1:]
    if not token_ids:
        return (None,)
    rows = np.frombuffer(encoded, "<f4").reshape(len(token_ids), -1)
    width = (rows.shape[1] - 2) // 2
    positions = []
    for token_id, row in zip(token_ids, rows.tolist(), strict=True):
        logprob, rank, *best = row
        top = tuple(TokenLogprob(int(best[width + i]), best[i]) for i in range(width))
        positions.append(PromptLogprobs(TokenLogprob(token_id, logprob), top, int(rank)))
    return (None, *positions)


class SampleStream:
    """Converts the tokens of one sample into deltas."""

    def __init__(
        self, request_id: str, index: int, request: EngineRequest, tokenizer: Tokenizer
    ) -> None:
        self.finished = False
        self.token_ids: list[int] = []
        self._request_id = request_id
        self._index = index
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._params = request.params
        self._text = IncrementalDetokenizer(
            tokenizer, request.params, request.prompt_token_ids + request.output_token_ids
        )

    def push(self, token: NewToken) -> CompletionDelta:
        """Add a token; returns the delta. A stop string may end the sample."""
        if token.embedding is not None:
            return attrs.evolve(
                self._delta("", token, "stop", None), token_ids=(), embedding=token.embedding
            )
        self.token_ids.append(token.token_id)
        reason, matched = token.finish_reason, None
        text = ""
        is_stop_token = reason == "stop" and not token.completes_grammar
        if not is_stop_token or self._params.include_stop_str_in_output:
            text, matched = self._text.push(token.token_id)
        if matched is not None:
            return self._delta(text, token, "stop", matched)
        if reason is not None:
            text += self._text.finish()
        is_listed = is_stop_token and token.token_id in self._params.stop_token_ids
        return self._delta(text, token, reason, token.token_id if is_listed else None)

    def abort(self) -> CompletionDelta:
        """End the sample with the text it has so far."""
        self.finished = True
        return CompletionDelta(self._request_id, self._index, self._text.finish(), (), (), "abort")

    def _delta(
        self,
        text: str,
        token: NewToken,
        reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> CompletionDelta:
        self.finished = reason is not None
        return CompletionDelta(
            self._request_id,
            self._index,
            text,
            (token.token_id,),
            (token.logprobs,) if token.logprobs else (),
            reason,
            stop_reason,
            self._num_prompt_tokens,
            token.num_cached_tokens,
            token.request_status,
            token.queue_s,
            away_s=token.away_s,
            num_preemptions=token.num_preemptions,
        )
