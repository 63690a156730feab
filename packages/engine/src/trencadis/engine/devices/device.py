"""The small interface behind which devices differ."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trencadis.engine.errors import DeviceError


class Graph(abc.ABC):
    """A forward recorded for one shape: replayed on new values of the same shape."""

    @abc.abstractmethod
    def replay(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Copy ``inputs`` into the graph's own buffers and run it.

        The result is valid until the next replay. Raises `GraphError` for a changed shape or type.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Give the graph's memory back; it cannot be replayed again."""


class Device(abc.ABC):
    """Memory, synchronisation, and what a device does to weights before it runs them."""

    name: str
    torch_device: torch.device
    preferred_dtype: torch.dtype
    default_kv_cache_memory: int | None
    """Bytes of KV cache where memory is shared with the host; None where it is the device's."""
    supports_graphs: bool = False
    temperature_source: str | None = None
    """Name of the scheduler's telemetry source that reads this device's temperatures."""

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

    def mark_step(self) -> None:  # noqa: B027 - most devices have nothing to do
        """End of a piece of work that a lazy device collects; nothing elsewhere."""

    def capture(self, run: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> Graph:
        """Record ``run(*inputs)``; raises `DeviceError` where ``supports_graphs`` is False."""
        raise DeviceError(f"device {self.name} records no graphs")

    def compile(
        self, module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], cached: Path | None
    ) -> Callable[..., Any]:
        """``module``, one decoder layer traced for the shapes of ``inputs``, compiled for them."""
        raise DeviceError(f"device {self.name} compiles no modules")

    def num_compilations(self) -> int:
        """Recipes or kernels compiled so far in this process."""
        return 0
