"""Checks an API request, and converts it into the scheduler's: one sequence group, or several."""

from __future__ import annotations

import attrs

from trencadis.engine.errors import InvalidRequest
from trencadis.engine.sampling_params import SamplingParams
from trencadis.scheduler import BeamSearch, Request


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


def as_request(
    key: str,
    prompt_token_ids: tuple[int, ...],
    params: SamplingParams,
    priority: int,
    max_new_tokens: int,
    eos_token_ids: frozenset[int],
) -> Request:
    """One scheduler request with id ``key``.

    ``max_new_tokens`` is the number of output tokens that the model's context leaves; it applies
    where ``params`` sets no limit.
    """
    beams = None
    if params.use_beam_search:
        beams = BeamSearch(
            width=params.num_seqs,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
    return Request(
        request_id=key,
        prompt_token_ids=prompt_token_ids,
        max_tokens=max_new_tokens if params.max_tokens is None else params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=eos_token_ids | frozenset(params.stop_token_ids),
        n=params.n,
        best_of=None if params.use_beam_search else params.best_of,
        beam_search=beams,
        priority=priority,
    )


def split_samples(request: Request, max_group_size: int) -> list[Request]:
    """Split a request for n samples into groups of at most ``max_group_size`` samples."""
    if request.n <= max_group_size:
        return [request]
    starts = range(0, request.n, max_group_size)
    return [
        attrs.evolve(
            request,
            request_id=f"{request.request_id}#{start}",
            n=min(max_group_size, request.n - start),
            best_of=None,
        )
        for start in starts
    ]
