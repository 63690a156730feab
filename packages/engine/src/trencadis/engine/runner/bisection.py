"""Finds how far below the best token top_k and top_p reach, on the host.

A limit is found by bisection over the bits of a distance, 31 sums of each row. On the CPU that is
faster than the sorts of `sorted_chunks`, which gives the same limits; only rows with large nuclei
come here.
"""

from __future__ import annotations

import math

import torch

from trencadis.engine.runner.draw import (
    DrawKind,
    DrawNumbers,
    Kept,
    integer_probabilities,
    top_p_target,
)

_EXPONENT_BITS, _FRACTION_BITS, _EXPONENT_BIAS = 8, 23, 127


def kept_by_bisection(logits: torch.Tensor, numbers: DrawNumbers, kind: DrawKind) -> Kept:
    """The tokens of ``logits`` fp32 ``[rows, vocabulary]`` that min_p, top_k and top_p keep."""
    scaled = logits / numbers.temperature
    best = scaled.amax(-1, keepdim=True)
    distance, weights = best - scaled, integer_probabilities(scaled)
    limit_k = torch.full_like(best, math.inf)
    if kind is DrawKind.TOP_K:
        k = numbers.top_k.clamp_max(distance.shape[-1])
        limit_k = _limit(distance, torch.ones_like(weights), k)
        weights = weights * (distance <= limit_k)
    total = weights.sum(-1, keepdim=True, dtype=torch.int32)
    limit_p = _limit(distance, weights, top_p_target(numbers.top_p, total))
    return Kept.of(best, numbers, limit_k, limit_p)


def _limit(distance: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The least limit ``[rows, 1]`` for which the weights of distances up to it reach ``target``.

    The bits of the limit are found from the highest on, each as the float that it adds: first the
    exponent, then the fraction. Distances below 2**-126 count as equal.
    """
    limit = torch.zeros_like(distance[:, :1])
    for position in reversed(range(_EXPONENT_BITS)):
        size = 1 << position
        raised = limit * 2.0 ** min(size, _EXPONENT_BIAS)
        tried = torch.where(limit > 0, raised, 2.0 ** (size - _EXPONENT_BIAS))
        limit = _raised(limit, tried, distance, weights, target)
    power = limit
    for position in range(1, _FRACTION_BITS + 1):
        tried = limit + power * 2.0**-position
        limit = _raised(limit, tried, distance, weights, target)
    return limit


def _raised(
    limit: torch.Tensor,
    tried: torch.Tensor,
    distance: torch.Tensor,
    weights: torch.Tensor,
    target: torch.Tensor,
) -> torch.Tensor:
    """``tried`` where the weights below it do not reach ``target``, else ``limit``."""
    # On the CPU a product with a mask takes a tenth of the time of `torch.where`.
    reached = (weights * (distance < tried)).sum(-1, keepdim=True, dtype=torch.int32)
    return torch.where(reached >= target, limit, tried)
