"""What adapters add to a linear layer of bf16, as a kernel of our own.

A row computes with the matrices of its own slot alone, and only with as many rows of them as its
adapter has. PyTorch has no product of rows by matrices that differ between them: it would compute
every slot for every row, or call an operation for each adapter.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from trencadis.engine.devices.cpu.native_calls import Address, address_of, is_recording, note
from trencadis.engine.devices.cpu.native_kernel import NoKernel, load_kernel
from trencadis.engine.models.adapter_layers import sorted_slots
from trencadis.engine.models.adapter_operator import AdapterKernel

_SOURCE = Path(__file__).with_name("adapter_products.cpp")

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64

_ROWS = 4
"""Rows that the kernel computes together, which a thread keeps in fp32."""

_INT32_BYTES = 4

_TOLERANCE = 0.02
"""Largest difference to the product in fp32 in a trial, beside the largest value."""

_TRIED = ((16, 64), (37, 75), (128, 48))
"""Inputs and outputs of the layers of a trial."""


def load_adapter_kernel(directory: Path | None = None, *, trusted: bool = False) -> AdapterKernel:
    """The kernel, compiled for this processor and compared with PyTorch. Raises `NoKernel`.

    ``directory`` and ``trusted`` are those of `load_kernel`.
    """
    function = load_kernel(_SOURCE, (), directory, trusted=trusted).add_adapters
    function.argtypes, function.restype = (*[_POINTER] * 9, *[_INTEGER] * 5), None

    def compute(
        rows: torch.Tensor,
        before: torch.Tensor,
        out: torch.Tensor,
        of_rows: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        most_rank: int,
    ) -> None:
        # As few operations as can be: a step calls this for each linear layer.
        rows = rows.contiguous()
        inputs, outputs, num_rows = down.shape[1], up.shape[1], of_rows.shape[1]
        threads = torch.get_num_threads()
        scratch = rows.new_empty(_ROWS * threads, inputs + 2 * most_rank, dtype=torch.float32)
        first, size = of_rows.data_ptr(), _INT32_BYTES * num_rows
        addresses = (
            *(rows.data_ptr(), before.data_ptr(), out.data_ptr(), first, first + size),
            *(first + 2 * size, down.data_ptr(), up.data_ptr(), scratch.data_ptr()),
        )
        sizes = (num_rows, inputs, outputs, most_rank, threads)
        function(*addresses, *sizes)
        if is_recording():
            note(address_of(function), (*map(Address, addresses), *sizes), (out, scratch))

    for shape in _TRIED:
        _try(compute, *shape)
    return compute


def _try(compute: AdapterKernel, inputs: int, outputs: int) -> None:
    """Raise `NoKernel` where the kernel's result is not that of PyTorch."""
    ranks = torch.tensor([0, 5, 0, 8], dtype=torch.int32)
    slots = torch.tensor([1, 0, 3, 1, 3, 3, 3, 3, 2, 1], dtype=torch.int32)
    down, up, rows = _random(24, inputs), _random(24, outputs), _random(len(slots), inputs)
    before = _random(len(slots), outputs)
    expected = before.float()
    for row, slot in enumerate(slots.tolist()):
        held = slice((slot - 1) * 8, (slot - 1) * 8 + int(ranks[slot]))
        expected[row] += (rows[row].float() @ down[held].float().t()) @ up[held].float()
    out = torch.empty_like(before)
    compute(rows, before, out, sorted_slots(slots, ranks), down, up, 8)
    error = ((out.float() - expected).abs().max() / expected.abs().max()).item()
    if not error <= _TOLERANCE or not torch.equal(out[slots == 0], before[slots == 0]):
        raise NoKernel(f"its result for {inputs} inputs is off by {error:.3g}")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()
