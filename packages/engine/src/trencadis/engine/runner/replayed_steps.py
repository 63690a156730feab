"""Decode steps of few sequences without the model's own code.

Where the decoder layers of a step are replayed (`ReplayedLayers`), what is left of Python is the
code of the model around them: half a millisecond of a small model, for any number of sequences. It
is traced once for each number, and its operations are called from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trencadis.engine.models.compiled_forward import OuterParts, OwnTensors
from trencadis.engine.models.paged_context import Attention, PagedContext, ReplayedLayers
from trencadis.engine.runner.model_input import ModelInput
from trencadis.engine.runner.shapes import DecodeShape

logger = logging.getLogger("trencadis.engine")

_MOST_SEQUENCES = 4
"""Of more, the code of the model is a small part of a step."""

Compute = Callable[[ModelInput], Sequence[torch.Tensor]]
"""Calls the model: `ForwardRunner`."""


class ReplayedSteps:
    """Keeps the traces of a model, until `clear`. They hold no tensor of it."""

    def __init__(self, attention: Attention, dtype: torch.dtype) -> None:
        self._attention = attention
        self._dtype = dtype
        self._outer: dict[int, OuterParts | None] = {}
        """By number of sequences; None where the model is to compute them."""

    def clear(self) -> None:
        """Forget all traces: the tensors of the model are released."""
        self._outer.clear()

    def takes(self, batch: ModelInput) -> bool:
        """Whether `run` computes this batch."""
        run: Any = batch.layer_run  # a type of callables has no place for a protocol
        num_sequences = batch.shape.num_tokens
        return (
            num_sequences <= _MOST_SEQUENCES
            and isinstance(batch.shape, DecodeShape)
            and isinstance(run, ReplayedLayers)
            and batch.adapter_slots is None
            and run.replays(num_sequences)
            and self._outer.get(num_sequences, ...) is not None
        )

    def run(
        self, batch: ModelInput, model: nn.Module, own: OwnTensors, compute: Compute
    ) -> Sequence[torch.Tensor]:
        """What ``compute`` gives for a batch.

        The first batch of a size is computed in both ways; where they differ, the model computes
        all that follow.
        """
        unpacked = batch.unpack()
        paged = self._attention.prepare(unpacked.paged, self._dtype)
        tensors = (unpacked.token_ids, unpacked.position_ids, unpacked.logit_rows)
        outer = self._outer.get(batch.shape.num_tokens)
        if outer is not None:
            computed = _replayed(batch.layer_run, outer, own, paged, tensors)
            return compute(batch) if computed is None else computed
        reason = "its trace computes other logits"
        computed = ()
        try:
            outer = OuterParts.of(model, own, paged, tensors)
            computed = _replayed(batch.layer_run, outer, own, paged, tensors)
        except Exception as error:  # the code of a model may do what cannot be traced
            reason = str(error)
        expected = compute(batch)  # last: it writes the keys and values that stay
        if computed is not None:
            self._compare(batch.shape.num_tokens, outer, computed, expected, reason)
        return expected

    def _compare(
        self,
        num_sequences: int,
        outer: OuterParts | None,
        computed: Sequence[torch.Tensor],
        expected: Sequence[torch.Tensor],
        reason: str,
    ) -> None:
        """Keep a trace that has computed what the model has; log ``reason`` for another."""
        if len(computed) == len(expected) and all(map(torch.equal, computed, expected)):
            self._outer[num_sequences] = outer
        elif not expected[0].isnan().any():  # which equals nothing: a later batch is traced
            self._outer[num_sequences] = None
            logger.info(
                "Decode steps of %d sequences call the model's code: %s", num_sequences, reason
            )


def _replayed(
    run: Any,
    outer: OuterParts,
    own: OwnTensors,
    paged: PagedContext,
    tensors: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor] | None:
    """Logits, and hidden states of a model that keeps them; None while another thread replays."""
    hidden = run.replay(outer.layer_inputs(tensors, own), paged)
    return None if hidden is None else outer.logits(hidden, tensors, own)
