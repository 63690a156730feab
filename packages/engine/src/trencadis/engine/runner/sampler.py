"""Samples on the host, where host and device share memory and data-dependent shapes cost nothing.

A draw depends only on the seed, the position and the logits. There is no generator state, so a
sequence that is preempted, swapped or recomputed gets the same tokens as one that is not. Order of
the steps, as in vLLM: logit bias, penalties, mask of a structured output, temperature, min_p,
top_k, top_p.

To add a sampling parameter: its range and default in `SamplingParams`; its effect in `logit_edits`
and `SampleSettings.changes_logits` if it changes single logits, else in `draw`, and here if the
short way must know it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from trencadis.engine.api.outputs import PositionLogprobs, TokenLogprob
from trencadis.engine.api.sampling_params import SamplingParams
from trencadis.engine.grammars.matcher import allowed_tokens
from trencadis.engine.runner.bisection import kept_by_bisection
from trencadis.engine.runner.draw import (
    NUM_FLOATS,
    DrawKind,
    DrawNumbers,
    draw_scores,
    first_largest,
    integer_probabilities,
    pack_numbers,
    top_p_target,
)
from trencadis.engine.runner.gumbel import log_times
from trencadis.engine.runner.logit_edits import apply_edits, find_edits
from trencadis.engine.runner.sampling_rows import (
    NO_TOKEN,
    PendingRows,
    RowResult,
    SampledToken,
)
from trencadis.engine.runner.step import IntArray, RowRequest

_NUCLEUS = 1024
"""Tokens sorted at first for top_k and top_p. The nucleus is rarely larger."""

_BLOCK = 128
"""Scores of a row among which the place of the largest is searched."""

_FEW_ROWS = 4
"""So many rows take NumPy less time than the operations of PyTorch take to be called."""

_ELEMENTS_AT_ONCE = 1 << 17
"""Logits of the rows that are computed together: their intermediate tensors stay in the cache."""


class HostSampler:
    """A `Sampler` of logits that are in host memory. It is done when `launch` returns.

    ``num_slots``: how many the next forward pass can read; 0 for none.
    """

    def __init__(self, num_slots: int = 0) -> None:
        self.sampled_ids = torch.zeros(num_slots, dtype=torch.int32) if num_slots else None

    def release(self) -> None:
        pass

    def acquire(self) -> None:
        pass

    def words(
        self, requests: Sequence[RowRequest | None], batch: int, slots: Sequence[int] = ()
    ) -> IntArray:
        words = np.zeros((batch, 0 if self.sampled_ids is None else 1), np.int32)
        if self.sampled_ids is not None:
            words[: len(slots), 0] = slots
        return words

    def launch(
        self, logits: torch.Tensor, words: torch.Tensor, requests: Sequence[RowRequest | None]
    ) -> PendingRows:
        results = [RowResult()] * len(requests)
        beams, drawn, rows = [], [], []
        for i, request in enumerate(requests):
            if request is None:
                continue
            if request.num_candidates:
                beams.append(i)
                continue
            alone = len(request.samples) == 1
            for settings in request.samples:
                drawn.append(i)
                rows.append(request if alone else request._replace(samples=(settings,)))
        if rows:
            is_each_once = drawn == list(range(len(logits)))
            sampled = sample(logits if is_each_once else _select(logits, drawn), rows)
            for i, token in zip(drawn, sampled, strict=True):
                results[i] = RowResult([*results[i].tokens, token])
            if self.sampled_ids is not None:
                slots = words[:, 0].long()[drawn]
                first = torch.tensor([results[i].tokens[0].token_id for i in drawn])
                first = first.int().masked_fill(first == NO_TOKEN, 0)
                self.sampled_ids = self.sampled_ids.index_copy(0, slots, first)
        if beams:
            asked = [request for request in requests if request and request.num_candidates]
            ranked = rank_tokens(_select(logits, beams), asked)
            for i, candidates in zip(beams, ranked, strict=True):
                results[i] = RowResult(candidates=candidates)
        return PendingRows((), lambda _: results)


def sample(logits: torch.Tensor, rows: Sequence[RowRequest]) -> list[SampledToken]:
    """Sample one token per row of ``logits``, fp32 ``[len(rows), vocabulary]``: its only sample.

    Log-probabilities are computed from the unmodified logits, as in the OpenAI API.
    """
    asked = [row.samples[0].params for row in rows]
    wanted = any(params.logprobs is not None for params in asked)
    raw = torch.log_softmax(logits, dim=-1) if wanted else None
    if any(row.samples[0].changes_logits for row in rows):
        logits = _edited(logits, rows)
    if any(row.mask is not None for row in rows):
        logits = _masked(logits, rows)
    sampled = argmax_in_blocks(logits)
    random = [i for i, row in enumerate(rows) if row.samples[0].is_random]
    if random:
        sampled[random] = _draw(_select(logits, random), [rows[i] for i in random])
    chosen = logits.gather(1, sampled.clamp_max(logits.shape[-1] - 1).unsqueeze(1)).squeeze(1)
    tokens = sampled.masked_fill(~(chosen > -math.inf), NO_TOKEN).tolist()
    if raw is None:
        return [SampledToken(token) for token in tokens]
    return [SampledToken(token, _report(raw[i], token, asked[i])) for i, token in enumerate(tokens)]


def argmax_in_blocks(scores: torch.Tensor) -> torch.Tensor:
    """``scores.argmax(-1)`` of rows ``[rows, vocabulary]``, also of equal values and NaN.

    PyTorch compares values with vectors where it returns the largest, and one by one where it
    returns its place: for 32 rows of 49,152 scores that takes seven times as long. NumPy uses
    vectors for both, on one thread.
    """
    rows, size = scores.shape
    if size < 2 * _BLOCK:
        return scores.argmax(-1)
    if rows <= _FEW_ROWS:
        return torch.from_numpy(scores.numpy().argmax(-1))
    whole = size - size % _BLOCK
    largest = scores[:, :whole].reshape(-1, whole // _BLOCK, _BLOCK).amax(-1)
    if whole < size:
        largest = torch.cat((largest, scores[:, whole:].amax(-1, keepdim=True)), -1)
    first = largest.argmax(-1, keepdim=True) * _BLOCK
    # After the last score it is repeated, and the first of equal values counts.
    ids = (first + torch.arange(_BLOCK)).clamp_max(size - 1)
    places = scores.gather(1, ids).argmax(-1, keepdim=True)
    return ids.gather(1, places)[:, 0]


def rank_tokens(logits: torch.Tensor, rows: Sequence[RowRequest]) -> list[list[tuple[int, float]]]:
    """The candidates of each beam with their log-probabilities, best first.

    ``logits`` is fp32 ``[len(rows), vocabulary]``. Bias, minimum length and penalties are applied
    to the log-probabilities, after the softmax, as in the beam search of ``transformers``.
    """
    scores = _edited(torch.log_softmax(logits, dim=-1), rows)
    most = max(row.num_candidates for row in rows)
    values, ids = scores.topk(min(most, scores.shape[-1]), dim=-1)
    return [
        list(zip(tokens, logprobs, strict=True))[: row.num_candidates]
        for tokens, logprobs, row in zip(ids.tolist(), values.tolist(), rows, strict=True)
    ]


def _edited(logits: torch.Tensor, rows: Sequence[RowRequest]) -> torch.Tensor:
    """Logits with bias, minimum length and penalties applied; a copy where a row has any."""
    edits = find_edits(rows)
    for packed in edits.packed(len(edits)):
        logits = apply_edits(logits, torch.from_numpy(packed))
    return logits


def _masked(logits: torch.Tensor, rows: Sequence[RowRequest]) -> torch.Tensor:
    """A copy of the logits with minus infinity for tokens that the mask of a row excludes."""
    masked = [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None]
    words = np.stack([mask.words() for _, mask in masked])
    allowed = torch.from_numpy(allowed_tokens(words, logits.shape[-1]))
    if len(masked) == len(rows):
        return torch.where(allowed, logits, -math.inf)
    numbers = [i for i, _ in masked]
    logits = logits.clone()
    logits[numbers] = torch.where(allowed, logits[numbers], -math.inf)
    return logits


def _draw(logits: torch.Tensor, rows: Sequence[RowRequest]) -> torch.Tensor:
    """Draw one token per row."""
    words = torch.from_numpy(pack_numbers(rows, len(rows)))
    numbers = DrawNumbers.unpack(words, words[:, :NUM_FLOATS].view(torch.float32))
    kinds = np.array([DrawKind.of(row.samples[0].params) for row in rows])
    tokens = torch.empty(len(rows), dtype=torch.long)
    for kind in set(kinds.tolist()):
        of_kind = np.flatnonzero(kinds == kind).tolist()
        given = _select(logits, of_kind), numbers.rows(torch.tensor(of_kind))
        draw = _draw_limited if kind >= DrawKind.TOP_P else _draw_from_all
        tokens[of_kind] = draw(*given, DrawKind(kind))
    return tokens


def _draw_from_all(logits: torch.Tensor, numbers: DrawNumbers, kind: DrawKind) -> torch.Tensor:
    """Draw with the arithmetic of every device, a few rows at a time."""
    token_ids = torch.arange(logits.shape[-1], dtype=torch.int32)[None]
    drawn = []
    for rows in _few_rows(logits):
        few, their = logits[rows], numbers.rows(rows)
        kept = kept_by_bisection(few, their, kind) if kind >= DrawKind.TOP_P else None
        drawn.append(argmax_in_blocks(draw_scores(few, their, token_ids, kind, kept)))
    return torch.cat(drawn)


def _draw_limited(logits: torch.Tensor, numbers: DrawNumbers, kind: DrawKind) -> torch.Tensor:
    """Draw from the `_NUCLEUS` most probable tokens, where every token that is kept is of them."""
    nuclei = [
        _Nucleus.of(logits[rows] / numbers.temperature[rows], numbers.top_p[rows])
        for rows in _few_rows(logits)
    ]
    tokens, enough = _draw_from(_Nucleus.join(nuclei), numbers)
    if not enough.all():
        wide = (~enough).nonzero().squeeze(1)
        tokens[wide] = _draw_from_all(logits[wide], numbers.rows(wide), kind)
    return tokens


@attrs.frozen(eq=False)
class _Nucleus:
    """The most probable tokens of rows, in order, ``[rows, n]``, of ``vocabulary`` tokens.

    ``weights`` are integer probabilities, ``total`` ``[rows, 1]`` is their sum over the vocabulary.
    They are 0 where no row needs them.
    """

    scaled: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    total: torch.Tensor
    vocabulary: int

    @classmethod
    def of(cls, scaled: torch.Tensor, top_p: torch.Tensor) -> _Nucleus:
        vocabulary = scaled.shape[-1]
        ordered, ids = scaled.topk(min(_NUCLEUS, vocabulary), dim=-1)
        weights, total = torch.zeros_like(ids), torch.zeros_like(ids[:, :1])
        if bool((top_p < 1.0).any()):
            probabilities = integer_probabilities(scaled)
            weights = probabilities.gather(1, ids)
            total = probabilities.sum(-1, keepdim=True, dtype=torch.int32)
        return cls(ordered, ids, weights, total, vocabulary)

    @classmethod
    def join(cls, nuclei: Sequence[_Nucleus]) -> _Nucleus:
        """The rows of all."""
        return cls(
            torch.cat([nucleus.scaled for nucleus in nuclei]),
            torch.cat([nucleus.ids for nucleus in nuclei]),
            torch.cat([nucleus.weights for nucleus in nuclei]),
            torch.cat([nucleus.total for nucleus in nuclei]),
            nuclei[0].vocabulary,
        )


def _draw_from(nucleus: _Nucleus, numbers: DrawNumbers) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from a nucleus. Also returns for which rows it has every token that is kept."""
    distance = nucleus.scaled[:, :1] - nucleus.scaled
    width, vocabulary = distance.shape[-1], nucleus.vocabulary
    has_kth = (numbers.top_k <= width) & (numbers.top_k < vocabulary)
    kth = distance.gather(1, (numbers.top_k.clamp_max(width) - 1).long())
    limit = torch.where(has_kth, kth, math.inf)
    reached = (nucleus.weights * (distance <= limit)).cumsum(-1)
    total = torch.where(has_kth, reached[:, -1:], nucleus.total).to(torch.int32)
    before = (reached < top_p_target(numbers.top_p, total)).sum(-1, keepdim=True)
    last = distance.gather(1, before.clamp_max(width - 1))
    limit = torch.where((numbers.top_p < 1.0) & (before < width), last.minimum(limit), limit)
    limit = torch.minimum(limit, numbers.max_distance)
    token_ids = nucleus.ids.to(torch.int32)
    scores = nucleus.scaled - log_times(token_ids, numbers.keys)
    drawn = first_largest(torch.where(distance <= limit, scores, -math.inf), token_ids).long()
    if width == vocabulary:
        return drawn, torch.ones(len(drawn), dtype=torch.bool)
    # Where top_k is beyond the nucleus, top_p has no total to refer to.
    counted = has_kth | (numbers.top_k >= vocabulary)
    return drawn, (counted & (distance[:, -1:] > limit)).squeeze(1)


def _few_rows(logits: torch.Tensor) -> list[slice]:
    """The rows in parts of `_ELEMENTS_AT_ONCE` logits."""
    count = max(1, _ELEMENTS_AT_ONCE // logits.shape[-1])
    return [slice(start, start + count) for start in range(0, len(logits), count)]


def _report(logprobs: torch.Tensor, token: int, params: SamplingParams) -> PositionLogprobs | None:
    if params.logprobs is None or token == NO_TOKEN:
        return None
    if params.logprob_token_ids:
        ids = torch.tensor(params.logprob_token_ids)
        values = logprobs[ids]
    else:
        values, ids = logprobs.topk(params.logprobs)
    top = zip(ids.tolist(), values.tolist(), strict=True)
    return PositionLogprobs(
        TokenLogprob(token, float(logprobs[token])),
        tuple(TokenLogprob(i, value) for i, value in top),
    )


def _select(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """``logits[rows]``, without a copy where the rows are adjacent."""
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):
        return logits[rows[0] : rows[0] + len(rows)]
    return logits[rows]
