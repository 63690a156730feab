"""The scan of Mamba 2 as a kernel of our own.

transformers' functions write and read tensors of many times a state's size for each token, or for
each chunk of tokens. The kernel goes through a state once for each token, within a processor's
cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trencadis.engine.devices.cpu.native_kernel import NoKernel, load_kernel
from trencadis.engine.models.state_functions import StaticFunctions, time_step

_SOURCE = Path(__file__).with_name("state_scan.cpp")

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64

_TOLERANCE = 1e-3
"""Largest difference to `StaticFunctions` in a trial, beside the largest value."""

FUNCTIONS = frozenset({"mamba2_chunk_scan", "mamba2_selective_state_update"})
"""Those that `NativeScan` has in place of transformers'."""


class NativeScan(StaticFunctions):
    """`FUNCTIONS` by the kernel, for rows without padding.

    Raises `NoKernel` where it is not there, or computes otherwise.
    ``directory`` and ``trusted`` are those of `load_kernel`.
    """

    def __init__(self, directory: Path | None = None, *, trusted: bool = False) -> None:
        self._function: Callable[..., None] = load_kernel(
            _SOURCE, (), directory, trusted=trusted
        ).scan_states
        named: Any = self._function
        named.argtypes, named.restype = (*[_POINTER] * 7, *[_INTEGER] * 7), None
        self._try()

    def mamba2_chunk_scan(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        chunk_size: int = 0,
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del chunk_size
        rows, _tokens, heads, width = hidden_states.shape
        step = time_step(dt, dt_bias, dt_softplus).clamp(*dt_limit)
        value = hidden_states.float()
        shape = (rows, heads, width, B.shape[3])
        state = value.new_zeros(shape)
        if initial_states is not None:
            state.copy_(initial_states)
        out = self._scan(value, step, A, B, C, state)
        if D is not None:
            out.addcmul_(value, D.float().unsqueeze(1))
        return out, state

    def mamba2_selective_state_update(
        self,
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        z: torch.Tensor | None = None,
        **named: Any,
    ) -> torch.Tensor:
        of_heads = all(stride == 0 for stride in (*A.stride()[1:], dt.stride(2)))
        if state.dtype is not torch.float32 or not state.is_contiguous() or not of_heads:
            named |= {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "z": z}
            return super().mamba2_selective_state_update(state, hidden_states, dt, A, B, C, **named)
        bias = None if dt_bias is None else dt_bias[:, 0]
        step = time_step(dt[:, :, 0], bias, dt_softplus)
        value = hidden_states.float().unsqueeze(1)
        out = self._scan(
            value, step.unsqueeze(1), A[:, 0, 0], B.unsqueeze(1), C.unsqueeze(1), state
        )
        if D is not None:
            out.addcmul_(value, D.float())
        out = out.squeeze(1)
        if z is not None:
            out.mul_(torch.nn.functional.silu(z.float()))
        return out.to(hidden_states.dtype)

    def _scan(
        self,
        value: torch.Tensor,
        step: torch.Tensor,
        decay: torch.Tensor,
        write: torch.Tensor,
        read: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """As in the kernel's source; ``state`` is changed."""
        given = [x.float().contiguous() for x in (value, step, decay, write, read)]
        out = torch.empty_like(given[0])
        rows, tokens, heads, width = value.shape
        self._function(
            *(x.data_ptr() for x in (*given, out, state)),
            *(rows, tokens, heads, width, *write.shape[2:], torch.get_num_threads()),
        )
        return out

    def _try(self) -> None:
        values = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=values)

        given = random(2, 5, 4, 8), random(2, 5, 4), -random(4).abs()
        between = random(2, 5, 2, 20), random(2, 5, 2, 20)
        named: dict[str, Any] = {"dt_softplus": True, "dt_bias": random(4), "D": random(4)}
        named["initial_states"] = random(2, 4, 8, 20)
        found = self.mamba2_chunk_scan(*given, *between, 0, **named)
        expected = super().mamba2_chunk_scan(*given, *between, 0, **named)
        for ours, theirs in zip(found, expected, strict=True):
            error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
            if not error <= _TOLERANCE:
                raise NoKernel(f"its result is off by {error:.3g}")
