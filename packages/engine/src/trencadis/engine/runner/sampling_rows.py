"""What is asked of one row of logits, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.engine.api.outputs import PositionLogprobs
from trencadis.engine.api.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]

NO_TOKEN = 1 << 24
"""The id of the token that is drawn where no logit is a number above minus infinity."""


class TokenMask(Protocol):
    """The tokens that a row may sample."""

    def words(self) -> IntArray:
        """One bit for each token, from the lowest: int32 ``[vocabulary / 32, rounded up]``.

        Waits until it is computed.
        """


@attrs.frozen(eq=False)
class SamplingRow:
    """The sampler's input for one token: the sequence's parameters, seed and tokens.

    ``token_ids``: prompt and output. It is not a copy: after the step the new token is in it, so
    that a sequence keeps one row for all of its steps. ``num_prompt_tokens`` of them are the
    prompt. ``mask``: the tokens that a structured output allows; None for all tokens. It also says
    which tokens ``min_tokens`` forbids.
    """

    params: SamplingParams
    seed: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    mask: TokenMask | None = None
    changes_logits: bool = attrs.field(init=False)
    """Whether the parameters may change single logits, in this or another step: `logit_edits` looks
    at no other row."""

    @changes_logits.default
    def _changes_logits(self) -> bool:
        params = self.params
        return bool(params.logit_bias) or (
            params.min_tokens,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        ) != (0, 1.0, 0.0, 0.0)

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The tokens after the prompt, a copy."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def forbidden_token_ids(self) -> frozenset[int]:
        """The tokens that would end the answer before ``min_tokens``."""
        if self.num_output_tokens >= self.params.min_tokens:
            return frozenset()
        return self.eos_token_ids.union(self.params.stop_token_ids)


@attrs.frozen
class SampledToken:
    """A sampled token, with log-probabilities where the request asked for them.

    ``embedding``: the vector that stands in its place, see `CompletionDelta`.
    """

    token_id: int
    logprobs: PositionLogprobs | None = None
    embedding: bytes | None = None


@attrs.frozen(eq=False)
class RowRequest:
    """A token for each of ``samples``, which differ in their seeds alone, or ranked tokens.

    A row has several samples where a prompt ends that several sequences share. Beam search asks for
    the ``num_candidates`` most probable next tokens of ``beam``.
    """

    samples: tuple[SamplingRow, ...] = ()
    beam: SamplingRow | None = None
    num_candidates: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked of the row: it is a chunk that does not end its prompt."""
        return not self.samples and self.beam is None


NOTHING = RowRequest()


@attrs.frozen
class RowResult:
    """The tokens of a `RowRequest`; candidates are (token id, log-probability), best first."""

    tokens: Sequence[SampledToken] = ()
    candidates: Sequence[tuple[int, float]] = ()

    @property
    def is_valid(self) -> bool:
        """Whether the logits were numbers, of which at least one was above minus infinity, or the
        hidden state was finite."""
        drawn = all(token.token_id != NO_TOKEN for token in self.tokens)
        return drawn and not any(math.isnan(logprob) for _, logprob in self.candidates)


@attrs.frozen(eq=False)
class PendingRows:
    """A batch that is being sampled.

    ``outputs`` are tensors of the device. ``read`` makes one result per request of their copies on
    the host.
    """

    outputs: Sequence[torch.Tensor]
    read: Callable[[Sequence[torch.Tensor]], list[RowResult]]


class Sampler(Protocol):
    """Samples the rows of a padded batch, on the host or on the device."""

    def words(self, requests: Sequence[RowRequest], batch: int) -> IntArray:
        """What `launch` needs of ``requests`` on the device, int32 ``[batch, n]``.

        It is uploaded with the batch. ``n`` is a constant of the sampler.
        """

    def launch(
        self, logits: torch.Tensor, words: torch.Tensor, requests: Sequence[RowRequest]
    ) -> PendingRows:
        """Start sampling.

        ``logits`` is fp32 ``[batch, vocabulary]``, of a model without a head the hidden states
        ``[batch, hidden size]``; ``words`` are those of `words` on the device.
        ``requests`` are those of the first rows; the other rows are padding.
        """

    def release(self) -> None:
        """Release programs and device memory. It samples nothing afterwards."""
