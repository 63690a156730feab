"""One sample of a request on the front's side: tokens in, text deltas out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from trencadis.engine.detokenizer import IncrementalDetokenizer
from trencadis.engine.errors import EngineError
from trencadis.engine.messages import NewToken
from trencadis.engine.outputs import CompletionDelta, FinishReason, PositionLogprobs
from trencadis.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trencadis.engine.tokenizer import Tokenizer


class SampleStream:
    """Turns the tokens of one sample into deltas on its request's queue.

    The queue holds at most ``max_tokens`` deltas per sample, which bounds it.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        tokenizer: Tokenizer,
        queue: asyncio.Queue[CompletionDelta | EngineError],
    ) -> None:
        self.request_id = request_id
        self.finished = False
        self._index = index
        self._num_prompt_tokens = len(prompt_token_ids)
        self._num_cached_tokens = 0
        self._params = params
        self._text = IncrementalDetokenizer(tokenizer, params, prompt_token_ids)
        self._queue = queue

    def push(self, token: NewToken) -> None:
        """Take a token from the core. A stop string may end the sample before the core does."""
        self._num_cached_tokens = token.num_cached_tokens
        reason, matched = token.finish_reason, None
        text = ""
        if reason != "stop" or self._params.include_stop_str_in_output:
            text, matched = self._text.push(token.token_id)
        if matched is not None:
            self._emit(text, token, "stop", matched)
            return
        if reason is not None:
            text += self._text.finish()
        stop_reason = token.token_id if token.token_id in self._params.stop_token_ids else None
        self._emit(text, token, reason, stop_reason if reason == "stop" else None)

    def abort(self) -> None:
        """End the sample with the text that it has."""
        self._put(
            CompletionDelta(self.request_id, self._index, self._text.finish(), (), (), "abort")
        )

    def fail(self, error: EngineError) -> None:
        """End the request with an error."""
        self.finished = True
        self._queue.put_nowait(error)

    def _emit(
        self,
        text: str,
        token: NewToken,
        reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> None:
        logprobs: tuple[PositionLogprobs, ...] = (token.logprobs,) if token.logprobs else ()
        self._put(
            CompletionDelta(
                self.request_id,
                self._index,
                text,
                (token.token_id,),
                logprobs,
                reason,
                stop_reason,
                self._num_prompt_tokens,
                self._num_cached_tokens,
            )
        )

    def _put(self, delta: CompletionDelta) -> None:
        self.finished = delta.finish_reason is not None
        self._queue.put_nowait(delta)
