"""Sums over the ranks of a machine through memory that they share.

gloo sends a tensor through sockets of the kernel, which takes longer than the layer whose result it
sums. Here a rank reads those of the others. A rank that does not come within the limit of the
process group is an error, as there; the core ends all ranks where one has ended.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trencadis.engine.devices.cpu.native_kernel import load_kernel
from trencadis.engine.models.rank_part import RankPart

_SOURCE = Path(__file__).with_name("rank_sums.cpp")

_HEAD_BYTES = 4096
_PLACE_BYTES = 1 << 20
"""Of the tensor of a rank so much is summed at once. Memory is taken when it is first written."""

_LOOKS = 2000
"""How often a rank looks for another before it sleeps: some ten microseconds, in which it comes
where each has a core. With fewer cores than ranks it is never there sooner than one sleeps."""

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


class RankSums:
    """Sums tensors of fp32 and bf16 over the ranks, in fp32.

    ``memory``: the descriptor of a file without content, the same for all ranks. ``limit_s``: how
    long a rank may be waited for. ``directory`` and ``trusted`` are those of `load_kernel`, and
    `NoKernel` is raised as there.
    """

    def __init__(
        self,
        memory: int,
        part: RankPart,
        limit_s: float,
        directory: Path | None = None,
        *,
        trusted: bool = False,
    ) -> None:
        self._function: Callable[..., int] = load_kernel(
            _SOURCE, (), directory, trusted=trusted
        ).sum_over_ranks
        named: Any = self._function
        named.argtypes = [
            *(_POINTER, _INTEGER, _INTEGER, _INTEGER, _POINTER),
            *(_INTEGER, _INTEGER, _INTEGER, ctypes.c_double),
        ]
        named.restype = _INTEGER
        num_bytes = _HEAD_BYTES + 2 * part.size * _PLACE_BYTES
        os.ftruncate(memory, num_bytes)
        self._shared = mmap.mmap(memory, num_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._shared))
        self._part = part
        self._limit_s = limit_s
        self._looks = _LOOKS if (os.cpu_count() or 1) >= part.size else 0

    def __call__(self, part: torch.Tensor) -> torch.Tensor | None:
        """The sum of the ranks' tensors, which have one shape; None for another dtype.

        Raises `RuntimeError` where a rank does not come.
        """
        if part.dtype not in (torch.bfloat16, torch.float32):
            return None
        summed = part.clone(memory_format=torch.contiguous_format)
        missing = self._function(
            *(self._address, _PLACE_BYTES, self._part.size, self._part.rank, summed.data_ptr()),
            *(summed.numel(), part.dtype is torch.bfloat16, self._looks, self._limit_s),
        )
        if missing:
            raise RuntimeError(
                f"rank {missing - 1} has not come to a sum within {self._limit_s:g} s"
            )
        return summed
