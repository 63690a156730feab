"""How device memory is divided after profiling: KV cache, graphs of each phase, margin (seed 000).

All sizes are bytes. Reading how much memory there is belongs to the host; see also `MemoryUse`.
"""

from __future__ import annotations

import attrs

from trencadis.warmup.errors import ConfigError
from trencadis.warmup.log_lines import format_bytes
from trencadis.warmup.validators import fraction, not_negative, positive


@attrs.frozen(kw_only=True)
class GraphBudget:
    """What graphs may take: ``total`` of the ``free`` bytes, ``prompt_ratio`` of it for prompts.

    The shares are where each phase starts; what one leaves over the other may use.
    """

    total: int = attrs.field(validator=not_negative)
    free: int = attrs.field(validator=not_negative)
    prompt_ratio: float = attrs.field(default=0.3, validator=fraction)

    @property
    def prompt(self) -> int:
        return int(self.total * self.prompt_ratio)

    @property
    def decode(self) -> int:
        return self.total - self.prompt

    def describe(self) -> str:
        """The log line of the seeds. Shares have a digit more, so that they add up as printed."""
        return (
            f"Using {format_bytes(self.total)}/{format_bytes(self.free)} of free device memory "
            f"for HPUGraphs, {format_bytes(self.prompt, 5)} for prompt and "
            f"{format_bytes(self.decode, 5)} for decode "
            f"(VLLM_GRAPH_PROMPT_RATIO={self.prompt_ratio:g})"
        )


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """What the memory left after the profiling run is used for. All sizes in bytes.

    ``gpu_memory_utilization`` of the free memory is usable; of that, ``graph_reserved_mem`` is
    kept for graphs, ``graph_prompt_ratio`` of it for prompts at first, and the rest holds the KV
    cache. Defaults and rule: seed 000.
    """

    free_after_profile: int = attrs.field(validator=positive)
    block_bytes: int = attrs.field(validator=positive)
    gpu_memory_utilization: float = attrs.field(default=0.9, validator=fraction)
    graph_reserved_mem: float = attrs.field(default=0.1, validator=fraction)
    graph_prompt_ratio: float = attrs.field(default=0.3, validator=fraction)

    @classmethod
    def from_profile(
        cls,
        free_after_profile: int,
        gpu_memory_utilization: float = 0.9,
        graph_reserved_mem: float = 0.1,
        graph_prompt_ratio: float = 0.3,
        *,
        block_bytes: int,
    ) -> MemoryPlan:
        """The plan for a device on which weights and the largest forward have had their share.

        Raises `ConfigError` where the cache would have no block beside the padding block.
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

    def graph_budget(self, free_memory: int) -> GraphBudget:
        """What graphs may take now, the KV cache being allocated and ``free_memory`` bytes free.

        All but the margin, as in the seed's log, where 79.16 GiB less the 39.58 usable ones stay
        free: the reserve, plus what rounding the cache down to whole blocks has left, less what
        warm-up has allocated since.
        """
        margin = int(self.free_after_profile - self.usable)
        return GraphBudget(
            total=max(0, free_memory - margin),
            free=free_memory,
            prompt_ratio=self.graph_prompt_ratio,
        )

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
