"""Log-probabilities in the two shapes that the OpenAI API gives them."""

from __future__ import annotations

from collections.abc import Iterable

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs

from trencadis.engine import PositionLogprobs, TokenLogprob
from trencadis.server.engine_protocol import ServingTokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON lacks: what OpenAI and vLLM report."""


def chat_logprobs(
    tokenizer: ServingTokenizer, positions: Iterable[PositionLogprobs]
) -> list[ChatCompletionTokenLogprob]:
    """One entry per generated token, as chat completions report them."""
    return [_chat_position(tokenizer, position) for position in positions]


def completion_logprobs(
    tokenizer: ServingTokenizer, positions: Iterable[PositionLogprobs], text_offset: int
) -> Logprobs:
    """Parallel lists over the generated tokens, as completions report them.

    ``text_offset`` is where, in characters, the first of these tokens stands in its answer. The
    chosen token is among the top ones even where it is not one of the most likely.
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
        likely = {tokenizer.token_text(t.token_id): _finite(t.logprob) for t in position.top}
        top.append({text: _finite(position.chosen.logprob)} | likely)
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
    return logprob if logprob > LOWEST else LOWEST
