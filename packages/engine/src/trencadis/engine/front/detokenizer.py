"""Incremental detokenization: complete characters only, stop strings removed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
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
        self._context = _end_of_prompt(tokenizer, prompt_token_ids)
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
            piece = self._next_piece(self._stream, token_id)
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

    def _next_piece(self, stream: DecodeStream, token_id: int) -> str | None:
        """The text that a token completes; None while its last character is incomplete."""
        try:
            return stream.step(self._tokenizer, token_id)
        except Exception:
            # "Invalid prefix", which has no class of its own: with byte fallback, a run of bytes
            # that is not UTF-8 becomes replacement characters as a whole, also those that were
            # text. What was given stays, so the tokens after it are decoded on their own.
            token_ids = [*self._pending_ids, token_id]
            self._stream = DecodeStream(token_ids, self._skip_special)
            return self._decode(token_ids)

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
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt, strict=False))
        return text[max(len(list(same)), self._num_whole()) :]

    def _num_whole(self) -> int:
        """Characters of the prompt's tokens before its last, incomplete one."""
        beginnings = (self._context[:end] for end in range(len(self._context), -1, -1))
        texts = map(self._decode, beginnings)
        return next(len(text) for text in texts if not text.endswith(_INCOMPLETE))

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


def _end_of_prompt(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """The last tokens of a prompt, from the beginning of a character on."""
    start = max(0, len(token_ids) - _CONTEXT)
    first = max(0, start - 3)  # a character has at most four bytes
    while start > first and _is_inner_byte(tokenizer.token_bytes(token_ids[start])):
        start -= 1
    return list(token_ids[start:])


def _is_inner_byte(content: bytes) -> bool:
    """Whether a token begins with a byte of UTF-8 that begins no character."""
    return len(content) > 0 and content[0] & 0xC0 == 0x80


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
