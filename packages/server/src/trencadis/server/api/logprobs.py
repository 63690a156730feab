"""Log-probabilities in the OpenAI API's two formats: chat completions and completions."""

from __future__ import annotations

from collections.abc import Iterable

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs

from trencadis.engine import PositionLogprobs, TokenLogprob
from trencadis.server.engine_protocol import ServingTokenizer

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have. OpenAI and vLLM report the same value."""


def chat_logprobs(
    tokenizer: ServingTokenizer, positions: Iterable[PositionLogprobs]
) -> list[ChatCompletionTokenLogprob]:
    """The format of chat completions: one entry per generated token."""
    return [_chat_position(tokenizer, position) for position in positions]


def completion_logprobs(
    tokenizer: ServingTokenizer, positions: Iterable[PositionLogprobs], text_offset: int
) -> Logprobs:
    """The format of completions: parallel lists with an entry per generated token.

    ``text_offset`` is the position of the first token in the text of its choice, in characters. The
    top log-probabilities always include the chosen token.
    """
    texts: list[str] = []
    offsets: list[int] = []
    chosen: list[float] = []
    top: list[dict[str, float]] = []
    for position in positions:
        text = tokenizer.token_text(position.chosen.token_id)
        texts.append(text)
        offsets.append(text_offset)
        text_offset += len(text)
        chosen.append(_finite(position.chosen.logprob))
        most_probable = {tokenizer.token_text(t.token_id): _finite(t.logprob) for t in position.top}
        top.append({text: _finite(position.chosen.logprob)} | most_probable)
    return Logprobs(text_offset=offsets, token_logprobs=chosen, tokens=texts, top_logprobs=top)


def _chat_position(
    tokenizer: ServingTokenizer, position: PositionLogprobs
) -> ChatCompletionTokenLogprob:
    text = tokenizer.token_text(position.chosen.token_id)
    return ChatCompletionTokenLogprob(
        token=text,
        bytes=list(text.encode()),
        logprob=_finite(position.chosen.logprob),
        top_logprobs=[_top(tokenizer, token) for token in position.top],
    )


def _top(tokenizer: ServingTokenizer, token: TokenLogprob) -> TopLogprob:
    text = tokenizer.token_text(token.token_id)
    return TopLogprob(token=text, bytes=list(text.encode()), logprob=_finite(token.logprob))


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
