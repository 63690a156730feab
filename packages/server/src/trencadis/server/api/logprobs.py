"""Log-probabilities in the OpenAI API's two formats: chat completions and completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any, Protocol

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs

from trencadis.engine import PositionLogprobs, PromptLogprobs, TokenLogprob
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
    tokenizer: TokenTexts, positions: Iterable[PositionLogprobs], *, with_chosen: bool = False
) -> list[ChatCompletionTokenLogprob]:
    """The format of chat completions: one entry per generated token.

    ``with_chosen``: the others always include it, as in vLLM with ``logprob_token_ids``.
    """
    return [_chat_position(tokenizer, position, with_chosen) for position in positions]


class TextOffset:
    """The position, in characters, of the next token in the text of its choice.

    A token that begins within a character has the position of that character. ``num_shown``: of so
    many first tokens, the special ones are in the text, too.
    """

    def __init__(
        self, tokenizer: ServingTokenizer, skip_special_tokens: bool, num_shown: int = 0
    ) -> None:
        self.position = 0
        self._num_shown = num_shown
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, token_id: int) -> None:
        """Move past a token."""
        skips = self._skip_special and self._num_shown <= 0
        self._num_shown -= 1
        new_bytes = self._tokenizer.token_bytes(token_id, skips)
        self.position += len(self._decoder.decode(new_bytes))


def completion_logprobs(
    tokenizer: TokenTexts,
    positions: Iterable[PositionLogprobs],
    offset: TextOffset,
    *,
    num_logprobs: int | None,
    first_token: int | None = None,
) -> Logprobs:
    """The format of completions: parallel lists with an entry per token.

    ``offset`` is that of the first token, and afterwards that of the next one. The
    ``num_logprobs`` top log-probabilities, None: all of them, always include the chosen token.
    ``first_token``: that of an echoed prompt, which has none, precedes the ``positions``.
    """
    texts: list[str] = []
    offsets: list[int] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    if first_token is not None:
        texts.append(tokenizer.token_text(first_token))
        offsets.append(offset.position)
        offset.advance(first_token)
        chosen.append(None)
        top.append(None)
    for position in positions:
        text = tokenizer.token_text(position.chosen.token_id)
        texts.append(text)
        offsets.append(offset.position)
        offset.advance(position.chosen.token_id)
        chosen.append(_finite(position.chosen.logprob))
        # Several tokens may have a text, such as that of half a character: the first one is kept.
        by_text = {text: _finite(position.chosen.logprob)}
        for other in position.top[:num_logprobs]:
            by_text.setdefault(tokenizer.token_text(other.token_id), _finite(other.logprob))
        top.append(by_text)
    # not validated: the type knows no null, which the API has for the first token of a prompt
    return Logprobs.model_construct(
        text_offset=offsets, token_logprobs=chosen, tokens=texts, top_logprobs=top
    )


def prompt_logprobs(
    tokenizer: TokenTexts, positions: Iterable[PromptLogprobs | None], num_logprobs: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's format for the tokens of a prompt: by token id, the prompt's own token first."""
    written: list[dict[str, dict[str, Any]] | None] = []
    for position in positions:
        if position is None:
            written.append(None)
            continue
        ranked = [(position.rank, position.chosen)]
        ranked += enumerate(position.top[:num_logprobs], 1)
        by_id: dict[str, dict[str, Any]] = {}
        for rank, token in ranked:
            fields = {
                "logprob": _finite(token.logprob),
                "rank": rank,
                "decoded_token": tokenizer.token_text(token.token_id),
            }
            by_id.setdefault(str(token.token_id), fields)
        written.append(by_id)
    return written


def _chat_position(
    tokenizer: TokenTexts, position: PositionLogprobs, with_chosen: bool
) -> ChatCompletionTokenLogprob:
    others = (position.chosen, *position.top) if with_chosen else position.top
    by_id = {token.token_id: token for token in others}
    text = tokenizer.token_text(position.chosen.token_id)
    return ChatCompletionTokenLogprob(
        token=text,
        bytes=list(tokenizer.token_bytes(position.chosen.token_id)),
        logprob=_finite(position.chosen.logprob),
        top_logprobs=[_top(tokenizer, token) for token in by_id.values()],
    )


def _top(tokenizer: TokenTexts, token: TokenLogprob) -> TopLogprob:
    text = tokenizer.token_text(token.token_id)
    spelling = list(tokenizer.token_bytes(token.token_id))
    return TopLogprob(token=text, bytes=spelling, logprob=_finite(token.logprob))


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
