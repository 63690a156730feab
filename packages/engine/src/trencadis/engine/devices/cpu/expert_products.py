"""A layer of gated experts as a kernel of our own: products, gate and the sum over experts.

transformers sorts rows by expert with a dozen operations, and PyTorch multiplies those of each
expert as any matrix. The kernel reads the weights of a chosen expert once, in the tiles of
`tiled_linear`, and what it calls does not depend on which experts are chosen, so that a decode step
can be recorded. Weights are bf16 or int8; each row is computed alike in every batch.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from trencadis.engine.devices.cpu.native_calls import (
    address_of,
    data_address,
    is_recording,
    note,
)
from trencadis.engine.devices.cpu.native_kernel import NoKernel, load_kernel
from trencadis.engine.devices.cpu.tiled_linear import BITS, TOLERANCE, load_linear_kernel
from trencadis.engine.devices.cpu.weight_tiles import SCALE_TYPES, integer_tiles, tiled
from trencadis.engine.models.packed_experts import (
    MATRICES,
    are_packed,
    is_gated_silu,
    packed_weight,
)
from trencadis.engine.models.packed_weight import PackedWeight
from trencadis.engine.models.rounded_weights import rounded_int8

_SOURCE = Path(__file__).with_name("expert_products.cpp")

_TRIED_EXPERTS, _TRIED_HIDDEN, _TRIED_INNER = 5, 50, 38
_TRIED = (1, 9, 60)
"""Tokens of the trials: one; one or two for each expert; more than a block of the kernel."""

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_SIZES: tuple[Any, ...] = (_INTEGER,) * 6

_LIBRARY = torch.library.Library("trencadis", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "tiled_experts(Tensor rows, Tensor chosen, Tensor weights, Tensor gate_up, "
    "Tensor? gate_up_scales, Tensor down, Tensor? down_scales) -> Tensor"
)


@attrs.frozen
class _Kernel:
    """A compiled kernel. ``widens``: as in `tiled_linear`. ``columns``: outputs of a tile."""

    compute: Callable[..., None]
    scratch_bytes: Callable[..., int]
    widens: bool
    columns: int


_KERNELS: dict[torch.dtype, _Kernel] = {}
"""The kernels of this process by the type of the weights."""


def load_expert_kernel(
    directory: Path | None = None,
    *,
    trusted: bool = False,
    weights: torch.dtype = torch.bfloat16,
) -> None:
    """Load the kernel that `TiledExperts` needs for weights of bf16, or of int8.

    It multiplies as that of linear layers does here, and is compared with PyTorch first. Raises
    `NoKernel`, for bf16 also on a processor with products of tiles (AMX). ``directory`` and
    ``trusted`` are those of `load_kernel`.
    """
    widens = load_linear_kernel(directory, trusted=trusted, weights=weights)
    library = load_kernel(_SOURCE, (f"BITS={BITS[weights]}",), directory, trusted=trusted)
    compute, scratch_bytes = library.compute_experts, library.scratch_bytes
    compute.argtypes, compute.restype = (*[_POINTER] * 9, *[_INTEGER] * 10), None
    scratch_bytes.argtypes, scratch_bytes.restype = _SIZES, _INTEGER
    kernel = _Kernel(compute, scratch_bytes, widens, library.columns())
    _try(kernel, weights)
    _KERNELS[weights] = kernel


class TiledExperts(nn.Module):
    """Gated experts whose weights are in the kernel's order. Rows are bf16, of an even width.

    ``gate_up`` is ``[experts, tiles, inputs / 2, ...]``, with a tile of gate, that of the same
    outputs of up, the next of gate; ``down`` ``[experts, tiles, inner / 2, ...]``. Tiles, and
    scales of int8 ``[experts, tiles, 1, columns]``, are those of `IntegerLinear`.
    """

    gate_up: torch.Tensor
    gate_up_scales: torch.Tensor | None
    down: torch.Tensor
    down_scales: torch.Tensor | None

    def __init__(self, experts: Any) -> None:
        super().__init__()
        number, columns = experts.num_experts, _KERNELS[experts.down_proj.dtype].columns
        for name, matrix, gate in zip(("gate_up", "down"), MATRICES, (True, False), strict=True):
            of_each: Callable[[int], Any] = getattr(experts, matrix).detach().__getitem__
            if are_packed(experts):
                of_each = functools.partial(packed_weight, experts, matrix)
            tiles, scales = _packed(of_each, number, columns, gate=gate)
            self.register_buffer(name, tiles, persistent=False)
            self.register_buffer(f"{name}_scales", scales, persistent=False)

    @staticmethod
    def fits(experts: Any) -> bool:
        """Whether the kernel computes these: gated, of bf16 or int8, of even widths."""
        return (
            is_gated_silu(experts)
            and experts.down_proj.dtype in (torch.bfloat16, torch.int8)
            and not any(width % 2 for width in experts.down_proj.shape[1:])
        )

    def forward(
        self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum ``[T, D]`` of the experts ``chosen`` ``[T, k]`` for rows ``[T, D]``."""
        # The kernel gets addresses. A program is checked once, when it is traced.
        inputs = 2 * self.gate_up.shape[2]
        if rows.dtype is not torch.bfloat16 or rows.shape[-1] != inputs:
            raise ValueError(
                f"rows of {rows.shape[-1]} numbers of {rows.dtype}, for experts of {inputs} "
                "numbers of torch.bfloat16"
            )
        compute = _compute if type(rows) is torch.Tensor else torch.ops.trencadis.tiled_experts
        own = (self.gate_up, self.gate_up_scales, self.down, self.down_scales)
        out: torch.Tensor = compute(rows, chosen.long(), weights.float(), *own)
        return out


def _packed(
    of_each: Callable[[int], Any], number: int, columns: int, *, gate: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tiles and scales of all experts, which are packed one after the other."""

    def packed(weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        order = _by_tiles if gate else _as_it_is
        if not isinstance(weight, PackedWeight):
            return tiled(order(weight, columns), columns), None
        ordered = PackedWeight(order(weight.steps, columns), order(weight.scales, columns))
        return integer_tiles(ordered, columns)[:2]

    each = map(packed, map(of_each, range(number)))
    first, of_first = next(each)
    tiles = first.new_empty((number, *first.shape))
    scales = None if of_first is None else of_first.new_empty((number, *of_first.shape))
    for expert, (own, of_own) in enumerate(itertools.chain(((first, of_first),), each)):
        tiles[expert] = own
        if scales is not None and of_own is not None:
            scales[expert] = of_own
    return tiles, scales


def _as_it_is(rows: torch.Tensor, columns: int) -> torch.Tensor:
    del columns
    return rows


def _by_tiles(rows: torch.Tensor, columns: int) -> torch.Tensor:
    """The rows of gate, then those of up, in turns: as many as a tile has of each, with zeros."""
    inner = len(rows) // 2
    halves = F.pad(rows.view(2, inner, -1), (0, 0, 0, -inner % columns))
    return halves.view(2, -1, columns, rows.shape[1]).transpose(0, 1).reshape(-1, rows.shape[1])


def _compute(
    rows: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    *others: torch.Tensor | None,
) -> torch.Tensor:
    return _sums(_KERNELS[gate_up.dtype], rows, chosen, weights, gate_up, *others)  # type: ignore[arg-type]


def _sums(
    kernel: _Kernel,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor | None,
    down: torch.Tensor,
    down_scales: torch.Tensor | None,
) -> torch.Tensor:
    rows, chosen, weights = rows.contiguous(), chosen.contiguous(), weights.contiguous()
    out = torch.empty_like(rows)
    (tokens, of_token), experts = chosen.shape, len(gate_up)
    sizes = (tokens, of_token, experts, 2 * gate_up.shape[2], 2 * down.shape[2])
    widens = int(kernel.widens)
    # What the kernel needs beside its result, so that it allocates nothing.
    scratch = rows.new_empty(kernel.scratch_bytes(*sizes, widens), dtype=torch.uint8)
    groups = (1, 1)
    if gate_up_scales is not None and down_scales is not None:
        groups = gate_up_scales.shape[2], down_scales.shape[2]
    scale_type = 0 if gate_up_scales is None else SCALE_TYPES[gate_up_scales.dtype]
    tensors = (rows, chosen, weights, gate_up, gate_up_scales, down, down_scales, out, scratch)
    addresses = tuple(map(data_address, tensors))
    numbers = (*sizes, *groups, scale_type, torch.get_num_threads(), widens)
    kernel.compute(*addresses, *numbers)
    if is_recording():
        note(address_of(kernel.compute), (*addresses, *numbers), (out, scratch))
    return out


_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "tiled_experts", _compute, "CompositeExplicitAutograd"
)
torch.library.register_fake(
    "trencadis::tiled_experts",
    lambda rows, *_: torch.empty_like(rows, memory_format=torch.contiguous_format),
    lib=_LIBRARY,
)


def _try(kernel: _Kernel, weights: torch.dtype) -> None:
    """Raise `NoKernel` where the kernel's result is not that of PyTorch."""
    number, hidden, inner = _TRIED_EXPERTS, _TRIED_HIDDEN, _TRIED_INNER
    values = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=values).bfloat16()

    plain = (random(number, 2 * inner, hidden), random(number, hidden, inner))
    held: list[torch.Tensor | None] = []
    exact = []
    for weight, gate in zip(plain, (True, False), strict=True):
        of_each: list[Any] = [*weight]
        if weights is torch.int8:
            of_each = [rounded_int8(each) for each in weight]
        held += _packed(of_each.__getitem__, number, kernel.columns, gate=gate)
        exact.append([x.unpacked() if weights is torch.int8 else x.float() for x in of_each])
    for tokens in _TRIED:
        rows = random(tokens, hidden)
        chosen = torch.rand(tokens, number, generator=values).topk(2).indices
        shares = torch.rand(tokens, 2, generator=values)
        expected = torch.zeros(tokens, hidden)
        for token in range(tokens):
            for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
                gate, up = (exact[0][expert] @ rows[token].float()).chunk(2)
                expected[token] += share * (exact[1][expert] @ (F.silu(gate) * up))
        found = _sums(kernel, rows, chosen, shares, *held).float()  # type: ignore[arg-type]
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        if not error <= TOLERANCE:
            raise NoKernel(f"its result for {tokens} tokens is off by {error:.3g}")
