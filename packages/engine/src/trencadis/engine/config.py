"""Engine settings: one frozen value, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from trencadis.bucketing import BucketingConfig, BucketingError
from trencadis.engine.errors import ConfigError
from trencadis.engine.validators import at_least, fraction, not_negative, positive
from trencadis.kvcache import DefragConfig, KVCacheError
from trencadis.warmup import WarmupConfig, WarmupError

DEFAULT_SWAP_SPACE = 4.0
"""GiB, as in ``vllm serve --swap-space``."""

DType = Literal["auto", "bfloat16", "float16", "float32"]
WarmupMode = Literal["full", "background", "none"]


def _one_of(*accepted: str) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in accepted:
            raise ConfigError(
                f"{attribute.name} must be one of {', '.join(accepted)}, got {value!r}"
            )

    return check


@attrs.frozen(kw_only=True)
class EngineConfig:
    """Everything an engine is built from. Names are those of ``vllm serve`` flags.

    ``model`` is a directory with a checkpoint, a GGUF file, or a hub id. Lengths are in tokens.
    ``block_size`` is in tokens per KV block, ``num_blocks`` in blocks (None: from free memory).
    ``kv_cache_memory`` is in bytes and bounds the KV cache where memory is shared with the host.
    ``enable_prefix_caching`` reuses the blocks of prompts that begin alike.
    ``defrag`` says when the cache is defragmented.
    ``warmup`` says when shapes are made ready: all before the first request, the first ones before
    and the rest behind traffic, or each when it first comes. ``graphs`` says which of them are
    captured within what memory, where the device captures. ``compile`` gives each shape a program
    for the decoder layers; ``compile_cache`` is the directory that keeps them (None: the user's
    cache directory).
    ``max_waiting`` bounds the queue of requests that have not started; one more is refused.
    ``scheduling_policy``: ``fcfs``, or ``priority`` (requests of a lower value first).

    ``swap_space`` is host memory for evicted sequences, in GiB: None takes 4 where the device has
    memory of its own, and nothing where it lies in the host's already. ``num_host_blocks``, in
    blocks, takes its place where given. ``swap_bandwidth`` bounds that traffic, in GB/s.

    ``temperature_source`` is read in the background, ``thermal_policy`` caps running sequences by
    what it says, both in the words of `trencadis.scheduler`; a policy without a source reads the
    device's own. ``thermal_policy_config`` are the policy's settings.

    Raises `ConfigError` on a value out of range or on settings that contradict each other.
    """

    model: str
    served_model_name: str | None = None
    dtype: DType = attrs.field(
        default="auto", validator=_one_of("auto", "bfloat16", "float16", "float32")
    )
    device: str = attrs.field(
        default="auto", validator=_one_of("auto", "cpu", "cuda", "hpu", "simulated")
    )
    max_model_len: int | None = attrs.field(default=None, validator=at_least(2, optional=True))
    max_num_seqs: int = attrs.field(default=32, validator=at_least(1))
    max_num_batched_tokens: int = attrs.field(default=256, validator=at_least(1))
    block_size: int = attrs.field(default=32, validator=at_least(1))
    num_blocks: int | None = attrs.field(default=None, validator=at_least(2, optional=True))
    gpu_memory_utilization: float = attrs.field(default=0.9, validator=fraction)
    kv_cache_memory: int | None = attrs.field(default=None, validator=at_least(1, optional=True))
    enable_prefix_caching: bool = True
    defrag: DefragConfig = attrs.field(factory=DefragConfig)
    max_waiting: int = attrs.field(default=2048, validator=at_least(1))
    scheduling_policy: Literal["fcfs", "priority"] = attrs.field(
        default="fcfs", validator=_one_of("fcfs", "priority")
    )
    swap_space: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(not_negative)
    )
    num_host_blocks: int | None = attrs.field(default=None, validator=at_least(0, optional=True))
    swap_bandwidth: float = attrs.field(default=20.0, validator=positive)
    temperature_source: str | None = None
    thermal_policy: str | None = None
    thermal_policy_config: Mapping[str, Any] = attrs.field(factory=dict)
    seed: int = attrs.field(default=0, validator=at_least(0))
    warmup: WarmupMode = attrs.field(
        default="full", validator=_one_of("full", "background", "none")
    )
    graphs: WarmupConfig = attrs.field(factory=WarmupConfig)
    compile: bool = False
    compile_cache: str | None = None
    bucketing: BucketingConfig | None = None
    use_buckets: bool = attrs.field(default=True)

    @block_size.validator
    def _power_of_two(self, _: object, value: int) -> None:
        if value & (value - 1):
            raise ConfigError(f"block_size must be a power of two, got {value}")

    @use_buckets.validator
    def _buckets_to_compile(self, _: object, value: bool) -> None:
        if self.compile and not value:
            raise ConfigError(
                "compile needs buckets, since a program is for one shape: leave use_buckets on, "
                "or compile off"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **settings: Any) -> EngineConfig:
        """These settings, and what the environment says of buckets, warm-up, defragmentation and
        heat.

        The variables are those of the Gaudi plugin: ``VLLM_PROMPT_*``, ``VLLM_DECODE_*``,
        ``VLLM_BUCKETING_*``, ``VLLM_SKIP_WARMUP``, ``VLLM_GRAPH_*``, ``VLLM_DEFRAG_*``; and seed
        003's ``VLLM_THERMAL_POLICY``. A setting given here wins. Raises `ConfigError`, which names
        the setting or variable.
        """
        try:
            bucketing = BucketingConfig.from_env(environ)
            graphs = WarmupConfig.from_env(environ)
            found: dict[str, Any] = {
                # Nothing set means the device's own default grid, not the plugin's.
                "bucketing": None if bucketing == BucketingConfig() else bucketing,
                "warmup": "none" if graphs.skip else "full",
                "graphs": attrs.evolve(graphs, skip=False),
                "defrag": DefragConfig.from_env(environ),
                "thermal_policy": environ.get("VLLM_THERMAL_POLICY", "").strip() or None,
            }
        except (BucketingError, WarmupError, KVCacheError) as error:
            raise ConfigError(str(error)) from error
        return cls(**{**found, **settings})

    @property
    def name(self) -> str:
        """The name under which clients address the model."""
        return self.served_model_name or self.model
