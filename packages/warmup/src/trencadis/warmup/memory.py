"""How device memory is divided after profiling: graphs, KV cache, margin (seed 000)."""

from __future__ import annotations

import math
from typing import Any

import attrs

from trencadis.warmup.errors import ConfigError


def format_bytes(size: float) -> str:
    """Bytes as people read them, four significant digits: ``14.97 GiB``, ``-252 KiB``, ``0 B``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _fraction(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if math.isnan(value) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"{attribute.name} must be from 0 to 1, got {value!r}")


def _positive(_: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if value <= 0:
        raise ConfigError(f"{attribute.name} must be positive, got {value!r}")


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """What the memory left after the profiling run is used for. All sizes in bytes.

    ``gpu_memory_utilization`` of the free memory is usable; of that, ``graph_reserved_mem`` is
    kept for graphs and the rest holds the KV cache. Defaults and rule: seed 000.
    """

    free_after_profile: int = attrs.field(validator=_positive)
    block_bytes: int = attrs.field(validator=_positive)
    gpu_memory_utilization: float = attrs.field(default=0.9, validator=_fraction)
    graph_reserved_mem: float = attrs.field(default=0.1, validator=_fraction)

    @property
    def usable(self) -> float:
        return self.free_after_profile * self.gpu_memory_utilization

    @property
    def graphs(self) -> float:
        return self.usable * self.graph_reserved_mem

    @property
    def kv_cache(self) -> float:
        return self.usable - self.graphs

    @property
    def num_blocks(self) -> int:
        """KV blocks that fit, the padding block among them."""
        return int(self.kv_cache // self.block_bytes)

    def describe(self) -> str:
        """The log line of the seeds."""
        return (
            f"Free device memory: {format_bytes(self.free_after_profile)}, "
            f"{format_bytes(self.usable)} usable "
            f"(gpu_memory_utilization={self.gpu_memory_utilization:g}), "
            f"{format_bytes(self.graphs)} reserved for HPUGraphs "
            f"(VLLM_GRAPH_RESERVED_MEM={self.graph_reserved_mem:g}), "
            f"{format_bytes(self.kv_cache)} reserved for KV cache"
        )
