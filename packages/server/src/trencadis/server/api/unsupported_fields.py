"""Request fields that OpenAI or vLLM defines and this server does not support.

Such a field is an error, because the answer would not be what the client asked for. A value that
has no effect, such as null or an empty list, is accepted.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import Self

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
    "verbosity": ("medium",),
    "web_search_options": _NULL_ONLY,
    "moderation": _NULL_ONLY,
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "suffix": ("",),
    # vLLM
    "chat_template": _NULL_ONLY,
    "guided_whitespace_pattern": _NULL_ONLY,
    "kv_transfer_params": _NULL_ONLY,
    "logits_processors": ([],),
    "mm_processor_kwargs": _NULL_ONLY,
    "prompt_embeds": _NULL_ONLY,
    "prompt_logprobs": _NULL_ONLY,
    "repetition_detection": _NULL_ONLY,
    "return_prompt_text": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "vllm_xargs": _NULL_ONLY,
    "watermarking": (False,),
}
"""Unsupported fields, each with the values (besides null) that have no effect."""

UNSUPPORTED_POOLING: dict[str, tuple[Any, ...]] = {
    # vLLM
    "messages": ([],),
    "chat_template": _NULL_ONLY,
    "mm_processor_kwargs": _NULL_ONLY,
    "normalize": (True,),
    "activation": (True,),
    "softmax": (True,),
    "use_activation": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "truncation_side": ("right",),
    # Cohere and Jina
    "embedding_type": ("float", "base64"),
    "input_type": _NULL_ONLY,
    "late_chunking": (False,),
    "max_chunks_per_doc": _NULL_ONLY,
    "normalized": (True,),
    "rank_fields": ([],),
    "task": _NULL_ONLY,
    "images": ([],),
    "inputs": ([],),
}
"""As above, of requests for embeddings and scores."""

_IGNORED = frozenset(
    {
        *("user", "metadata", "store", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls"),
        "include_reasoning",
    }
)
"""Fields that OpenAI or vLLM defines and that do not affect the output of a text model."""


def refuse_unsupported(
    undeclared: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]] = _UNSUPPORTED
) -> None:
    """Raise `InvalidRequest` for the first unsupported field that has an effect.

    ``undeclared`` are the fields of a request that its model does not declare.
    """
    for name, value in undeclared.items():
        accepted = unsupported.get(name)
        if accepted is not None and value is not None and value not in accepted:
            raise InvalidRequest(f"{name} is not supported by this server: leave it out", name)
    if logger.isEnabledFor(logging.DEBUG):
        unknown = [name for name in undeclared if name not in unsupported and name not in _IGNORED]
        logger.debug("ignored unknown request fields: %s", reprlib.repr(unknown))


def refuse_undeclared(
    undeclared: Mapping[str, Any] | None,
    ignored: Collection[str] = (),
    *,
    accepted: Mapping[str, tuple[Any, ...]] | None = None,
    nested: bool = False,
) -> None:
    """Raise `InvalidRequest` for the first field that has an effect and is not in ``ignored``.

    ``undeclared``: as above; all of them, unlike above, also those that no API defines. Null, false
    and empty values have no effect, nor have those that ``accepted`` lists for a field.
    ``nested``: they are fields of a part of the request, whose path the error will have.
    """
    for name, value in (undeclared or {}).items():
        without_effect = (None, False, "", [], {}, *(accepted or {}).get(name, ()))
        if name not in ignored and value not in without_effect:
            message = f"{name} is not supported by this server: leave it out"
            raise InvalidRequest(message, None if nested else name)


class RequestPart(BaseModel):
    """A part of a request, without fields that it does not declare and that have an effect.

    ``ignored``: further fields that have none.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    ignored: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _check_undeclared(self) -> Self:
        refuse_undeclared(self.model_extra, self.ignored, nested=True)
        return self
