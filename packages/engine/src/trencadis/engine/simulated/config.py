"""Settings of a simulation: one frozen value, under the names of the engine's own settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from trencadis.bucketing import BucketingConfig
from trencadis.engine.errors import ConfigError, shown
from trencadis.engine.settings.capacity_settings import (
    DEFAULT_SWAP_SPACE,
    HEAT,
    MAX_BYTES,
    MEMORY,
    MODEL,
    THERMAL_POLICIES,
    CapacitySettings,
)
from trencadis.engine.settings.flags import (
    GIB,
    from_env,
    parse_gib,
    parse_option,
    setting,
    setting_field,
    variables_of,
    warn_of_misspelt_variables,
    with_defaults,
)
from trencadis.engine.settings.library_settings import (
    AXIS_SETTINGS,
    BUCKETING_VARIABLES,
    DEFRAG_VARIABLES,
    GRAPH_VARIABLES,
    SKIP_WARMUP,
    library_settings,
    library_variables,
)
from trencadis.engine.simulated.cost_model import LOGIT_READS
from trencadis.engine.simulated.hardware import HARDWARE
from trencadis.engine.validators import boolean, integer, number, one_of
from trencadis.kvcache import DefragConfig
from trencadis.warmup import WarmupConfig


def _mapping(
    options: Mapping[str, Any] | Iterable[tuple[str, Any]],
) -> dict[str, Any]:
    return dict(options)


@attrs.frozen(
    kw_only=True,
    field_transformer=with_defaults(
        {
            "max_model_len": "the longest request of the trace, within the model's context length",
            "max_mixed_prefill_tokens": "--max-num-batched-tokens",
        },
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        block_size=128,
    ),
)
class SimulationConfig(CapacitySettings):
    """What is simulated.

    `docs/engine/simulator.md` lists meaning, default and flag of each. Raises `ConfigError`.
    """

    device: str = attrs.field(
        validator=one_of(HARDWARE),
        metadata=setting("--device", metavar="NAME", group=MODEL, help=", ".join(HARDWARE)),
    )
    quantization: str = setting_field(
        "none",
        one_of(("none", "fp8", "inc")),
        "--quantization",
        group=MODEL,
        help="the layers' weights and their products in FP8: fp8 or, as vLLM calls it on "
        "Gaudi, inc; none is the checkpoint's type",
    )
    tensor_parallel_size: int = setting_field(
        1,
        integer(1, 8),
        "--tensor-parallel-size",
        metavar="N",
        group=MODEL,
        help="devices of one machine that divide each layer between them; figures of memory, heat "
        "and power are those of each",
    )
    kv_cache_dtype: str = setting_field(
        "auto",
        one_of(("auto", "fp8", "fp8_inc")),
        "--kv-cache-dtype",
        group=MODEL,
        help="KV cache in FP8: fp8 or, as vLLM calls it on Gaudi, fp8_inc; auto is the "
        "checkpoint's type",
    )
    sampling: str = setting_field(
        "device",
        one_of(("device", "host")),
        "--sampling",
        group=MODEL,
        help="where tokens are sampled: host copies all logits over the link, device only the "
        "tokens",
    )
    draw: str = setting_field(
        "greedy",
        one_of(tuple(LOGIT_READS)),
        "--draw",
        group=MODEL,
        help="what requests ask of the device's sampler: the most likely token, any, or one of "
        "those that top_p or top_k keep, for which it reads the logits more often",
    )
    compile: bool = setting_field(
        False,
        boolean(),
        "--compile",
        group=MODEL,
        help="a program for each layer and two more in place of graphs: the default of a Gaudi",
    )
    async_scheduling: bool = setting_field(
        False,
        boolean(),
        "--async-scheduling",
        group=MEMORY,
        help="the host prepares a step while the device computes the one before",
    )
    swap_space: int = setting_field(
        int(DEFAULT_SWAP_SPACE * GIB),
        integer(0, MAX_BYTES),
        "--swap-space",
        metavar="GIB",
        group=MEMORY,
        parse=parse_gib,
        help="host memory for preempted sequences: GiB in the flag, bytes in Python",
        default=f"{DEFAULT_SWAP_SPACE:g} GiB",
    )
    bucketing: BucketingConfig = attrs.field(
        factory=BucketingConfig,
        metadata=setting(
            env_patterns=BUCKETING_VARIABLES,
            help=f"the buckets that shapes are padded to; * is {AXIS_SETTINGS}",
        ),
    )
    warmup: WarmupConfig = attrs.field(
        factory=WarmupConfig,
        metadata=setting(
            env_patterns=(SKIP_WARMUP, *GRAPH_VARIABLES),
            help="what is warmed up, and which graphs are captured within which memory",
        ),
    )
    defrag: DefragConfig = attrs.field(
        factory=DefragConfig,
        metadata=setting(
            env_patterns=DEFRAG_VARIABLES,
            help="whether and when the KV cache is defragmented, and if that is logged",
        ),
    )
    thermal_policy: str = attrs.field(
        default="none",
        metadata=setting(
            "--thermal-policy",
            env="VLLM_THERMAL_POLICY",
            metavar="NAME",
            group=HEAT,
            help="what limits the running sequences, and the prefill of a step, by heat or power: "
            f"{THERMAL_POLICIES} or module:Class",
        ),
    )
    thermal_options: Mapping[str, Any] = attrs.field(
        factory=dict,
        converter=_mapping,
        metadata=setting(
            "--thermal-option",
            metavar="NAME=VALUE",
            group=HEAT,
            parse=parse_option,
            repeated=True,
            help="a setting of the policy, such as target_temp_c=60",
            default="the policy's own",
        ),
    )
    ambient_c: float = setting_field(
        30.0,
        number(-50, 100, exclusive_low=True),
        "--ambient-temp",
        metavar="C",
        group=HEAT,
        help="temperature of the air before the heat sink, in degrees C",
    )

    def __attrs_post_init__(self) -> None:
        if self.thermal_options and self.thermal_policy == "none":
            raise ConfigError(
                f"thermal_options {shown(dict(self.thermal_options))} has no policy: name one with "
                "--thermal-policy, or leave it out",
                "thermal_options",
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **settings: Any) -> SimulationConfig:
        """These settings, and what the environment says under their names.

        A setting given here wins. Warns of a variable whose name is a misspelling of one that is
        read. Raises `ConfigError`, which names the setting or variable.
        """
        warn_of_misspelt_variables(environ, (*variables_of(cls), *library_variables()))
        bucketing, warmup, defrag = library_settings(environ)
        found: dict[str, Any] = {"bucketing": bucketing, "warmup": warmup, "defrag": defrag}
        return cls(**{**found, **from_env(environ, cls), **settings})
