"""Log-probabilities in the OpenAI API's two formats: chat completions and completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs

from trencadis.engine import PositionLogprobs, TokenLogprob
from trencadis.server.engine_protocol import ServingTokenizer

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have. OpenAI and vLLM report the same value."""


class TokenTexts(Protocol):
    """How tokens are written: what log-probabilities need of a tokenizer."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes: ...


class TokensAsIds:
    """A tokenizer whose tokens are written as vLLM's ``return_tokens_as_token_ids`` writes them."""

    def __init__(self, tokenizer: ServingTokenizer) -> None:
        self._tokenizer = tokenizer

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        return self._tokenizer.token_bytes(token_id, skip_special_tokens)


def chat_logprobs(
    tokenizer: TokenTexts, positions: Iterable[PositionLogprobs]
) -> list[ChatCompletionTokenLogprob]:
    """The format of chat completions: one entry per generated token."""
    return [_chat_position(tokenizer, position) for position in positions]


class TextOffset:
    """The position, in characters, of the next token in the text of its choice.

    A token that begins within a character has the position of that character.
    """

    def __init__(self, tokenizer: ServingTokenizer, skip_special_tokens: bool) -> None:
        self.position = 0
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, token_id: int) -> None:
        """Move past a token."""
        new_bytes = self._tokenizer.token_bytes(token_id, self._skip_special)
        self.position += len(self._decoder.decode(new_bytes))


def completion_logprobs(
    tokenizer: TokenTexts, positions: Iterable[PositionLogprobs], offset: TextOffset
) -> Logprobs:
    """The format of completions: parallel lists with an entry per generated token.

    ``offset`` is that of the first token, and afterwards that of the next one. The top
    log-probabilities always include the chosen token.
    """
    texts: list[str] = []
    offsets: list[int] = []
    chosen: list[float] = []
    top: list[dict[str, float]] = []
    for position in positions:
        text = tokenizer.token_text(position.chosen.token_id)
        texts.append(text)
        offsets.append(offset.position)
        offset.advance(position.chosen.token_id)
        chosen.append(_finite(position.chosen.logprob))
        # Several tokens may have a text, such as that of half a character: the first one is kept.
        by_text = {text: _finite(position.chosen.logprob)}
        for other in position.top:
            by_text.setdefault(tokenizer.token_text(other.token_id), _finite(other.logprob))
        top.append(by_text)
    return Logprobs(text_offset=offsets, token_logprobs=chosen, tokens=texts, top_logprobs=top)


def _chat_position(tokenizer: TokenTexts, position: PositionLogprobs) -> ChatCompletionTokenLogprob:
    text = tokenizer.token_text(position.chosen.token_id)
    return ChatCompletionTokenLogprob(
        token=text,
        bytes=list(tokenizer.token_bytes(position.chosen.token_id)),
        logprob=_finite(position.chosen.logprob),
        top_logprobs=[_top(tokenizer, token) for token in position.top],
    )


def _top(tokenizer: TokenTexts, token: TokenLogprob) -> TopLogprob:
    text = tokenizer.token_text(token.token_id)
    spelling = list(tokenizer.token_bytes(token.token_id))
    return TopLogprob(token=text, bytes=spelling, logprob=_finite(token.logprob))


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
