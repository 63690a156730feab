"""How device memory is divided after the profiling run: KV cache, graphs, margin (seed 000).

All sizes are bytes. The host measures free memory and passes it in.
"""

from __future__ import annotations

import attrs

from trencadis.warmup.errors import ConfigError
from trencadis.warmup.log_lines import format_bytes
from trencadis.warmup.runtime import Phase
from trencadis.warmup.validators import MAX_BYTES, integer, number

GPU_MEMORY_UTILIZATION = 0.9
"""Default share of the free memory that may be used (seed 000)."""

GRAPH_RESERVED_MEM = 0.1
"""Default share of the usable memory that is reserved for graphs (seed 000)."""

GRAPH_PROMPT_RATIO = 0.3
"""Default share of the graph memory that prompt graphs may take first (seed 000)."""


@attrs.frozen(kw_only=True)
class GraphBudget:
    """Device memory that graphs may take: ``total`` of the ``free`` bytes.

    Prompt graphs start with ``prompt_ratio`` of it, decode graphs with the rest. A phase may also
    use what the other phase leaves unused.
    """

    total: int = attrs.field(validator=integer(0, MAX_BYTES))
    free: int = attrs.field(validator=integer(0, MAX_BYTES))
    prompt_ratio: float = attrs.field(default=GRAPH_PROMPT_RATIO, validator=number(0, 1))

    @property
    def prompt(self) -> int:
        """Share of the prompt graphs, bytes."""
        return int(self.total * self.prompt_ratio)

    @property
    def decode(self) -> int:
        """Share of the decode graphs, bytes."""
        return self.total - self.prompt

    def share(self, phase: Phase) -> int:
        """Share of the graphs of a phase, bytes."""
        return self.prompt if phase is Phase.PROMPT else self.decode

    def describe(self) -> str:
        """The log line of seed 000. Shares have five digits, so that they add up."""
        return (
            f"Using {format_bytes(self.total)}/{format_bytes(self.free)} of free device memory "
            f"for HPUGraphs, {format_bytes(self.prompt, 5)} for prompt and "
            f"{format_bytes(self.decode, 5)} for decode "
            f"(VLLM_GRAPH_PROMPT_RATIO={self.prompt_ratio:g})"
        )


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """Divides the memory that is free after the profiling run. Rule and defaults: seed 000.

    ``gpu_memory_utilization`` of ``free_after_profile`` is usable. Of that, ``graph_reserved_mem``
    is reserved for graphs; the rest holds the KV cache in blocks of ``block_bytes``.
    ``graph_prompt_ratio`` of the graph memory is for prompt graphs first.
    """

    free_after_profile: int = attrs.field(validator=integer(1, MAX_BYTES))
    block_bytes: int = attrs.field(validator=integer(1, MAX_BYTES))
    gpu_memory_utilization: float = attrs.field(
        default=GPU_MEMORY_UTILIZATION, validator=number(0, 1)
    )
    graph_reserved_mem: float = attrs.field(default=GRAPH_RESERVED_MEM, validator=number(0, 1))
    graph_prompt_ratio: float = attrs.field(default=GRAPH_PROMPT_RATIO, validator=number(0, 1))

    @classmethod
    def from_profile(
        cls,
        free_after_profile: int,
        gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
        graph_reserved_mem: float = GRAPH_RESERVED_MEM,
        graph_prompt_ratio: float = GRAPH_PROMPT_RATIO,
        *,
        block_bytes: int,
    ) -> MemoryPlan:
        """The plan for a device that holds the weights and has run the largest forward pass.

        Raises `ConfigError` if the cache has no block besides the padding block.
        """
        plan = cls(
            free_after_profile=free_after_profile,
            block_bytes=block_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            graph_reserved_mem=graph_reserved_mem,
            graph_prompt_ratio=graph_prompt_ratio,
        )
        if plan.num_blocks < 2:
            raise ConfigError(
                f"{format_bytes(plan.kv_cache)} for the KV cache do not hold two blocks of "
                f"{format_bytes(block_bytes)}: raise gpu_memory_utilization "
                f"({gpu_memory_utilization:g}), lower VLLM_GRAPH_RESERVED_MEM "
                f"({graph_reserved_mem:g}) or use smaller blocks"
            )
        return plan

    @property
    def usable(self) -> float:
        """Bytes for KV cache and graphs."""
        return self.free_after_profile * self.gpu_memory_utilization

    @property
    def graphs(self) -> float:
        """Bytes reserved for graphs."""
        return self.usable * self.graph_reserved_mem

    @property
    def kv_cache(self) -> float:
        """Bytes for the KV cache."""
        return self.usable - self.graphs

    @property
    def num_blocks(self) -> int:
        """KV blocks that fit, including the padding block."""
        return int(self.kv_cache // self.block_bytes)

    def graph_budget(self, free_memory: int) -> GraphBudget:
        """The graph budget once the KV cache is allocated and ``free_memory`` bytes are free.

        What is free above the margin that ``gpu_memory_utilization`` leaves, but never more than
        the reserve and two blocks: so much the rounding of the cache and of the allocator can
        leave. (Seed 000 logs 15.83 GiB reserved and 15.85 GiB used, with 39.58 of 79.16 GiB left
        free.) A KV cache that is smaller than planned does not make the graphs larger. Raises
        `ConfigError` unless ``free_memory`` is a number of bytes.
        """
        integer(0, MAX_BYTES).checked("free_memory", free_memory)
        margin = int(self.free_after_profile - self.usable)
        reserve = int(self.graphs) + 2 * self.block_bytes if self.graphs else 0
        return GraphBudget(
            total=max(0, min(free_memory - margin, reserve)),
            free=free_memory,
            prompt_ratio=self.graph_prompt_ratio,
        )

    def describe(self) -> str:
        """The log line of seed 000."""
        return (
            f"Free device memory: {format_bytes(self.free_after_profile)}, "
            f"{format_bytes(self.usable)} usable "
            f"(gpu_memory_utilization={self.gpu_memory_utilization:g}), "
            f"{format_bytes(self.graphs)} reserved for HPUGraphs "
            f"(VLLM_GRAPH_RESERVED_MEM={self.graph_reserved_mem:g}), "
            f"{format_bytes(self.kv_cache)} reserved for KV cache"
        )
