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

from trencadis.engine.devices.cpu.native_kernel import load_kernel
from trencadis.engine.models.state_layers import StatePlaces

_SOURCE = Path(__file__).with_name("mamba_mixer.cpp")

_NO_LIMITS = float("-inf"), float("inf")


_POINTERS = (
    *("projected", "weight", "conv_bias", "decay", "step_bias", "skip", "norm", "conv_states"),
    *("convolved", "out", "states", "scanned", "reads", "writes"),
)
_INTEGERS = (
    *("row", "token", "rows", "tokens", "heads", "width", "groups", "size"),
    *("taps", "known", "of_norm", "threads"),
)
_FLOATS = ("low", "high", "epsilon")


class _Mixer(ctypes.Structure):
    """As in the kernel's source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _INTEGERS),
        *((name, ctypes.c_float) for name in _FLOATS),
    )


class MambaMixer:
    """Computes transformers' modules of Mamba 2: those with the attributes that it reads.

    Raises `NoKernel` where the kernel is not there. ``directory`` and ``trusted`` are those of
    `load_kernel`.
    """

    def __init__(self, directory: Path | None = None, *, trusted: bool = False) -> None:
        library = load_kernel(_SOURCE, (), directory, trusted=trusted)
        self._mix: Any = library.mix_rows
        self._mix.argtypes = ctypes.POINTER(_Mixer), ctypes.c_int64

    def __call__(
        self, module: Any, hidden: torch.Tensor, conv: StatePlaces, sums: StatePlaces
    ) -> torch.Tensor:
        """The result of a module, ``[rows, T, hidden size]``; its states are read and written.

        Raises `AttributeError` or `ValueError` for a module of another kind.
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
        given: dict[str, Any] = {
            "projected": projected,
            "weight": weight,
            "conv_bias": module.conv1d.bias,
            "decay": module.A_log,
            "step_bias": module.dt_bias,
            "skip": module.D,
            "norm": None if norm is None else norm.weight,
            "conv_states": conv.part,
        }
        dtype, states = projected.dtype, sums.part
        others = {each.dtype for each in given.values() if each is not None} - {dtype}
        if others or states.dtype is not torch.float32 or dtype not in _DTYPES:
            raise ValueError(f"the kernel takes no {dtype} with {others} and {states.dtype}")
        shapes = (projected.shape[2], *weight.shape[:2], *conv.part.shape[1:2], *states.shape[1:])
        expected = (inner + channels + heads, channels, 1, channels, heads, width, size)
        if shapes != expected or module.activation not in ("silu", "swish"):
            raise ValueError(f"the kernel takes no {type(module).__name__} of {shapes}")
        given["states"], given["reads"], given["writes"] = states, sums.reads, sums.writes
        given["convolved"] = projected.new_empty(rows, tokens, channels)
        given["scanned"] = states.new_empty(rows, tokens, inner)
        given["out"] = out = projected.new_empty(rows, tokens, inner)
        if not all(each is None or each.is_contiguous() for each in given.values()):
            raise ValueError("the kernel takes contiguous tensors alone")
        sizes = (rows, tokens, heads, width, groups, size, weight.shape[2], conv.part.shape[2])
        # transformers limits time steps of several tokens alone.
        limits = module.time_step_limit if tokens > 1 else _NO_LIMITS
        mixer = _Mixer(
            *(None if given[name] is None else given[name].data_ptr() for name in _POINTERS),
            *projected.stride()[:2],
            *(*sizes, _of_norm(norm, inner), torch.get_num_threads()),
            *(*limits, 0.0 if norm is None else norm.variance_epsilon),
        )
        if self._mix(mixer, dtype is torch.bfloat16):
            raise ValueError(f"the kernel takes no {type(module).__name__} of {shapes}")
        return out


_DTYPES = frozenset({torch.bfloat16, torch.float32})


def _of_norm(norm: Any, inner: int) -> int:
    """How many numbers a norm takes together."""
    if norm is None:
        return inner
    groups = getattr(norm, "n_groups", None)
    size: int = norm.group_size if groups is None else inner // groups
    return size
