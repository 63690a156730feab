"""The small interface behind which devices differ."""

from __future__ import annotations

import abc

import torch
from torch import nn


class Device(abc.ABC):
    """Memory, synchronisation, and what a device does to weights before it runs them."""

    name: str
    torch_device: torch.device
    preferred_dtype: torch.dtype
    default_kv_cache_memory: int | None
    """Bytes of KV cache where memory is shared with the host; None where it is the device's."""

    @abc.abstractmethod
    def free_memory(self) -> int:
        """Memory that new tensors could take, bytes."""

    @abc.abstractmethod
    def total_memory(self) -> int:
        """Memory of the device, bytes."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until everything submitted is done."""

    @abc.abstractmethod
    def optimize(self, model: nn.Module) -> None:
        """Rearrange a loaded model's weights in place, as this device reads them fastest."""
