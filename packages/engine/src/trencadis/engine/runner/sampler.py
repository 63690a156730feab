"""Samples the next token of each sequence from its logits.

A draw depends only on the seed, the position and the logits. There is no generator state, so a
sequence that is preempted, swapped or recomputed gets the same tokens as one that is not. Order of
the steps, as in vLLM: logit bias, penalties, temperature, min_p, top_k, top_p.

To add a sampling parameter: its range and default in `SamplingParams`, its effect here.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from trencadis.engine.outputs import PositionLogprobs, TokenLogprob
from trencadis.engine.sampling_params import SamplingParams

_NUCLEUS = 1024
"""Tokens sorted at first for top_p. The nucleus is rarely larger, and a full sort is slow."""


@attrs.frozen(eq=False)
class SamplingRow:
    """The sampler's input for one row of logits: the sequence's parameters, seed and tokens."""

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    eos_token_ids: frozenset[int] = frozenset()


@attrs.frozen
class SampledToken:
    """A sampled token, with log-probabilities where the request asked for them."""

    token_id: int
    logprobs: PositionLogprobs | None = None


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Sample one token per row of ``logits``, ``[len(rows), vocabulary]``.

    Log-probabilities are computed from the unmodified logits, as in the OpenAI API.
    """
    random: list[int] = []
    wants_logprobs = False
    for i, row in enumerate(rows):
        if not row.params.greedy:
            random.append(i)
        if row.params.logprobs is not None:
            wants_logprobs = True
    logits = logits.float()
    raw = torch.log_softmax(logits, dim=-1) if wants_logprobs else None
    logits = _adjust(logits, rows)
    sampled = logits.argmax(dim=-1)
    if random:
        sampled[random] = _draw(logits[random], [rows[i] for i in random])
    tokens = sampled.tolist()
    if raw is None:
        return [SampledToken(token) for token in tokens]
    return [
        SampledToken(token, _report(raw[i], token, rows[i].params.logprobs))
        for i, token in enumerate(tokens)
    ]


def rank_tokens(
    logits: torch.Tensor, rows: Sequence[SamplingRow], counts: Sequence[int]
) -> list[list[tuple[int, float]]]:
    """The most probable next tokens of each row with their log-probabilities, best first.

    ``logits`` is ``[len(rows), vocabulary]``; ``counts`` is the number of tokens for each row.
    Bias, minimum length and penalties are applied to the log-probabilities, after the softmax, as
    in the beam search of ``transformers``.
    """
    scores = _adjust(torch.log_softmax(logits.float(), dim=-1), rows)
    values, ids = scores.topk(min(max(counts), scores.shape[-1]), dim=-1)
    return [
        list(zip(tokens[:count], logprobs[:count], strict=True))
        for tokens, logprobs, count in zip(ids.tolist(), values.tolist(), counts, strict=True)
    ]


def _adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Logits with bias, minimum length and penalties applied; a copy where a row has any."""
    adjusted: torch.Tensor | None = None
    for i, row in enumerate(rows):
        params = row.params
        too_short = len(row.output_token_ids) < params.min_tokens
        repetition = params.repetition_penalty != 1.0
        counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        if not (params.logit_bias or too_short or repetition or counts):
            continue
        if adjusted is None:
            adjusted = logits.clone()
        if params.logit_bias:
            _add_bias(adjusted[i], row)
        if too_short:
            _forbid_stop(adjusted[i], row)
        if repetition:
            _penalise_repetition(adjusted[i], row)
        if counts:
            _penalise_counts(adjusted[i], row)
    return logits if adjusted is None else adjusted


def _add_bias(logits: torch.Tensor, row: SamplingRow) -> None:
    ids = _ids(row.params.logit_bias, logits)
    logits[ids] += torch.tensor(list(row.params.logit_bias.values()), device=logits.device)


def _forbid_stop(logits: torch.Tensor, row: SamplingRow) -> None:
    logits[_ids({*row.eos_token_ids, *row.params.stop_token_ids}, logits)] = -math.inf


def _penalise_repetition(logits: torch.Tensor, row: SamplingRow) -> None:
    """Divide positive and multiply negative logits of seen tokens (CTRL, Keskar et al., 2019)."""
    ids = _ids({*row.prompt_token_ids, *row.output_token_ids}, logits)
    seen, penalty = logits[ids], row.params.repetition_penalty
    logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _penalise_counts(logits: torch.Tensor, row: SamplingRow) -> None:
    """Presence and frequency penalties on generated tokens (OpenAI API reference)."""
    if not row.output_token_ids:
        return
    ids, counts = np.unique(np.asarray(row.output_token_ids, np.int64), return_counts=True)
    amount = row.params.presence_penalty + row.params.frequency_penalty * counts
    logits[torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(amount).to(logits)


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Draw one token per row: invert the cumulative distribution at the row's uniform number.

    The distribution is in vocabulary order, so that a row's token does not depend on whether
    another row's parameters require sorting.
    """
    temperature = _column(logits, [row.params.temperature for row in rows])
    logits = logits / temperature.clamp_min(1e-5)
    logits = _keep_min_p(logits, rows)
    logits = _keep_top(logits, rows)
    cumulative = torch.softmax(logits, dim=-1).cumsum(dim=-1)
    uniforms = _column(logits, [_uniform(row.seed, len(row.output_token_ids)) for row in rows])
    # Scaled by the total, so that a rounding error cannot move the point past the last token.
    point = uniforms * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, point, right=True)
    return index.clamp_max(logits.shape[-1] - 1).squeeze(1)


def _keep_min_p(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Mask tokens less probable than ``min_p`` times the most probable one."""
    if not any(row.params.min_p > 0.0 for row in rows):
        return logits
    floor = [math.log(row.params.min_p) if row.params.min_p else -math.inf for row in rows]
    lowest = logits.amax(dim=-1, keepdim=True) + _column(logits, floor)
    return logits.masked_fill(logits < lowest, -math.inf)


def _keep_top(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Mask the tokens that top_k, and then top_p, exclude.

    At first only the `_NUCLEUS` most probable tokens are sorted. Rows that keep more tokens are
    then sorted completely.
    """
    vocabulary = logits.shape[-1]
    width = min(_NUCLEUS, vocabulary)
    limited = [i for i, row in enumerate(rows) if row.params.top_k > 0 or row.params.top_p < 1.0]
    if not limited:
        return logits
    kept = logits.clone()
    narrow = [i for i in limited if rows[i].params.top_k <= width]
    wide = [i for i in limited if rows[i].params.top_k > width]
    if narrow:
        kept[narrow], enough = _truncate(logits[narrow], [rows[i] for i in narrow], width)
        wide += [i for i, found in zip(narrow, enough, strict=True) if not found]
    if wide:
        kept[wide], _ = _truncate(logits[wide], [rows[i] for i in wide], vocabulary)
    return kept


def _truncate(
    logits: torch.Tensor, rows: Sequence[SamplingRow], width: int
) -> tuple[torch.Tensor, list[bool]]:
    """Apply top_k and top_p to the ``width`` most probable tokens of each row.

    Returns the logits with excluded tokens at -inf, and for each row whether ``width`` sufficed.
    """
    vocabulary = logits.shape[-1]
    top_k = [row.params.top_k if row.params.top_k > 0 else vocabulary for row in rows]
    k = torch.tensor(top_k, device=logits.device).clamp_max(vocabulary).unsqueeze(1)
    top_p = _column(logits, [row.params.top_p for row in rows])
    ordered, ids = logits.topk(width, dim=-1)
    rank = torch.arange(width, device=logits.device)
    ordered = ordered.masked_fill(rank >= k, -math.inf)
    of_kept, of_all = (x.logsumexp(-1, keepdim=True) for x in (ordered, logits))
    probability = (ordered - torch.where(k <= width, of_kept, of_all)).exp()
    reached = probability.cumsum(dim=-1)
    # A token is kept while the tokens before it sum to less than top_p; the first always is.
    dropped = (reached - probability >= top_p) & (rank > 0)
    enough = (reached[:, -1:] >= top_p) | (k <= width)
    kept = torch.full_like(logits, -math.inf)
    kept.scatter_(1, ids, ordered.masked_fill(dropped, -math.inf))
    return kept, enough.squeeze(1).tolist()


def _report(logprobs: torch.Tensor, token: int, count: int | None) -> PositionLogprobs | None:
    if count is None:
        return None
    values, ids = logprobs.topk(count)
    top = zip(ids.tolist(), values.tolist(), strict=True)
    return PositionLogprobs(
        TokenLogprob(token, float(logprobs[token])),
        tuple(TokenLogprob(i, value) for i, value in top),
    )


def _uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1) that depends only on seed and position."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _ids(ids: object, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(ids), dtype=torch.long, device=like.device)  # type: ignore[call-overload]
