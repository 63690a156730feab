"""The small interface behind which devices differ."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn


class Graph(abc.ABC):
    """A computation recorded for inputs of one shape, and replayed on others of that shape."""

    @abc.abstractmethod
    def replay(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy ``inputs`` into the graph's own and run it; the result holds until the next replay.

        Raises `GraphError` for inputs of another shape or dtype than the recorded ones, and after
        `release`.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Give the graph's memory back."""


class Device(abc.ABC):
    """Memory, synchronisation, what a device does to weights, and how it prepares shapes."""

    name: str
    torch_device: torch.device
    preferred_dtype: torch.dtype
    default_kv_cache_memory: int | None
    """Bytes of KV cache where memory is shared with the host; None where it is the device's."""

    supports_graphs: bool = False
    """Whether `capture` can record a forward."""

    dynamic_shapes: bool = True
    """Whether an operation on a new shape, or of a shape that depends on data, runs without being
    compiled first. Where not, sampling is done by the host."""

    updates_views: bool = True
    """Whether a recorded graph may update a view in place. Where not, each layer's keys and values
    are tensors of their own."""

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
        """End of a piece of work that a lazy device collects before it computes."""

    def capture(self, run: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> Graph:
        """Record ``run(*inputs)``. Only where `supports_graphs`."""
        raise NotImplementedError(f"{self.name} records no graphs")

    @abc.abstractmethod
    def compiler_missing(self) -> str | None:
        """What `compile` lacks on this machine, in words for its user; None where nothing."""

    @abc.abstractmethod
    def keep_compiled(self, directory: Path) -> None:
        """Keep what is compiled in ``directory``, and look there before compiling."""

    @abc.abstractmethod
    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """``module``, traced for ``inputs``, as a program for exactly their shapes.

        ``inputs`` may be fake tensors; the program takes as many and returns what the module does.
        """

    @abc.abstractmethod
    def num_compilations(self) -> int:
        """Programs compiled by this process so far; those found in a cache do not count."""
