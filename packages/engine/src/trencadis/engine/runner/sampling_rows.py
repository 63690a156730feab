"""What a sampler makes of the rows of logits, before the results are those of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import attrs
import torch

from trencadis.engine.api.outputs import PositionLogprobs
from trencadis.engine.runner.step import IntArray, RowRequest

NO_TOKEN = 1 << 24
"""The id of the token that is drawn where no logit is a number above minus infinity."""


class SampledToken(NamedTuple):
    """A sampled token, with log-probabilities where the request asked for them.

    ``embedding``: the vector that stands in its place, see `CompletionDelta`.
    """

    token_id: int
    logprobs: PositionLogprobs | None = None
    embedding: bytes | None = None


class RowResult(NamedTuple):
    """The tokens of a `RowRequest`; candidates are (token id, log-probability), best first.

    `NO_TOKEN` or a NaN: the logits were not numbers above minus infinity, or the hidden state was
    not finite.
    """

    tokens: Sequence[SampledToken] = ()
    candidates: Sequence[tuple[int, float]] = ()


@attrs.frozen(eq=False)
class PendingRows:
    """A batch that is being sampled.

    ``outputs`` are tensors of the device. ``read`` makes one result per request of their copies on
    the host.
    """

    outputs: Sequence[torch.Tensor]
    read: Callable[[Sequence[torch.Tensor]], Sequence[RowResult]]


class Sampler(Protocol):
    """Samples the rows of a padded batch, on the host or on the device.

    None among the requests: nothing is asked of the row, as of a chunk that does not end its
    prompt. Its result is ignored.
    """

    sampled_ids: torch.Tensor | None
    """The first token of each row that was sampled, by the row's slot: int32 ``[slots]`` on the
    device, so that the next forward pass reads it there; 0 for `NO_TOKEN`, which the embeddings of
    a device may not survive. `launch` replaces the tensor and writes to none. None where no step is
    scheduled before the results of another."""

    def words(
        self, requests: Sequence[RowRequest | None], batch: int, slots: Sequence[int] = ()
    ) -> IntArray:
        """What `launch` needs of ``requests`` on the device, int32 ``[batch, n]``.

        It is uploaded with the batch. ``n`` is a constant of the sampler. ``slots`` are those of
        the first rows; slot 0, which is not read, is that of the others.
        """

    def launch(
        self, logits: torch.Tensor, words: torch.Tensor, requests: Sequence[RowRequest | None]
    ) -> PendingRows:
        """Start sampling.

        ``logits`` is fp32 ``[batch, vocabulary]``, of a model without a head the hidden states
        ``[batch, hidden size]``; ``words`` are those of `words` on the device.
        ``requests`` are those of the first rows; the other rows are padding.
        """

    def release(self) -> None:
        """Release device memory. It samples nothing until `acquire`."""

    def acquire(self) -> None:
        """Take the device memory again after `release`, with nothing in the slots."""
