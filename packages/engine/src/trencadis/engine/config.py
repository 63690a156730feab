"""Engine settings: one frozen value, checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from trencadis.bucketing import BucketingConfig, BucketingError
from trencadis.engine.errors import ConfigError
from trencadis.kvcache import DefragConfig, KVCacheError
from trencadis.warmup import WarmupConfig, WarmupError

DType = Literal["auto", "bfloat16", "float16", "float32"]
WarmupMode = Literal["full", "background", "none"]


def _at_least(low: int, *, optional: bool = False) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if optional and value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(
                f"{attribute.name} must be an integer of at least {low}, got {value!r}"
            )

    return check


def _one_of(*accepted: str) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in accepted:
            raise ConfigError(
                f"{attribute.name} must be one of {', '.join(accepted)}, got {value!r}"
            )

    return check


def _fraction(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, (int, float)) or math.isnan(value) or not 0.0 < value <= 1.0:
        raise ConfigError(f"{attribute.name} must be above 0 and at most 1, got {value!r}")


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
    max_model_len: int | None = attrs.field(default=None, validator=_at_least(2, optional=True))
    max_num_seqs: int = attrs.field(default=32, validator=_at_least(1))
    max_num_batched_tokens: int = attrs.field(default=256, validator=_at_least(1))
    block_size: int = attrs.field(default=32, validator=_at_least(1))
    num_blocks: int | None = attrs.field(default=None, validator=_at_least(2, optional=True))
    gpu_memory_utilization: float = attrs.field(default=0.9, validator=_fraction)
    kv_cache_memory: int | None = attrs.field(default=None, validator=_at_least(1, optional=True))
    enable_prefix_caching: bool = True
    defrag: DefragConfig = attrs.field(factory=DefragConfig)
    max_waiting: int = attrs.field(default=2048, validator=_at_least(1))
    seed: int = attrs.field(default=0, validator=_at_least(0))
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
        """These settings, and what the environment says of buckets, warm-up and defragmentation.

        The variables are those of the Gaudi plugin: ``VLLM_PROMPT_*``, ``VLLM_DECODE_*``,
        ``VLLM_BUCKETING_*``, ``VLLM_SKIP_WARMUP``, ``VLLM_GRAPH_*``, ``VLLM_DEFRAG_*``. A setting
        given here wins. Raises `ConfigError`, which names the setting or variable.
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
            }
        except (BucketingError, WarmupError, KVCacheError) as error:
            raise ConfigError(str(error)) from error
        return cls(**{**found, **settings})

    @property
    def name(self) -> str:
        """The name under which clients address the model."""
        return self.served_model_name or self.model
