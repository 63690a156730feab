"""Turns the hidden states of a model without a head into embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from trencadis.engine.devices import Device
from trencadis.engine.runner.sampling_rows import (
    NO_TOKEN,
    IntArray,
    PendingRows,
    RowRequest,
    RowResult,
    SampledToken,
)

_WORDS = 1
"""Integers of a row that are uploaded for nothing: devices compile programs for tensors without
elements, too, and those that fail on them do it late."""


class Pooler:
    """A `Sampler` whose result for a row is its hidden state, divided by its length.

    The row is that of a prompt's last token, so this is the prompt's embedding.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def release(self) -> None:
        pass

    def words(self, requests: Sequence[RowRequest], batch: int) -> IntArray:
        del requests
        return np.zeros((batch, _WORDS), np.int32)

    def launch(
        self, logits: torch.Tensor, words: torch.Tensor, requests: Sequence[RowRequest]
    ) -> PendingRows:
        del words
        # A later forward pass of this step may have the same shape and write over its result.
        hidden = logits.clone()
        self._device.mark_step()

        def read(copies: Sequence[torch.Tensor]) -> list[RowResult]:
            rows: npt.NDArray[np.float32] = copies[0].numpy()[: len(requests)]
            return [
                RowResult([_embedding(row) for _ in request.samples])
                for row, request in zip(rows, requests, strict=True)
            ]

        return PendingRows((hidden,), read)


def _embedding(row: npt.NDArray[np.float32]) -> SampledToken:
    length = float(np.linalg.norm(row.astype(np.float64)))  # squares could overflow in fp32
    if not np.isfinite(length):
        return SampledToken(NO_TOKEN)
    return SampledToken(0, embedding=(row / (length or 1.0)).astype("<f4").tobytes())
