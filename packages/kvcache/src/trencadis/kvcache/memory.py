"""Zeroed memory for the cache. Needs torch.

On the processor it lies in huge pages where the system has them. Blocks are pieces of some KiB at
random places, and a copy of such a piece spends as long on finding its small pages as on its bytes:
in huge pages scattered blocks are copied a fifth faster (``benchmarks/kvcache_copies.py``).
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
    """Zeros of this shape on this device, or ``pinned`` where an accelerator copies from them."""
    num_bytes = prod(shape) * dtype.itemsize
    ordinary = pinned or device.type != "cpu" or num_bytes < _HUGE_PAGE
    if ordinary or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype, device=device, pin_memory=pinned)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages says so; the memory is then as good as any other.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)
