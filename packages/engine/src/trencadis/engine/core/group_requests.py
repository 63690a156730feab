"""A request of the API as the scheduler takes it: one group of sequences, or several."""

from __future__ import annotations

import attrs

from trencadis.engine.sampling_params import SamplingParams
from trencadis.scheduler import BeamSearch, Request


def as_request(
    key: str,
    prompt_token_ids: tuple[int, ...],
    params: SamplingParams,
    priority: int,
    room: int,
    eos_token_ids: frozenset[int],
) -> Request:
    """One group under ``key``; ``room`` are the tokens that the model's context leaves."""
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
        max_tokens=room if params.max_tokens is None else params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=eos_token_ids | frozenset(params.stop_token_ids),
        n=params.n,
        best_of=None if params.use_beam_search else params.best_of,
        beam_search=beams,
        priority=priority,
    )


def in_parts(whole: Request, most: int) -> list[Request]:
    """Groups of ``most`` samples where a request wants more of them than may run at once."""
    if whole.n <= most:
        return [whole]
    sizes = {first: min(most, whole.n - first) for first in range(0, whole.n, most)}
    return [
        attrs.evolve(whole, request_id=f"{whole.request_id}#{first}", n=size, best_of=None)
        for first, size in sizes.items()
    ]
