"""Layers of Mamba 2 with a kernel of our own between their two projections.

transformers' functions write and read tensors of many times a state's size for each token, or for
each chunk of tokens. The kernel keeps a line of a state in registers for several tokens, and reads
and writes states in their places of the cache. It computes in fp32.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trencadis.engine.devices.cpu.native_calls import (
    address_of,
    data_address,
    float_bits,
    note,
)
from trencadis.engine.devices.cpu.native_kernel import load_kernel, no_memory
from trencadis.engine.models.layer_states import StatePlaces

_SOURCE = Path(__file__).with_name("mamba_mixer.cpp")

_DTYPES = frozenset({torch.bfloat16, torch.float32})
_NO_LIMITS = float("-inf"), float("inf")

_ADDRESSES = 14
"""Arguments of the kernel that are addresses; the last four are those of the states of a step."""

_OTHERS = 17

_NO_MEMORY = 2
"""What the kernel returns then."""


class MambaMixer:
    """Computes transformers' modules of Mamba 2: those with the attributes that it reads.

    Raises `NoKernel` where the kernel is not there. ``directory`` and ``trusted`` are those of
    `load_kernel`.
    """

    def __init__(self, directory: Path | None = None, *, trusted: bool = False) -> None:
        library = load_kernel(_SOURCE, (), directory, trusted=trusted)
        self._mix: Any = library.mix_rows
        self._mix.argtypes = [ctypes.c_void_p] * _ADDRESSES + [ctypes.c_int64] * _OTHERS
        self._address = address_of(self._mix)

    def __call__(
        self, module: Any, hidden: torch.Tensor, conv: StatePlaces, sums: StatePlaces
    ) -> torch.Tensor:
        """The result of a module, ``[rows, T, hidden size]``; its states are read and written.

        Raises one of `OTHER_KIND` for a module of another kind.
        """
        multipliers = getattr(module, "mup_vector", None)
        if multipliers is not None:  # Falcon H1
            hidden = hidden * module.ssm_in_multiplier
        projected = module.in_proj(hidden)
        if multipliers is not None:
            projected = projected * multipliers
        result: torch.Tensor = module.out_proj(self._between(module, projected, conv, sums))
        return result

    def _between(
        self, module: Any, projected: torch.Tensor, conv: StatePlaces, sums: StatePlaces
    ) -> torch.Tensor:
        rows, tokens, _ = projected.shape
        heads, width, groups = module.num_heads, module.head_dim, module.n_groups
        inner, size = heads * width, module.ssm_state_size
        channels = inner + 2 * groups * size
        norm: Any = None if isinstance(module.norm, nn.Identity) else module.norm
        weight = module.conv1d.weight
        of_layer = (
            *(weight, module.conv1d.bias, module.A_log, module.dt_bias, module.D),
            None if norm is None else norm.weight,
        )
        dtype, states = projected.dtype, sums.part
        others = {each.dtype for each in (*of_layer, conv.part) if each is not None} - {dtype}
        if others or states.dtype not in _DTYPES or dtype not in _DTYPES:
            raise ValueError(f"the kernel takes no {dtype} with {others} and {states.dtype}")
        shapes = (projected.shape[2], *weight.shape[:2], *conv.part.shape[1:2], *states.shape[1:])
        expected = (inner + channels + heads, channels, 1, channels, heads, width, size)
        if shapes != expected or module.activation not in ("silu", "swish"):
            raise ValueError(f"the kernel takes no {type(module).__name__} of {shapes}")
        made = (
            projected.new_empty(rows, tokens, channels),
            states.new_empty(rows, tokens, inner, dtype=torch.float32),
            projected.new_empty(rows, tokens, inner),
        )
        given = (projected, *of_layer, *made, conv.part, states, sums.reads, sums.writes)
        if not all(each is None or each.is_contiguous() for each in given):
            raise ValueError("the kernel takes contiguous tensors alone")
        # transformers limits time steps of several tokens alone.
        limits = module.time_step_limit if tokens > 1 else _NO_LIMITS
        epsilon = 0.0 if norm is None else norm.variance_epsilon
        arguments = (
            *(data_address(each) for each in given),
            *(*projected.stride()[:2], rows, tokens, heads, width, groups, size),
            *(weight.shape[2], conv.part.shape[2], _of_norm(norm, inner), torch.get_num_threads()),
            *(each is torch.bfloat16 for each in (dtype, states.dtype)),
            *map(float_bits, (*limits, epsilon)),
        )
        if status := self._mix(*arguments):
            if status == _NO_MEMORY:
                raise no_memory()
            raise ValueError(f"the kernel takes no {type(module).__name__} of {shapes}")
        changing = range(_ADDRESSES - 4, _ADDRESSES)
        note(self._address, arguments, made, has_status=True, changing=changing)
        return made[-1]


def _of_norm(norm: Any, inner: int) -> int:
    """How many numbers a norm takes together."""
    if norm is None:
        return inner
    groups = getattr(norm, "n_groups", None)
    size: int = norm.group_size if groups is None else inner // groups
    return size
