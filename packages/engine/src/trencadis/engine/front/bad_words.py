"""The tokens of the words that an answer must not have, which the tokenizer alone knows."""

from __future__ import annotations

from typing import TypeVar

import attrs

from trencadis.engine.api.requests import EngineRequest, GenerateRequest
from trencadis.engine.front.tokenizer import Tokenizer

RequestT = TypeVar("RequestT", bound=EngineRequest)


def with_bad_tokens(request: RequestT, tokenizer: Tokenizer) -> RequestT:
    """``request`` with token ids in place of the texts of its ``params.bad_words``.

    A text is tokenized alone and after a space: it may begin an answer, and go on in one. Two
    hundred words take some milliseconds.
    """
    if not isinstance(request, GenerateRequest) or not request.params.bad_words:
        return request
    tokens: dict[tuple[int, ...], None] = {}
    for word in request.params.bad_words:
        if not isinstance(word, str):
            tokens[word] = None
            continue
        for text in (word, f" {word.lstrip(' ')}"):
            tokens[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    tokens.pop((), None)
    return attrs.evolve(request, params=attrs.evolve(request.params, bad_words=tuple(tokens)))
