"""The states that the code of a layer is given: copies of them, or where they are in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from trencadis.kvcache.state_cache import StateKey, StateShape

CONV = "conv"
RECURRENT = "recurrent"
"""The kinds of states that transformers' cache has: the last inputs of a convolution, and sums."""

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Those of `EngineConfig.mamba_ssm_cache_dtype`, without ``auto``."""


def kept_states(states: Sequence[StateShape], dtype: str) -> tuple[StateShape, ...]:
    """The parts of a layer's state as a cache keeps them: sums in a dtype of `STATE_DTYPES`.

    With ``auto`` in that in which the layer's own code computes them.
    """
    kept = STATE_DTYPES.get(dtype)
    return tuple(
        attrs.evolve(part, dtype=kept) if kept and part.key.kind == RECURRENT else part
        for part in states
    )


@attrs.frozen(eq=False)
class StatePlaces:
    """Where a part of the states of some rows is read and written.

    ``part``: ``[places, ...]``, of a layer, in a `StateCache`. ``reads``, ``writes``: places,
    ``[rows]``, int64.
    """

    part: torch.Tensor
    reads: torch.Tensor
    writes: torch.Tensor

    def states(self, dtype: torch.dtype) -> torch.Tensor:
        """A copy of the states, ``[rows, ...]``, in the dtype that a layer computes with."""
        return self.part.index_select(0, self.reads).to(dtype)

    def write(self, states: torch.Tensor) -> None:
        """Write new ones, ``[rows, ...]``, in the dtype that they are kept in."""
        self.part.index_copy_(0, self.writes, states.to(self.part.dtype))


class LayerStates:
    """What transformers' module of a layer takes for its cache: the states of some sequences.

    ``states``: each part of them, ``[sequences, ...]``; new ones once the module was called.
    ``lengths``: the tokens of each sequence, where rows have padding behind them. The
    methods are those of ``transformers.cache_utils.Cache`` that such modules call. A sequence
    without tokens before has states of zeros, which compute what no states would.
    """

    def __init__(
        self, states: dict[StateKey, torch.Tensor], lengths: torch.Tensor | None = None
    ) -> None:
        self.states = states
        self._lengths = lengths

    def is_recording_past(self, layer_idx: int) -> bool:
        del layer_idx
        return False

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        del layer_idx, state_idx
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """The last inputs of a convolution. A module may change it in place."""
        del layer_idx
        return self.states[StateKey(CONV, state_idx)]

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Add inputs; returns them after those that the state had."""
        del layer_idx
        key = StateKey(CONV, state_idx)
        known = torch.cat((self.states[key], conv_states), dim=-1)
        width = self.states[key].shape[-1]
        if self._lengths is None:
            self.states[key] = known[..., -width:]
        else:
            last = self._lengths.unsqueeze(1) + torch.arange(width, device=known.device)
            places = last.unsqueeze(1).expand(-1, known.shape[1], -1)
            self.states[key] = torch.gather(known, 2, places)
        return known

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """A state of sums. A module may change it in place."""
        del layer_idx
        return self.states[StateKey(RECURRENT, state_idx)]

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Replace a state."""
        del layer_idx
        key = StateKey(RECURRENT, state_idx)
        self.states[key] = recurrent_states.to(self.states[key].dtype)
        return self.states[key]
