"""Kernels that compute layers with a state, where they compute what transformers' code does."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trencadis.engine.models.layer_states import (
    CONV,
    RECURRENT,
    STATE_DTYPES,
    LayerStates,
    StatePlaces,
    kept_states,
)
from trencadis.kvcache.state_cache import StateKey, StateShape

logger = logging.getLogger("trencadis.engine")

_TOLERANCE = 0.05
"""Largest difference of a layer with a kernel, of bf16, beside the largest value."""

Mixer = Callable[[nn.Module, torch.Tensor, StatePlaces, StatePlaces], torch.Tensor]
"""Computes a layer that has a convolution and a sum: its module, the hidden states of some rows,
and where the states of both are. Raises one of `OTHER_KIND` for a module of another kind."""

OTHER_KIND = (AttributeError, KeyError, OverflowError, TypeError, ValueError)

OF_MIXER = StateKey(CONV, 0), StateKey(RECURRENT, 0)
"""The parts of a state that a `Mixer` is given."""


@torch.inference_mode()
def computes_the_same(
    mixer: Mixer,
    module: nn.Module,
    argument: str,
    shapes: Sequence[StateShape],
    hidden: torch.Tensor,
) -> bool:
    """Whether a kernel computes nearly what a module does, and the same states, as a cache may keep
    them.

    ``argument``: the name that its cache has there. ``hidden``: ``[2, T, hidden size]``, of which
    one token is computed, and all.
    """
    values = torch.Generator().manual_seed(2)
    drawn = {shape.key: torch.randn(4, *shape.shape, generator=values) for shape in shapes}
    dtypes = {shape.key: shape.dtype or hidden.dtype for shape in shapes}
    reads, writes = torch.arange(2), torch.arange(2, 4)
    tried = itertools.product(STATE_DTYPES, (hidden[:, :1].contiguous(), hidden))
    for name, rows in tried:
        kept = {shape.key: shape.dtype or hidden.dtype for shape in kept_states(shapes, name)}
        parts = {key: part.to(kept[key]) for key, part in drawn.items()}
        places = {key: StatePlaces(part, reads, writes) for key, part in parts.items()}
        try:
            mixed = mixer(module, rows, *(places[key] for key in OF_MIXER))
        except OTHER_KIND as error:
            logger.debug("%s has no kernel of its own: %s", type(module).__name__, error)
            return False
        states = LayerStates({key: place.states(dtypes[key]) for key, place in places.items()})
        given: dict[str, Any] = {argument: states}
        pairs = [(mixed, type(module).forward(module, rows, **given))]
        pairs += [(parts[key][2:], state) for key, state in states.states.items()]
        for found, expected in pairs:
            if not (found - expected).abs().max() <= _TOLERANCE * expected.abs().max():
                logger.info("%s has no kernel of its own: it differs", type(module).__name__)
                return False
    return True
