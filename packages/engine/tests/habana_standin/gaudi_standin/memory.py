"""The device's memory: how much there is, and whose it is."""

from __future__ import annotations

import os

import torch

DEFAULT_LIMIT = 4 << 30


class DeviceMemory:
    """Bytes in use of a limit, as ``torch.hpu.memory_stats`` reports them."""

    def __init__(self) -> None:
        self.limit = _limit_of(os.environ.get("GAUDI_STANDIN_MEMORY", str(DEFAULT_LIMIT)))
        self.in_use = 0
        self.peak = 0

    def take(self, nbytes: int) -> None:
        if self.in_use + nbytes > self.limit:
            raise RuntimeError(
                f"Allocation failed for size:{nbytes}: {self.in_use} of {self.limit} bytes in use"
            )
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)

    def give_back(self, nbytes: int) -> None:
        self.in_use -= nbytes


def _limit_of(text: str) -> int:
    """Bytes: for all devices, or separated by commas, for that of each local rank."""
    limits = [int(part) for part in text.split(",")]
    return limits[int(os.environ.get("LOCAL_RANK", "0")) % len(limits)]


class Allocation:
    """One piece of device memory, shared by every tensor that is a view into it.

    ``users``: tensors that a program still holds. ``generation``: the replay that wrote it last,
    None where no graph owns it. ``moved``: a tensor that was here was given another place.
    """

    __slots__ = ("__weakref__", "_memory", "generation", "moved", "nbytes", "users")

    def __init__(self, nbytes: int, memory: DeviceMemory) -> None:
        self.nbytes = 0
        self._memory = memory
        memory.take(nbytes)
        self.nbytes = nbytes
        self.users = 0
        self.generation: int | None = None
        self.moved = False

    def __del__(self) -> None:
        self._memory.give_back(self.nbytes)


class Buffer:
    """Where a tensor lies: its values, with their strides, in an allocation."""

    __slots__ = ("allocation", "value")

    def __init__(self, value: torch.Tensor, allocation: Allocation) -> None:
        self.value = value
        self.allocation = allocation

    @property
    def key(self) -> tuple[object, ...]:
        """What a recipe depends on."""
        v = self.value
        return (tuple(v.shape), v.stride(), v.storage_offset(), v.dtype)


class Hold:
    """A tensor's hold on its allocation; falls with the tensor.

    A weak reference to the tensor would not do: those keep ``Module.to`` from swapping it.
    """

    __slots__ = ("_allocation",)

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation
        allocation.users += 1

    def __del__(self) -> None:
        self._allocation.users -= 1
