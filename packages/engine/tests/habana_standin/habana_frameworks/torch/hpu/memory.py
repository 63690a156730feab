"""Memory figures. Source: ``habana_frameworks/torch/hpu/memory.py``."""

from gaudi_standin.bridge import BRIDGE

__all__ = [
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "memory_stats",
    "reset_peak_memory_stats",
]


def memory_stats(device: object = None) -> dict[str, int]:
    memory = BRIDGE.memory
    return {"Limit": memory.limit, "InUse": memory.in_use, "MaxInUse": memory.peak}


def memory_allocated(device: object = None) -> int:
    return memory_stats()["InUse"]


def max_memory_allocated(device: object = None) -> int:
    return memory_stats()["MaxInUse"]


def reset_peak_memory_stats(device: object = None) -> None:
    """The peak becomes 0, and what is in use at the next allocation, as in the bridge's pools
    (``reset_peak_mem_stats`` in ``backend/synapse_helpers/pool_allocator``)."""
    BRIDGE.memory.peak = 0


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Free and total bytes."""
    stats = memory_stats()
    return stats["Limit"] - stats["InUse"], stats["Limit"]
