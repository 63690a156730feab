"""A structured output as a grammar of llguidance, and the limits of every grammar.

llguidance is imported on first use: a server without structured outputs does not need it.
"""

from __future__ import annotations

import importlib.util
import json
import re
from copy import copy
from typing import TYPE_CHECKING

from trencadis.engine.api.structured_output import FIELD, StructuredOutput
from trencadis.engine.errors import InvalidRequest
from trencadis.engine.grammars.exact_numbers import check_numbers

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerFast

_STEP_MAX_ITEMS = 20_000
"""Items of Earley's algorithm in a mask, of which llguidance's default has 50,000. A grammar of
6,000 rules took 0.1 ms for each."""

_MAX_LEXER_STATES = 20_000
"""States of a matcher's lexer, of which each takes 1 to 2 KiB. llguidance's default is 250,000."""

_WHITESPACE = r"[ \n]{0,40}"
"""Whitespace between the tokens of JSON. Without a bound, models fill an answer with it."""


def require_llguidance() -> None:
    """Raise `InvalidRequest` where llguidance is not installed."""
    if importlib.util.find_spec("llguidance") is None:
        raise InvalidRequest(
            "structured_output needs llguidance on the server: "
            "pip install 'trencadis-engine[structured]'",
            FIELD,
        )


def tokenizer_json(tokenizer: PreTrainedTokenizerFast) -> str:
    """A tokenizer as the text of its ``tokenizer.json``, without padding and truncation."""
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def saved_tokenizer_json(source: str) -> str:
    """`tokenizer_json` of the tokenizer in a directory or of a hub id.

    Raises ``ValueError`` where there is none that llguidance can use.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, KeyError, ImportError) as error:
        raise ValueError(f"the model has no usable tokenizer: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("the model has a slow tokenizer only: save its fast form (tokenizer.json)")
    return tokenizer_json(tokenizer)


def load_tokenizer(text: str, vocab_size: int, eos_token_ids: frozenset[int]) -> LLTokenizer:
    """llguidance's tokenizer for the text of a ``tokenizer.json``.

    It has at least ``vocab_size`` tokens; those that the text does not name match nothing. Without
    an end-of-sequence token, an answer ends where its grammar allows no other. Raises
    ``ValueError`` for a kind of tokenizer that llguidance does not know.
    """
    from llguidance import LLTokenizer  # noqa: PLC0415

    tokenizer = LLTokenizer(text)
    size = tokenizer.vocab_size
    eos = [token_id for token_id in sorted(eos_token_ids) if token_id < size]
    if not eos:
        # llguidance would take token 0 as the end token. The added token occurs in no text.
        text, eos = _with_token(text, size), [size]
    elif tokenizer.eos_tokens == eos and size >= vocab_size:
        return tokenizer
    return LLTokenizer(text, n_vocab=max(size, vocab_size, eos[-1] + 1), eos_token=eos)


def _with_token(text: str, token_id: int) -> str:
    """A ``tokenizer.json`` with a special token more."""
    fields = json.loads(text)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": token_id, "content": "<|no end|>", "special": True, **flags}
    fields["added_tokens"] = [*fields.get("added_tokens", ()), token]
    return json.dumps(fields)


def new_matcher(tokenizer: LLTokenizer, structured_output: StructuredOutput) -> LLMatcher:
    """A matcher at the beginning of an answer. Takes up to seconds of one core.

    Raises ``ValueError`` that says why a grammar is not valid, or beyond the limits.
    """
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415

    try:
        check_numbers(
            tokenizer,
            schema=structured_output.json_schema or "",
            grammar=structured_output.grammar or "",
        )
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error

    limits = LLParserLimits(
        step_max_items=_STEP_MAX_ITEMS, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
    )
    grammar = _as_grammar(structured_output)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(matcher_error(matcher))
    return matcher


def matcher_error(matcher: LLMatcher) -> str:
    """What a matcher that has failed says, without its dump of the parser's state."""
    return matcher.get_error().split("\n<")[0].strip()


def _as_grammar(wanted: StructuredOutput) -> str:
    from llguidance import LLMatcher, grammar_from  # noqa: PLC0415

    if wanted.json_object or wanted.json_schema is not None:
        schema = '{"type": "object"}' if wanted.json_schema is None else wanted.json_schema
        return LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_pattern": _WHITESPACE}
        )
    if wanted.choice is not None:
        # One regex is one item of the parser; an alternative of texts would be one for each.
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, wanted.choice)))
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    return grammar_from("grammar", str(wanted.grammar))
