"""Settings of a simulation: one frozen value, under the names of the engine's own settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from trencadis.bucketing import BucketingConfig, BucketingError
from trencadis.engine.errors import ConfigError
from trencadis.engine.simulated.hardware import find_hardware
from trencadis.engine.validators import at_least, fraction
from trencadis.kvcache import DefragConfig, KVCacheError
from trencadis.warmup import WarmupConfig, WarmupError

_DEFAULT_SWAP_SPACE = 4 << 30
"""As ``vllm serve`` has it for ``--swap-space``, bytes."""


def _temperature(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not (math.isfinite(value) and value > -50):
        raise ConfigError(f"{attribute.name} must be a temperature in degrees C, got {value!r}")


def _known_device(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    find_hardware(value)


@attrs.frozen(kw_only=True)
class SimulationConfig:
    """What is simulated. Lengths in tokens, ``num_blocks`` in blocks, ``swap_space`` in bytes.

    None for ``max_model_len`` takes the longest request of the trace, within what the model
    allows; None for ``num_blocks`` fills the memory. ``thermal_policy`` is a name for
    `load_thermal_policy`, made with ``thermal_options``; "none" caps nothing. ``ambient_c`` is the
    air before the heat sink, degrees C. Raises `ConfigError`.
    """

    device: str = attrs.field(validator=_known_device)
    max_model_len: int | None = attrs.field(default=None, validator=at_least(2, optional=True))
    max_num_seqs: int = attrs.field(default=128, validator=at_least(1))
    max_num_batched_tokens: int = attrs.field(default=2048, validator=at_least(1))
    max_waiting: int = attrs.field(default=2048, validator=at_least(1))
    block_size: int = attrs.field(default=128, validator=at_least(1))
    num_blocks: int | None = attrs.field(default=None, validator=at_least(2, optional=True))
    gpu_memory_utilization: float = attrs.field(default=0.9, validator=fraction)
    swap_space: int = attrs.field(default=_DEFAULT_SWAP_SPACE, validator=at_least(0))
    thermal_policy: str = "none"
    thermal_options: Mapping[str, Any] = attrs.field(factory=dict)
    ambient_c: float = attrs.field(default=30.0, validator=_temperature)
    seed: int = attrs.field(default=0, validator=at_least(0))
    bucketing: BucketingConfig = attrs.field(factory=BucketingConfig)
    warmup: WarmupConfig = attrs.field(factory=WarmupConfig)
    defrag: DefragConfig = attrs.field(factory=DefragConfig)

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **settings: Any) -> SimulationConfig:
        """These settings, and what the environment says of buckets, warm-up, defragmentation and
        (``VLLM_THERMAL_POLICY``) heat. A setting given here wins. Raises `ConfigError`.
        """
        try:
            found: dict[str, Any] = {
                "bucketing": BucketingConfig.from_env(environ),
                "warmup": WarmupConfig.from_env(environ),
                "defrag": DefragConfig.from_env(environ),
            }
        except (BucketingError, WarmupError, KVCacheError) as error:
            raise ConfigError(str(error)) from error
        policy = environ.get("VLLM_THERMAL_POLICY", "").strip()
        if policy:
            found["thermal_policy"] = policy
        return cls(**{**found, **settings})
