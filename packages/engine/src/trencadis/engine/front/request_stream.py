"""A request where its text is made: tokens of its sequences in, deltas of its answers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from trencadis.engine.front.sample_stream import SampleStream
from trencadis.engine.ipc.messages import NewToken
from trencadis.engine.outputs import CompletionDelta
from trencadis.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trencadis.engine.front.tokenizer import Tokenizer


class RequestStream:
    """Gives ``emit`` what each answer of a request gains, and in the end its finish reason.

    Where it is known only in the end which sequences are answers (``best_of`` above ``n``, beams)
    each answer is a single delta, and the best has index 0. Samples are ranked here rather than in
    the scheduler because a stop string ends them here: tokens past it count for nothing.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        emit: Callable[[CompletionDelta], None],
    ) -> None:
        self.request_id = request_id
        self._params = params
        self._emit = emit
        # Beams are told from each other by the core, which reports those that are answers alone.
        count = params.n if params.use_beam_search else params.num_seqs
        self._samples = [
            SampleStream(request_id, index, prompt_token_ids, params, tokenizer)
            for index in range(count)
        ]
        self._held: list[list[CompletionDelta]] = [[] for _ in range(count)]

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return all(sample.finished for sample in self._samples)

    def push(self, token: NewToken) -> bool:
        """Take a token; True when it ended its sample and the core does not know of it."""
        sample = self._samples[token.index]
        if sample.finished:
            return False  # it was on its way when a stop string ended the sample
        delta = sample.push(token)
        if not self._params.chooses:
            self._emit(delta)
        else:
            self._held[token.index].append(delta)
            if self.finished:
                self._choose()
        return delta.finish_reason is not None and token.finish_reason is None

    def abort(self) -> None:
        """End every answer with the text that it has; those that were to be chosen have none."""
        if self._params.chooses:
            ended = [attrs.evolve(one.abort(), text="") for one in self._samples[: self._params.n]]
        else:
            ended = [one.abort() for one in self._samples if not one.finished]
        for delta in ended:
            self._emit(delta)

    def _choose(self) -> None:
        ranked = self._held
        if not self._params.use_beam_search:
            ranked = sorted(self._held, key=_mean_logprob, reverse=True)
        for rank, deltas in enumerate(ranked[: self._params.n]):
            self._emit(self._joined(deltas, rank))

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
        )


def _mean_logprob(deltas: Sequence[CompletionDelta]) -> float:
    """The mean log-probability of a sample's tokens: what OpenAI ranks ``best_of`` by."""
    logprobs = [position.chosen.logprob for delta in deltas for position in delta.logprobs]
    return sum(logprobs) / len(logprobs)
