"""Zeroed tensors, in huge pages on the CPU. Needs torch.

Blocks are pieces of some KiB at random addresses. In small pages the address translation of such a
piece takes as long as the copy of its bytes. In huge pages random blocks are copied 20 % faster
(``benchmarks/kvcache_copies.py``).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch

_HUGE_PAGE = 2 << 20


def zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> torch.Tensor:
    """A zero tensor, in huge pages if it is on the CPU, not ``pinned`` and 2 MiB or larger.

    ``pinned`` allocates pinned memory, for asynchronous copies from and to an accelerator.
    """
    num_bytes = prod(shape) * dtype.itemsize
    small_pages = pinned or device.type != "cpu" or num_bytes < _HUGE_PAGE
    if small_pages or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype, device=device, pin_memory=pinned)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages refuses the advice. The memory is usable in small pages.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)
