"""What the engine core asks of whatever holds the model: one device, or several ranks.

All that crosses is a value, or a call without tensors. `InProcessExecutor` has one worker in the
core's process, `RankExecutor` has one in each rank. A simulated device implements `execute` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from trencadis.bucketing import Bucket
from trencadis.engine.api.inspection import GridUsage
from trencadis.engine.models.adapter_files import Adapter
from trencadis.engine.models.loader import ModelSpec
from trencadis.engine.runner.adapter_store import AdapterReader, LoadedAdapter
from trencadis.engine.runner.limits import ServingLimits
from trencadis.engine.runner.shapes import DecodeRead
from trencadis.engine.runner.step import PendingStep, StepInput
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.kvcache import Content
from trencadis.warmup import Phase, WarmupReport


@attrs.frozen
class DeviceFacts:
    """The device: ``defaults`` replaces settings that the user left open, the sensors are its own
    temperature source and its devices there (None: all)."""

    name: str
    defaults: Mapping[str, Any]
    temperature_source: str | None
    sensor_indices: tuple[int, ...] | None


@attrs.frozen(kw_only=True)
class ModelFacts:
    """A model with its KV cache, as the core has to know it.

    ``block_bytes``: bytes of a KV block in all layers of a group. ``windows``: those of the block
    groups (`CacheConfig.windows`). ``max_chunk_tokens``: the longest prefill
    chunk; None without buckets. ``read``: how decode reads the cache. ``num_shared_blocks``: how
    many of the first blocks are scored once for all sequences of a batch. ``num_buckets``: of both
    phases. ``embedding_size``: numbers of an embedding; 0 for a model without. ``num_state_slots``,
    ``num_host_state_slots``: slots of states, on the device and on the host; 0 for a model without.
    ``num_state_snapshots``: slots of states after cached prefixes. ``state_bytes``: bytes of the
    state of a sequence. ``scored_token_cost``: of a step's token budget, what a prompt token takes
    whose log-probability is asked for.
    """

    config: EngineConfig
    spec: ModelSpec
    limits: ServingLimits
    num_host_blocks: int
    block_bytes: int
    max_chunk_tokens: int | None
    read: DecodeRead
    num_shared_blocks: int
    dtype: str
    num_buckets: int
    embedding_size: int
    num_state_slots: int = 0
    num_host_state_slots: int = 0
    num_state_snapshots: int = 0
    state_bytes: int = 0
    scored_token_cost: float = 1.0
    windows: tuple[int | None, ...] = (None,)


@attrs.frozen(kw_only=True)
class ExecutorCounters:
    """State of buckets and graphs, and totals since the model is served. See `EngineStats`."""

    num_ready_buckets: int
    num_graphs: int
    num_padded_tokens: int
    num_bucket_misses: int
    num_cold_forwards: int
    num_compilations: int


class Executor(Protocol):
    """Holds one model at a time and executes steps on it; other models wait in host memory.

    A model is ready after `load`, `plan_memory` and `warm_up`, in this order. Each of them raises
    `ModelError` or `ConfigError` where the model cannot be served.
    """

    device_facts: DeviceFacts
    on_cold: Callable[[object], None]
    """Called with a shape before a forward pass in live traffic that may compile: set it before
    `load`."""

    @property
    def is_asleep(self) -> bool:
        """Whether the device memory is released, so that no step can be executed."""

    @property
    def is_warming_up(self) -> bool:
        """Whether buckets are left for the background warm-up."""

    # A model, from its checkpoint to its first step.

    def check(self, config: EngineConfig) -> None:
        """Raise the error of a `load` that would fail, as far as settings and files tell.

        Changes nothing, and may be called in another thread while steps are executed.
        """

    def load(self, config: EngineConfig) -> bool:
        """Load the model's weights; returns whether they were still in host memory."""

    def plan_memory(self) -> ModelFacts:
        """Take the device memory: size and allocate the KV cache."""

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> WarmupReport | None:
        """Warm up as the settings say, unless the model's programs were kept.

        Returns None where the rest is warmed up in the background, or nothing is. ``stop`` is
        polled before each bucket; True ends the warm-up.
        """

    def advance_warm_up(self, *, idle: bool) -> None:
        """Warm up the next bucket in the background; ``idle``: no step waits for it."""

    # Adapters of the model.

    def adapter_reader(self) -> AdapterReader:
        """What reads an adapter for the model. Raises `AdapterError` where it has no slots."""

    def hold_adapter(self, adapter: Adapter) -> LoadedAdapter:
        """Hold what was read for the model in host memory. Raises `AdapterError`."""

    def holds_adapter(self, digest: str) -> bool:
        """Whether an adapter of this content is in host memory."""

    def drop_adapter(self, digest: str) -> None:
        """Free the host memory of an adapter, which no later step names."""

    # Steps.

    def execute(self, step: StepInput) -> PendingStep:
        """Start a step: block copies, then forward passes and sampling. Waits for swaps alone.

        A second step may be started before the first has been waited for, no third.
        """

    def staging_blocks(self) -> Sequence[Content]:
        """The memory of the host blocks after those of swaps, for tiers. None without tiers."""

    def pays_to_jump(self, start: int, num_forced: int, num_seqs: int) -> bool:
        """Whether a chunk of a token at ``start`` and ``num_forced`` more beats a step for each.

        ``num_seqs``: how many sequences wait for that chunk.
        """

    def probe(self) -> None:
        """Run the smallest forward pass. Raises if the device has failed."""

    def counters(self) -> ExecutorCounters:
        """The counters now."""

    def grid_usage(self) -> tuple[GridUsage, ...]:
        """The state and the hits of the buckets of both phases."""

    def missing_buckets(self) -> Sequence[tuple[Phase, Bucket]]:
        """The buckets with a program that the compile cache lacks."""

    # Another model, and sleep.

    def memory_in_use(self) -> int:
        """Bytes in use of the device's memory; on the CPU those of this process."""

    def has_weights(self, config: EngineConfig) -> bool:
        """Whether `load` needs no checkpoint for the model of this configuration."""

    def put_aside(self, following: EngineConfig, stash_bytes: int) -> None:
        """Release the device memory of the model, for the model of ``following``.

        Models that wait take at most ``stash_bytes`` of host memory; others are dropped.
        """

    def unload(self) -> None:
        """Let the model that was put aside wait in host memory; drop it where it has no space."""

    def put_back(self) -> None:
        """Drop what was loaded since `put_aside`, whose model is to `wake`."""

    def sleep(self, level: int) -> None:
        """Release the device memory. Level 1 keeps the weights in host memory, 2 drops them."""

    def wake(self, stop: Callable[[], bool] = lambda: False) -> ModelFacts:
        """Take the device memory again, from wherever the weights are, and warm up if needed.

        After an error the model still sleeps, once `sleep` was called.
        """

    def close(self) -> None:
        """Write what was recorded."""
