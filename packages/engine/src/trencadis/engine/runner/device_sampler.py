"""Samples on the device that computed the logits: token ids cross to the host, logits do not.

Every program has a static shape, which depends on the padded number of rows and on nothing that a
request asks for: a draw for each `DrawKind`, two reports of log-probabilities, a change of logits
in chunks of `_EDITS_AT_ONCE`, the masks of structured outputs, a ranking for beams. A lazy device
gets a step mark after each, so that programs that follow each other do not become one recipe for
each combination.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from trencadis.engine.api.outputs import PositionLogprobs, TokenLogprob
from trencadis.engine.api.sampling_params import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_SEQUENCES,
    SamplingParams,
)
from trencadis.engine.devices import Device
from trencadis.engine.runner.draw import (
    NUM_FLOATS,
    DrawKind,
    DrawNumbers,
    draw_tokens,
    pack_numbers,
    slots_of,
)
from trencadis.engine.runner.float_bits import floats_of, powers_of_two
from trencadis.engine.runner.logit_edits import apply_edits, find_edits
from trencadis.engine.runner.sampling_rows import (
    NO_TOKEN,
    PendingRows,
    RowResult,
    SampledToken,
)
from trencadis.engine.runner.step import IntArray, RowRequest

Program = Callable[..., Any]

_EDITS_AT_ONCE = 4096
"""One size, so that no request needs a program of its own. A chunk is an upload of 80 KiB."""

_MAX_CANDIDATES = 2 * MAX_SEQUENCES
"""Beam search asks for at most twice as many tokens as it has beams."""


class DeviceSampler:
    """A `Sampler` on a device. ``compiled``: let the device compile each program.

    ``vocab_size`` is the width of the logits. ``num_slots``: how many the next forward pass can
    read; 0 for none. ``programs``: where compiled programs are kept, which hold no tensors.
    """

    def __init__(
        self,
        device: Device,
        vocab_size: int,
        programs: dict[Hashable, Program] | None = None,
        *,
        num_slots: int = 0,
        compiled: bool = False,
    ) -> None:
        self.sampled_ids: torch.Tensor | None = None
        self._device = device
        self._compiled = compiled
        self._programs = {} if programs is None else programs
        self._vocab_size, self._num_slots = vocab_size, num_slots
        self.acquire()

    @torch.inference_mode()  # as in a step: PyTorch traces again for a tensor of another mode
    def acquire(self) -> None:
        upload = self._device.upload
        if self._num_slots:
            self.sampled_ids = upload(torch.zeros(self._num_slots, dtype=torch.int32))
        self._token_ids = upload(torch.arange(self._vocab_size, dtype=torch.int32)[None])
        self._bits = upload(torch.arange(32, dtype=torch.int32))
        self._powers = upload(powers_of_two())

    def release(self) -> None:
        self._token_ids = self._bits = self._powers = torch.empty(0)
        self.sampled_ids = None

    def words(
        self, requests: Sequence[RowRequest | None], batch: int, slots: Sequence[int] = ()
    ) -> IntArray:
        return pack_numbers(_samples(requests, 0), batch, slots)

    def launch(
        self, logits: torch.Tensor, words: torch.Tensor, requests: Sequence[RowRequest | None]
    ) -> PendingRows:
        outputs: list[torch.Tensor] = []
        beams = [row if row and row.num_candidates else None for row in requests]
        if _lists_logprobs(requests):
            token_ids = self._device.upload(torch.from_numpy(_listed(requests, len(logits))))
            outputs.append(self._run("report listed", _report_listed, logits, token_ids))
        passes = _num_passes(requests)
        # The samples of a row share their tokens and parameters, and so the changes of its logits.
        rows = _samples(requests, 0)
        edited = self._mask(self._edit(logits, rows), rows) if passes else logits
        for number in range(passes):
            rows = _samples(requests, number)
            if number:
                words = self._device.upload(torch.from_numpy(pack_numbers(rows, len(words))))
            outputs.append(self._draw(edited, words, rows))
            if _wants_logprobs(rows):
                outputs.append(self._run("report", _report, logits, outputs[-1]))
        if any(beams):
            scores = self._edit(self._run("log-softmax", _log_softmax, logits), beams)
            outputs.append(self._run("rank", _rank, scores))
        return PendingRows(outputs, functools.partial(_read, requests))

    def _draw(
        self, logits: torch.Tensor, words: torch.Tensor, rows: Sequence[RowRequest | None]
    ) -> torch.Tensor:
        kind = max(DrawKind.of(row.samples[0].params) for row in rows if row is not None)
        program = functools.partial(_draw, kind)
        inputs = [logits, words, self._powers, self._token_ids]
        if self.sampled_ids is not None:
            inputs.append(self.sampled_ids)
        drawn: torch.Tensor
        drawn, *kept = self._run(f"draw {kind.name}", program, *inputs)
        self.sampled_ids = kept[0] if kept else None
        return drawn

    def _edit(self, logits: torch.Tensor, rows: Sequence[RowRequest | None]) -> torch.Tensor:
        for packed in find_edits(rows).packed(_EDITS_AT_ONCE):
            edits = self._device.upload(torch.from_numpy(packed))
            logits = self._run("edit", apply_edits, logits, edits)
        return logits

    def _mask(self, logits: torch.Tensor, rows: Sequence[RowRequest | None]) -> torch.Tensor:
        masks = [(i, row.mask) for i, row in enumerate(rows) if row and row.mask is not None]
        if not masks:
            return logits
        batch, vocabulary = logits.shape
        words = np.full((batch, (vocabulary + 31) // 32), -1, np.int32)
        for i, mask in masks:
            words[i] = mask.words()
        uploaded = self._device.upload(torch.from_numpy(words))
        masked: torch.Tensor = self._run("mask", _mask, logits, uploaded, self._bits)
        return masked

    def _run(self, name: str, program: Program, *inputs: torch.Tensor) -> Any:
        """The result of ``program``, which ``name`` and the shapes of ``inputs`` determine."""
        if self._compiled:
            key = (name, tuple(tensor.shape for tensor in inputs))
            if key not in self._programs:
                traced = make_fx(program, tracing_mode="fake")(*inputs)
                self._programs[key] = self._device.compile(traced, inputs)
            program = self._programs[key]
        result = program(*inputs)
        self._device.mark_step()
        return result


# The programs.


def _draw(
    kind: DrawKind,
    logits: torch.Tensor,
    words: torch.Tensor,
    powers: torch.Tensor,
    token_ids: torch.Tensor,
    *sampled_ids: torch.Tensor,
) -> list[torch.Tensor]:
    """The drawn tokens, then ``sampled_ids``, if they are given, with them in their slots."""
    numbers = DrawNumbers.unpack(words, floats_of(words[:, :NUM_FLOATS], powers))
    drawn = draw_tokens(logits, numbers, token_ids, kind)
    kept = drawn.masked_fill(drawn == NO_TOKEN, 0)
    return [drawn, *(ids.index_copy(0, slots_of(words), kept) for ids in sampled_ids)]


def _mask(logits: torch.Tensor, words: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Logits ``[rows, vocabulary]``, minus infinity where a bit of ``words`` is not set.

    ``words`` are those of `TokenMask.words`, int32 ``[rows, vocabulary / 32]``; ``bits`` 0 to 31.
    """
    allowed = torch.bitwise_right_shift(words.unsqueeze(-1), bits).bitwise_and(1)
    allowed = allowed.view(len(words), -1)[:, : logits.shape[-1]]
    return torch.where(allowed == 1, logits, -math.inf)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1)


def _report(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """fp32 ``[rows, 1 + 2n]``: log-probability of the chosen token, of the n best, their ids."""
    logprobs = _log_softmax(logits)
    # A row without a drawn token has an id beyond the vocabulary.
    own = logprobs.gather(1, chosen.long().clamp_max(logits.shape[-1] - 1).unsqueeze(1))
    return torch.cat((own, _best(logprobs, MAX_LOGPROBS)), dim=1)


def _report_listed(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """fp32 ``[rows, n]``: log-probabilities of the tokens ``[rows, n]``."""
    return _log_softmax(logits).gather(1, token_ids.long())


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """fp32 ``[rows, 2n]``: the n largest scores, then their ids, which fp32 holds up to 2**24."""
    values, ids = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return torch.cat((values, ids.float()), dim=1)


def _rank(scores: torch.Tensor) -> torch.Tensor:
    return _best(scores, _MAX_CANDIDATES)


# The results.


def _num_passes(requests: Sequence[RowRequest | None]) -> int:
    """The most samples of a row. The candidates of a beam are ranked apart."""
    drawn = (row for row in requests if row is not None and not row.num_candidates)
    return max((len(row.samples) for row in drawn), default=0)


def _samples(requests: Sequence[RowRequest | None], number: int) -> list[RowRequest | None]:
    """The rows from their sample ``number`` on, None where they have fewer, and for beams."""
    return [
        None
        if row is None or row.num_candidates or number >= len(row.samples)
        else (row._replace(samples=row.samples[number:]) if number else row)
        for row in requests
    ]


def _wants_logprobs(rows: Sequence[RowRequest | None]) -> bool:
    return any(row is not None and row.samples[0].params.logprobs is not None for row in rows)


def _lists_logprobs(rows: Sequence[RowRequest | None]) -> bool:
    return any(row is not None and row.samples[0].params.logprob_token_ids for row in rows)


def _listed(rows: Sequence[RowRequest | None], batch: int) -> IntArray:
    """The ``logprob_token_ids``, int32 ``[batch, n]``, filled up with token 0."""
    ids = np.zeros((batch, MAX_LOGPROB_TOKEN_IDS), np.int32)
    for i, row in enumerate(rows):
        if row is not None:
            listed = row.samples[0].params.logprob_token_ids
            ids[i, : len(listed)] = listed
    return ids


def _read(requests: Sequence[RowRequest | None], copies: Sequence[torch.Tensor]) -> list[RowResult]:
    """The results in the outputs of `DeviceSampler.launch`, in its order."""
    remaining = iter(copies)
    listed = next(remaining).tolist() if _lists_logprobs(requests) else [[]] * len(requests)
    tokens: list[list[SampledToken]] = [[] for _ in requests]
    for number in range(_num_passes(requests)):
        rows = _samples(requests, number)
        ids = next(remaining).tolist()
        report = next(remaining).tolist() if _wants_logprobs(rows) else []
        for i, row in enumerate(rows):
            if row is not None:
                params = row.samples[0].params
                logprobs = None
                if params.logprobs is not None:
                    logprobs = _logprobs(ids[i], report[i], listed[i], params)
                tokens[i].append(SampledToken(ids[i], logprobs))
    if not any(row and row.num_candidates for row in requests):
        return [RowResult(row) for row in tokens]
    ranked = next(remaining).tolist()
    return [
        RowResult(of_row, _pairs(ranked[i], row.num_candidates) if row else ())
        for i, (of_row, row) in enumerate(zip(tokens, requests, strict=True))
    ]


def _logprobs(
    token: int, report: Sequence[float], listed: Sequence[float], params: SamplingParams
) -> PositionLogprobs:
    """Those of a token, from its rows of `_report` and `_report_listed`."""
    pairs: Iterable[tuple[int, float]] = zip(params.logprob_token_ids, listed, strict=False)
    if not params.logprob_token_ids:
        pairs = _pairs(report[1:], params.logprobs or 0)
    top = tuple(TokenLogprob(*pair) for pair in pairs)
    return PositionLogprobs(TokenLogprob(token, report[0]), top)


def _pairs(best: Sequence[float], count: int) -> list[tuple[int, float]]:
    """The first ``count`` (token id, score) of a row of `_best`."""
    half = len(best) // 2
    return [(int(best[half + i]), best[i]) for i in range(min(count, half))]
