"""Turns what a model without an output head gives into hidden states, or the logits of scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from trencadis.engine.devices import Device
from trencadis.engine.runner.sampling_rows import (
    NO_TOKEN,
    PendingRows,
    RowResult,
    SampledToken,
)
from trencadis.engine.runner.step import IntArray, RowRequest

_WORDS = 1
"""Integers of a row that are uploaded for nothing: devices compile programs for tensors without
elements, too, and those that fail on them do it late."""


class Pooler:
    """A `Sampler` whose result for a row is the row itself.

    The row is that of a prompt's last token. ``is_embedding``: it is a hidden state, and divided by
    its length it is the prompt's embedding. Otherwise it has the logits of a score head or of one
    or two tokens, see `Scoring`, and the result is a single number.
    """

    def __init__(self, device: Device, *, is_embedding: bool = True) -> None:
        self._device = device
        self._result = _hidden_state if is_embedding else _logit

    def release(self) -> None:
        pass

    def acquire(self) -> None:
        pass

    sampled_ids: torch.Tensor | None = None

    def words(
        self, requests: Sequence[RowRequest | None], batch: int, slots: Sequence[int] = ()
    ) -> IntArray:
        del requests, slots
        return np.zeros((batch, _WORDS), np.int32)

    def launch(
        self, logits: torch.Tensor, words: torch.Tensor, requests: Sequence[RowRequest | None]
    ) -> PendingRows:
        del words
        # A later forward pass of this step may have the same shape and write over its result.
        hidden = logits.clone()
        self._device.mark_step()

        def read(copies: Sequence[torch.Tensor]) -> list[RowResult]:
            rows: npt.NDArray[np.float32] = copies[0].numpy()[: len(requests)]
            return [
                RowResult([self._result(row) for _ in request.samples] if request else ())
                for row, request in zip(rows, requests, strict=True)
            ]

        return PendingRows((hidden,), read)


def _hidden_state(row: npt.NDArray[np.float32]) -> SampledToken:
    if not np.isfinite(row).all():
        return SampledToken(NO_TOKEN)
    return SampledToken(0, embedding=row.astype("<f4").tobytes())


def _logit(row: npt.NDArray[np.float32]) -> SampledToken:
    logit = float(row[0]) - float(row[1]) if len(row) > 1 else float(row[0])
    if not np.isfinite(logit):
        return SampledToken(NO_TOKEN)
    return SampledToken(0, embedding=np.array([logit], "<f4").tobytes())
