"""Draws a token per row of logits in static shapes: the arithmetic that every device shares.

The order of the steps is vLLM's: temperature, min_p, top_k, top_p, then the draw. The device's
sampler runs `draw_tokens`; the host's takes shorter ways to the same tokens.

**Ties.** Of equal scores the lowest token id wins. top_k keeps every token that is as probable as
the k-th; top_p sums up probabilities as multiples of 2**-30, so that the order of a sum does not
matter, and counts a target as reached within 2**-22 of it.

All operations have Gaudi kernels (``scripts/hpu_op.yaml`` of HabanaAI/gaudi-pytorch-bridge 1.19.0:
``index_select`` 3675, ``bitwise_xor`` 2090, ``bitwise_right_shift`` 2037, ``amin`` 1446, ``gather``
3109, ``log1p`` 3945), and no shape depends on values.
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
from trencadis.engine.runner.sorted_chunks import CHUNK, PROBABILITY_UNIT, SortedChunks
from trencadis.engine.runner.step import IntArray, RowRequest

NUM_FLOATS = 4
"""Words of a row that are the bits of an fp32 number. They come first."""

WORDS_PER_ROW = NUM_FLOATS + 2 + NUM_KEYS

_MIN_TEMPERATURE = 1e-5
_WITHIN = 1.0 - 2.0**-22
_LARGEST = 2**31 - 1
_LEAST_DISTANCE = 2.0**-126
"""The least normal number: smaller distances count as equal, as on devices without others."""


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


@attrs.frozen(eq=False)
class Kept:
    """The tokens that a row keeps: ``best - scaled <= limit``, both ``[rows, 1]``.

    ``best`` is the largest scaled logit.
    """

    best: torch.Tensor
    limit: torch.Tensor

    @classmethod
    def of(
        cls,
        best: torch.Tensor,
        numbers: DrawNumbers,
        limit_k: torch.Tensor,
        limit_p: torch.Tensor,
    ) -> Kept:
        """By the distances from the best that top_k and top_p reach."""
        limit_p = torch.where(numbers.top_p < 1.0, limit_p, math.inf)
        limit = torch.minimum(limit_k, limit_p).clamp_min(_LEAST_DISTANCE)
        return cls(best, torch.minimum(limit, numbers.max_distance))


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
    kept = kept_of(logits, numbers, kind) if kind >= DrawKind.TOP_P else None
    scores = draw_scores(logits, numbers, token_ids, kind, kept)
    whole = logits.shape[-1] - logits.shape[-1] % CHUNK
    if whole <= CHUNK:
        return first_largest(scores, token_ids)
    # The largest of each chunk, then its place in one chunk: the logits are read once.
    largest = scores[:, :whole].view(len(scores), -1, CHUNK).amax(-1)
    if whole < logits.shape[-1]:
        largest = torch.cat((largest, scores[:, whole:].amax(-1, keepdim=True)), dim=1)
    last = largest.shape[-1] - 1
    chunk = first_largest(largest, token_ids[:, : last + 1])
    first = (chunk.clamp_max(last) * CHUNK).clamp_max(logits.shape[-1] - CHUNK)
    ids = first[:, None] + token_ids[:, :CHUNK]
    scores = draw_scores(logits.gather(1, ids.long()), numbers, ids, kind, kept)
    return torch.where(chunk == NO_TOKEN, chunk, first_largest(scores, ids))


def draw_scores(
    logits: torch.Tensor,
    numbers: DrawNumbers,
    token_ids: torch.Tensor,
    kind: DrawKind,
    kept: Kept | None = None,
) -> torch.Tensor:
    """A score for each token; the token with the largest is drawn.

    ``logits`` are those of ``token_ids``, ``[rows or 1, tokens]``. ``kept``: None for all tokens.
    """
    if kind is DrawKind.GREEDY:
        return logits
    scaled = logits / numbers.temperature
    scores = scaled - numbers.randomness * log_times(token_ids, numbers.keys)
    if kept is None:
        return scores
    return torch.where(kept.best - scaled <= kept.limit, scores, -math.inf)


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


def kept_of(logits: torch.Tensor, numbers: DrawNumbers, kind: DrawKind) -> Kept:
    """The tokens that min_p, top_k and top_p keep, by `sorted_chunks`."""
    chunks = SortedChunks.of(logits, numbers.temperature)
    weights = chunks.weighed()
    if kind is DrawKind.TOP_K:
        limit_k = chunks.counted().reaching(numbers.top_k.clamp_max(logits.shape[-1]))
        total = weights.up_to(limit_k)
    else:
        limit_k, total = torch.full_like(chunks.best, math.inf), weights.total()
    limit_p = weights.reaching(top_p_target(numbers.top_p, total))
    return Kept.of(chunks.best, numbers, limit_k, limit_p)


def integer_probabilities(scaled: torch.Tensor) -> torch.Tensor:
    """The softmax of each row in multiples of 2**-30, int32."""
    return (torch.softmax(scaled, dim=-1) * PROBABILITY_UNIT).to(torch.int32)


def top_p_target(top_p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The sum of integer probabilities that top_p asks for, of ``total``."""
    return (top_p * total.float()).to(torch.int32)
