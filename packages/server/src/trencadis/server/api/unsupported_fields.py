"""Fields that OpenAI or vLLM define and this server does not offer.

To ignore one of them would answer a question that the client did not ask, so it is refused by
name, unless its value asks for nothing (null always does).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trencadis.engine import InvalidRequest

logger = logging.getLogger(__name__)

_NOTHING: tuple[Any, ...] = ()

_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "reasoning_effort": _NOTHING,
    "verbosity": _NOTHING,
    "web_search_options": _NOTHING,
    "moderation": _NOTHING,
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    # vLLM's
    "add_special_tokens": (False,),
    "allowed_token_ids": _NOTHING,
    "bad_words": ([],),
    "cache_salt": _NOTHING,
    "chat_template": _NOTHING,
    "documents": ([],),
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "kv_transfer_params": _NOTHING,
    "logits_processors": ([],),
    "logprob_token_ids": _NOTHING,
    "mm_processor_kwargs": _NOTHING,
    "prompt_embeds": _NOTHING,
    "prompt_logprobs": _NOTHING,
    "repetition_detection": _NOTHING,
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": _NOTHING,
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": _NOTHING,
    "vllm_xargs": _NOTHING,
}

_IGNORED = frozenset(
    {
        *("user", "metadata", "store", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls", "include_reasoning", "request_id"),
    }
)
"""Defined by OpenAI or vLLM, and without any effect on the answer of a text model."""


def refuse_unsupported(undeclared: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for the first field that asks for something this server lacks."""
    for name, value in undeclared.items():
        accepted = _ASKS_FOR_NOTHING.get(name)
        if accepted is not None and value is not None and value not in accepted:
            raise InvalidRequest(f"{name} is not supported by this server: leave it out", name)
    unknown = [name for name in undeclared if name not in _ASKS_FOR_NOTHING.keys() | _IGNORED]
    if unknown:
        logger.debug("ignored unknown request fields: %s", ", ".join(map(repr, unknown)))
