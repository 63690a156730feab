"""Checks a request against the model's limits before it is queued."""

from __future__ import annotations

from trencadis.engine.errors import InvalidRequest
from trencadis.engine.sampling_params import SamplingParams


def check_request(
    prompt_token_ids: tuple[int, ...], params: SamplingParams, vocab_size: int, max_model_len: int
) -> None:
    """Raise `InvalidRequest`, naming the field, for a request that this model cannot serve."""
    length = len(prompt_token_ids)
    if length == 0:
        raise InvalidRequest("the prompt is empty: give at least one token", "prompt")
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= vocab_size:
        raise InvalidRequest(
            f"token ids of the prompt must be from 0 to {vocab_size - 1}", "prompt"
        )
    if length >= max_model_len:
        raise InvalidRequest(
            f"the prompt has {length} tokens and the model's context is {max_model_len}, of which "
            "at least one is needed for the output: shorten the prompt",
            "prompt",
        )
    if params.max_tokens is not None and length + params.max_tokens > max_model_len:
        raise InvalidRequest(
            f"max_tokens {params.max_tokens} and a prompt of {length} tokens exceed the model's "
            f"context of {max_model_len}: lower max_tokens to {max_model_len - length}",
            "max_tokens",
        )
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if any(not 0 <= token < vocab_size for token in ids):
            raise InvalidRequest(f"{name} has token ids past the vocabulary of {vocab_size}", name)
