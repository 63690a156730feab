"""Incremental detokenization: complete characters only, stop strings removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from trencadis.engine.api.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trencadis.engine.front.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
"""What bytes that are not a whole character decode to."""

_CONTEXT = 8
"""Prompt tokens given to the decoder, so that the first new token keeps its leading space."""


class IncrementalDetokenizer:
    """The text of one sample, token by token.

    Text is held back while its last character is incomplete, or while its end may be the beginning
    of a stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer.backend
        self._skip_special = params.skip_special_tokens
        self._context = list(prompt_token_ids[-_CONTEXT:])
        self._stream: DecodeStream | None = None
        if not self._decode(self._context).endswith(_INCOMPLETE):
            self._stream = DecodeStream(self._context, self._skip_special)
        self._pending_ids: list[int] = []
        self._stop = params.stop
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Add a token; returns the text that is now final, and the stop string that matched."""
        self._num_tokens += 1
        if self._stream is None:
            piece = self._leave_prompt(token_id)
        else:
            piece = self._stream.step(self._tokenizer, token_id)
        if piece is None:
            self._pending_ids.append(token_id)
            return "", None
        self._pending_ids.clear()
        self._held += piece
        return self._release()

    def finish(self) -> str:
        """The text still held back. Call it when generation ends without a stop string."""
        tail, self._held = self._held, ""
        if self._pending_ids:
            tail += self._decode(self._pending_ids)
            self._pending_ids.clear()
        return tail

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)

    def _leave_prompt(self, token_id: int) -> str | None:
        """As ``DecodeStream.step``, after a prompt that ends in a replacement character.

        The stream takes that for an incomplete character and would give the prompt's end as new
        text. It is one only if the new tokens change it.
        """
        token_ids = [*self._context, *self._pending_ids, token_id]
        text = self._decode(token_ids)
        if text.endswith(_INCOMPLETE):
            return None
        self._stream = DecodeStream(token_ids, self._skip_special)
        prompt = self._decode(self._context)
        return text[len(prompt) - (not text.startswith(prompt)) :]

    def _release(self) -> tuple[str, str | None]:
        if not self._stop:
            text, self._held = self._held, ""
            return text, None
        found = self._first_stop()
        if found is not None and self._num_tokens > self._min_tokens:
            position, stop = found
            text = self._held[: position + len(stop) * self._keep_stop]
            self._held = ""
            return text, stop
        keep = max(_overlap(self._held, stop) for stop in self._stop)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text, None

    def _first_stop(self) -> tuple[int, str] | None:
        hits = [(self._held.find(stop), stop) for stop in self._stop]
        return min((hit for hit in hits if hit[0] >= 0), default=None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
