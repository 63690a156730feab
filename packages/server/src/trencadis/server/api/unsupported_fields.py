"""Request fields that OpenAI or vLLM defines and this server does not support.

Such a field is an error, because the answer would not be what the client asked for. A value that
has no effect, such as null or an empty list, is accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trencadis.engine import InvalidRequest

logger = logging.getLogger(__name__)

_NULL_ONLY: tuple[Any, ...] = ()

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": _NULL_ONLY,
    "prediction": _NULL_ONLY,
    "reasoning_effort": _NULL_ONLY,
    "verbosity": _NULL_ONLY,
    "web_search_options": _NULL_ONLY,
    "moderation": _NULL_ONLY,
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    # vLLM
    "add_special_tokens": (False,),
    "allowed_token_ids": _NULL_ONLY,
    "bad_words": ([],),
    "chat_template": _NULL_ONLY,
    "documents": ([],),
    "guided_whitespace_pattern": _NULL_ONLY,
    "kv_transfer_params": _NULL_ONLY,
    "logits_processors": ([],),
    "logprob_token_ids": _NULL_ONLY,
    "mm_processor_kwargs": _NULL_ONLY,
    "prompt_embeds": _NULL_ONLY,
    "prompt_logprobs": _NULL_ONLY,
    "repetition_detection": _NULL_ONLY,
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": _NULL_ONLY,
    "vllm_xargs": _NULL_ONLY,
}
"""Unsupported fields, each with the values (besides null) that have no effect."""

_IGNORED = frozenset(
    {
        *("user", "metadata", "store", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls", "include_reasoning", "request_id"),
    }
)
"""Fields that OpenAI or vLLM defines and that do not affect the output of a text model."""


def refuse_unsupported(undeclared: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for the first unsupported field that has an effect.

    ``undeclared`` are the fields of a request that its model does not declare.
    """
    for name, value in undeclared.items():
        accepted = _UNSUPPORTED.get(name)
        if accepted is not None and value is not None and value not in accepted:
            raise InvalidRequest(f"{name} is not supported by this server: leave it out", name)
    unknown = [name for name in undeclared if name not in _UNSUPPORTED.keys() | _IGNORED]
    if unknown:
        logger.debug("ignored unknown request fields: %s", ", ".join(map(repr, unknown)))
