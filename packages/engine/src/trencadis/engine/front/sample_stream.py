"""One sample of a request in the front: takes tokens, returns text deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trencadis.engine.front.detokenizer import IncrementalDetokenizer
from trencadis.engine.ipc.messages import NewToken
from trencadis.engine.outputs import CompletionDelta, FinishReason
from trencadis.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trencadis.engine.front.tokenizer import Tokenizer


class SampleStream:
    """Converts the tokens of one sample into deltas."""

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        self.finished = False
        self._request_id = request_id
        self._index = index
        self._num_prompt_tokens = len(prompt_token_ids)
        self._params = params
        self._text = IncrementalDetokenizer(tokenizer, params, prompt_token_ids)

    def push(self, token: NewToken) -> CompletionDelta:
        """Add a token; returns the delta. A stop string may end the sample."""
        reason, matched = token.finish_reason, None
        text = ""
        if reason != "stop" or self._params.include_stop_str_in_output:
            text, matched = self._text.push(token.token_id)
        if matched is not None:
            return self._delta(text, token, "stop", matched)
        if reason is not None:
            text += self._text.finish()
        stop_reason = token.token_id if token.token_id in self._params.stop_token_ids else None
        return self._delta(text, token, reason, stop_reason if reason == "stop" else None)

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
        )
