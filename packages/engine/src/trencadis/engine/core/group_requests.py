"""Converts an API request into the scheduler's requests: one sequence group, or several."""

from __future__ import annotations

import attrs

from trencadis.engine.sampling_params import SamplingParams
from trencadis.scheduler import BeamSearch, Request


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
