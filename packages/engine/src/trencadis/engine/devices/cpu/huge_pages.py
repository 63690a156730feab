"""Weights in huge pages: a decode step reads all of them, and small pages are looked up too often.

Two cores of an AMD EPYC read 36 GB/s in pages of 4 KiB, and 48 GB/s in those of 2 MiB. Linux has
huge pages where a process asks for them (madvise(2), ``MADV_HUGEPAGE``), in areas of megabytes. The
tensors of a model are smaller, so they are copied to one area, one after another.
"""

from __future__ import annotations

import ctypes
import logging
import mmap

import torch
from torch import nn

from trencadis.kvcache import ceil_div

logger = logging.getLogger("trencadis.engine")

_PAGE_BYTES = 2 << 20
_ALIGNMENT = 64
_LEAST_BYTES = 1 << 16
"""Of a tensor that is moved."""

_TRIMMED_BYTES = 64 << 20
"""As many may be there twice while tensors are moved."""


def move_to_huge_pages(model: nn.Module) -> None:
    """Move the buffers of a model, where the kernel has huge pages, but for weights of oneDNN.

    A tensor that several modules have stays one. The area is freed with the last of them.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    places: dict[int, int] = {}
    end = 0
    for module in model.modules():
        for name, tensor in module.named_buffers(recurse=False):
            if not _is_movable(tensor):
                continue
            owners.setdefault(id(tensor), []).append((module, name))
            if id(tensor) not in places:
                places[id(tensor)] = end
                end += ceil_div(tensor.nbytes, _ALIGNMENT) * _ALIGNMENT
    if end < _PAGE_BYTES:
        return
    try:
        size = ceil_div(end, _PAGE_BYTES) * _PAGE_BYTES
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(advice)
    except OSError as error:
        logger.info("Weights are in small pages, and slower to read: %s", error)
        return
    trimmed = 0
    for key, named in owners.items():
        module, name = named[0]
        moved = _copied(getattr(module, name), area, places[key])
        for owner, name in named:  # the tensor goes with its last owner, before the next is copied
            setattr(owner, name, moved)
        if places[key] - trimmed >= _TRIMMED_BYTES:
            trimmed = places[key]
            _trim()
    _trim()


def _is_movable(tensor: torch.Tensor) -> bool:
    """Whether it has many numbers and knows them by address: what oneDNN has packed does not."""
    is_large = tensor.nbytes >= _LEAST_BYTES
    return is_large and tensor.layout is torch.strided and tensor.is_contiguous()


def _trim() -> None:
    """Let the C library give memory back that it has kept of tensors that are gone."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _copied(tensor: torch.Tensor, area: mmap.mmap, place: int) -> torch.Tensor:
    room = torch.frombuffer(area, dtype=torch.uint8, count=tensor.nbytes, offset=place)
    copy = room.view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)
