"""Draws a token per row of logits in static shapes: the arithmetic that every device shares.

The order of the steps is vLLM's: temperature, min_p, top_k, top_p, then the draw. The device's
sampler runs `draw_tokens`; the host's takes shorter ways to the same tokens.

**Ties.** Of equal scores the lowest token id wins. top_k keeps every token that is as probable as
the k-th; top_p sums up probabilities as multiples of 2**-30, so that the order of a sum does not
matter, and counts a target as reached within 2**-22 of it.

A limit is found by bisection over the bits of a distance, 31 sums of each row: no sort, no scatter
and no shape that depends on values. All operations have Gaudi kernels (``scripts/hpu_op.yaml`` of
HabanaAI/gaudi-pytorch-bridge 1.19.0: ``index_select`` 3675, ``bitwise_xor`` 2090,
``bitwise_right_shift`` 2037, ``sum`` 6411 with Int, ``amin`` 1446, ``log1p`` 3945).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from trencadis.engine.api.sampling_params import SamplingParams
from trencadis.engine.runner.gumbel import NUM_KEYS, draw_keys, log_times
from trencadis.engine.runner.sampling_rows import NO_TOKEN
from trencadis.engine.runner.step import IntArray, RowRequest

NUM_FLOATS = 4
"""Words of a row that are the bits of an fp32 number. They come first."""

WORDS_PER_ROW = NUM_FLOATS + 2 + NUM_KEYS

_MIN_TEMPERATURE = 1e-5
_UNIT = 2.0**30
"""A probability of 1 as an integer. Sums of a vocabulary's rounded parts stay below 2**31."""

_WITHIN = 1.0 - 2.0**-22
_LARGEST = 2**31 - 1
_EXPONENT_BITS, _FRACTION_BITS, _EXPONENT_BIAS = 8, 23, 127


class DrawKind(enum.IntEnum):
    """What the rows of a batch need; each kind includes the ones before it.

    ``RANDOM`` draws from all tokens; ``TOP_P`` also limits them by min_p and top_p, ``TOP_K`` by
    all three.
    """

    GREEDY = 0
    RANDOM = 1
    TOP_P = 2
    TOP_K = 3

    @staticmethod
    def of(params: SamplingParams) -> DrawKind:
        """The least kind that computes a row with these parameters."""
        if params.greedy:
            return DrawKind.GREEDY
        if params.top_k > 0:
            return DrawKind.TOP_K
        limited = params.top_p < 1.0 or params.min_p > 0.0
        return DrawKind.TOP_P if limited else DrawKind.RANDOM


@attrs.frozen(eq=False)
class DrawNumbers:
    """The numbers of each row's draw: ``[rows, 1]``, keys ``[rows, NUM_KEYS]``.

    ``randomness`` is 0 for greedy rows, else 1. ``max_distance``: how far below the largest scaled
    logit min_p keeps a token.
    """

    temperature: torch.Tensor
    randomness: torch.Tensor
    max_distance: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def unpack(cls, words: torch.Tensor, floats: torch.Tensor) -> DrawNumbers:
        """The numbers in ``words``, int32 ``[rows, WORDS_PER_ROW]`` of `pack_numbers`.

        ``floats``: the first `NUM_FLOATS` of each row as fp32. A program has them of `floats_of`.
        """
        temperature, randomness, distance, top_p = (floats[:, i : i + 1] for i in range(4))
        return cls(temperature, randomness, distance, top_p, words[:, 4:5], words[:, 5:-1])

    def rows(self, rows: torch.Tensor | slice) -> DrawNumbers:
        """The numbers of some rows."""
        return DrawNumbers(*(getattr(self, field.name)[rows] for field in attrs.fields(type(self))))


def slots_of(words: torch.Tensor) -> torch.Tensor:
    """The slot of each row in ``words`` of `pack_numbers`, int64 ``[rows]``."""
    return words[:, -1].long()


def pack_numbers(
    rows: Sequence[RowRequest | None], batch: int, slots: Sequence[int] = ()
) -> IntArray:
    """int32 ``[batch, WORDS_PER_ROW]``, for the first sample of each row.

    A row that is missing or None is greedy. ``slots`` are those of the first rows, see `Sampler`.
    """
    words = np.zeros((batch, WORDS_PER_ROW), np.int32)
    floats = words[:, :4].view(np.float32)
    floats[:] = 1.0, 0.0, math.inf, 1.0
    words[:, 4] = _LARGEST
    words[: len(slots), -1] = slots
    for i, row in enumerate(rows):
        if row is None or not row.samples[0].is_random:
            continue
        params = row.samples[0].params
        distance = -math.log(params.min_p) if params.min_p else math.inf
        top_p = params.top_p if params.top_p >= 1.0 else params.top_p * _WITHIN
        floats[i] = max(params.temperature, _MIN_TEMPERATURE), 1.0, distance, top_p
        if params.top_k > 0:
            words[i, 4] = params.top_k
        words[i, 5:-1] = draw_keys(row.samples[0].seed, row.num_output_tokens)
    return words


def draw_tokens(
    logits: torch.Tensor, numbers: DrawNumbers, token_ids: torch.Tensor, kind: DrawKind
) -> torch.Tensor:
    """One token id per row, int32 ``[rows]``, from fp32 logits ``[rows, vocabulary]``.

    ``token_ids`` is ``[1, vocabulary]``, 0 to vocabulary - 1.
    """
    return first_largest(draw_scores(logits, numbers, token_ids, kind), token_ids)


def draw_scores(
    logits: torch.Tensor, numbers: DrawNumbers, token_ids: torch.Tensor, kind: DrawKind
) -> torch.Tensor:
    """A score for each token; the token with the largest is drawn."""
    if kind is DrawKind.GREEDY:
        return logits
    scaled = logits / numbers.temperature
    scores = scaled - numbers.randomness * log_times(token_ids, numbers.keys)
    if kind is DrawKind.RANDOM:
        return scores
    distance = scaled.amax(-1, keepdim=True) - scaled
    kept = _keep_top(distance, numbers, integer_probabilities(scaled), kind)
    return torch.where(kept & (distance <= numbers.max_distance), scores, -math.inf)


def first_largest(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The lowest of the token ids with the largest score, int32 ``[rows]``.

    `NO_TOKEN` for a row whose largest score is NaN or minus infinity.

    ``argmax`` promises the first of equal values on PyTorch's own devices; Gaudi's kernel does not
    say. Ids are exact in fp32 up to 2**24.
    """
    best = scores.amax(-1, keepdim=True)
    largest = (scores == best) & (best > -math.inf)
    found = torch.where(largest, token_ids.float(), float(NO_TOKEN)).amin(-1)
    return found.to(torch.int32)


def integer_probabilities(scaled: torch.Tensor) -> torch.Tensor:
    """The softmax of each row in multiples of 2**-30, int32."""
    return (torch.softmax(scaled, dim=-1) * _UNIT).to(torch.int32)


def top_p_target(top_p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The sum of integer probabilities that top_p asks for, of ``total``."""
    return (top_p * total.float()).to(torch.int32)


def _keep_top(
    distance: torch.Tensor, numbers: DrawNumbers, weights: torch.Tensor, kind: DrawKind
) -> torch.Tensor:
    """Mask of the tokens that top_k, and then top_p, keep."""
    if kind is DrawKind.TOP_K:
        k = numbers.top_k.clamp_max(distance.shape[-1])
        limit_k = _limit(distance, torch.ones_like(weights), k)
        weights = weights * (distance <= limit_k)
    total = weights.sum(-1, keepdim=True, dtype=torch.int32)
    limit = _limit(distance, weights, top_p_target(numbers.top_p, total))
    limit = torch.where(numbers.top_p < 1.0, limit, math.inf)
    if kind is DrawKind.TOP_K:
        limit = torch.minimum(limit, limit_k)
    return distance <= limit


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
    return torch.where(limit > 0, limit, 2.0 ** (1 - _EXPONENT_BIAS))


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
