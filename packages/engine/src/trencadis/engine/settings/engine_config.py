"""Engine settings: one frozen value, checked before anything is loaded.

`CapacitySettings` has those that a simulation shares. What the environment says of the libraries'
settings is read by `library_settings`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import attrs

from trencadis.engine.errors import ConfigError, shown
from trencadis.engine.settings.capacity_settings import (
    DEFAULT_SWAP_SPACE,
    FAULTS,
    HEAT,
    INT32_MAX,
    LORA,
    MAX_BYTES,
    MEMORY,
    MODEL,
    THERMAL_POLICIES,
    WARMUP,
    CapacitySettings,
    DeviceDefault,
)
from trencadis.engine.settings.flags import (
    from_env,
    parse_flag,
    parse_indices,
    parse_json_object,
    parse_size,
    setting,
    setting_field,
    variables_of,
    warn_of_misspelt_variables,
)
from trencadis.engine.settings.kv_events_config import KVEventsConfig
from trencadis.engine.settings.kv_tiers import parse_tiers
from trencadis.engine.settings.library_settings import (
    AXIS_SETTINGS,
    BUCKETING_VARIABLES,
    DEFRAG_VARIABLES,
    GRAPH_VARIABLES,
    SKIP_WARMUP,
    library_settings,
    library_variables,
    sets_buckets,
    sets_strategy,
)
from trencadis.engine.validators import (
    Validator,
    boolean,
    integer,
    is_integer,
    items_of,
    number,
    one_of,
    plain_number,
    text,
)

if TYPE_CHECKING:
    from trencadis.bucketing import BucketingConfig
    from trencadis.engine.devices import Device
    from trencadis.kvcache import DefragConfig
    from trencadis.warmup import WarmupConfig

DEVICES = ("cpu", "cuda", "hpu")
"""The devices of `trencadis.engine.devices`, which is not imported here because it needs torch."""

MAX_SWAP_BANDWIDTH = 1e6
"""GB/s. The fastest links between device and host have some hundred."""

DType = Literal["auto", "bfloat16", "float16", "float32"]
KVCacheDType = Literal[
    "auto",
    "int8",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8_per_token_head",
    "fp8_per_token_head",
    "fp8_inc",
]
StateDType = Literal["auto", "float32", "bfloat16"]
SchedulingPolicy = Literal["fcfs", "priority"]
WarmupMode = Literal["full", "background", "none"]
Quantization = Literal["none", "int8", "int4", "fp8", "inc"]
Runner = Literal["generate", "pooling"]
ScorePrompt = Literal["auto", "template", "qwen3-reranker", "conversation", "joined"]
OnBucketMiss = Literal["auto", "compile", "eager", "refuse"]

GRID_VARIABLE = "VLLM_BUCKETING_GRID"
"""Named as ``VLLM_BUCKETING_STRATEGY``; the plugin has grids of one kind and no variable for it."""

GRIDS = ("paged", "seq", "learn")
FITTED = "fitted:"
"""Values of `EngineConfig.bucket_grid`, and the beginning of one that names a file."""


def _path(path: str | os.PathLike[str]) -> str:
    # What is not a path is left to the validator, which names the field.
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _optional_path(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else _path(path)


def _tuple_of(value: Any) -> Any:
    """A list as a tuple. None, and what is not a list, is left to the validator."""
    items = items_of(value)
    return value if items is None else tuple(map(plain_number, items))


def _are_indices(value: Any) -> bool:
    is_tuple = isinstance(value, tuple) and len(value) > 0
    return (
        is_tuple
        and all(is_integer(index) and index >= 0 for index in value)
        and len(set(value)) == len(value)
    )


def _check_device(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """A name, ``module:Class``, or a `Device`, whose module is loaded before it exists."""
    module = sys.modules.get("trencadis.engine.devices.device")
    if module is not None and isinstance(value, module.Device):
        return
    names = ("auto", *DEVICES)
    is_path = isinstance(value, str) and ":" in value
    if not is_path and (not isinstance(value, str) or value not in (*names, "simulated")):
        raise ConfigError(
            f"{attribute.name} must be {', '.join(names)}, module:Class or a Device, "
            f"got {shown(value)}",
            attribute.name,
        )


def _check_grid(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    is_grid = isinstance(value, str) and (
        value in GRIDS or (value.startswith(FITTED) and value != FITTED)
    )
    if not is_grid:
        raise ConfigError(
            f"{attribute.name} must be one of {', '.join(GRIDS)}, {FITTED}FILE, got {shown(value)}",
            attribute.name,
        )


def _check_names(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(
            f"{attribute.name} must map names of settings to their values, as in "
            f"{{'target_temp_c': 80}}, got {shown(value)}",
            attribute.name,
        )


def parse_module(text: str) -> tuple[str, str]:
    """Name and directory of ``NAME=DIRECTORY``, or of vLLM's object. Raises `ValueError`."""
    if text.startswith("{"):
        return _module_of_object(text)
    name, sign, directory = text.partition("=")
    if not (sign and name and directory):
        raise ValueError(f"{text!r} is not NAME=DIRECTORY")
    return name, directory


def _module_of_object(text: str) -> tuple[str, str]:
    """As vLLM reads ``{"name": ..., "path": ..., "base_model_name": ...}``, the last ignored."""
    given = json.loads(text)
    names = ("name", "path")
    fields = [given.get(name) for name in names]
    if set(given) - {*names, "base_model_name"} or not all(
        isinstance(field, str) and field for field in fields
    ):
        raise ValueError(f"{text!r} is not an object with name and path")
    return fields[0], fields[1]


def _is_pair_of_texts(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and all(isinstance(each, str) for each in value)


def _modules(value: Any) -> Any:
    """Pairs of names and directories, as flags give them, as a mapping."""
    if not isinstance(value, tuple) or not all(map(_is_pair_of_texts, value)):
        return value
    names = [name for name, _ in value]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ConfigError(
            f"lora_modules names {shown(repeated)} twice: give each adapter a name of its own",
            "lora_modules",
        )
    return dict(value)


def _check_modules(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    texts = [each for item in value.items() for each in item] if isinstance(value, Mapping) else [0]
    if not all(isinstance(each, str) and each for each in texts):
        raise ConfigError(
            f"{attribute.name} must map names of adapters to directories, as in "
            f"{{'sql': '/adapters/sql'}}, got {shown(value)}",
            attribute.name,
        )


def _check_kv_events(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    del attribute
    KVEventsConfig.of(value)


def _check_kv_tiers(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    del attribute
    parse_tiers(value)


@attrs.frozen(kw_only=True)
class EngineConfig(CapacitySettings):
    """The settings of an engine. Names are those of ``vllm serve`` flags.

    `docs/engine/settings.md` lists meaning, default and flag of each. Raises `ConfigError` on a
    value out of range or on settings that contradict each other.
    """

    model: str = attrs.field(
        converter=_path,
        validator=text(),
        metadata=setting(help="directory of a checkpoint, GGUF file, or hub id"),
    )
    served_model_name: str | None = setting_field(
        None,
        text(optional=True),
        "--served-model-name",
        metavar="NAME",
        group=MODEL,
        help="name under which clients address the model",
        default="MODEL",
    )
    chat_template: str | None = attrs.field(
        default=None,
        converter=_optional_path,
        validator=text(optional=True),
        metadata=setting(
            "--chat-template",
            metavar="FILE",
            group=MODEL,
            help="Jinja template of conversations, as a file or as its text",
            default="that of the model",
        ),
    )
    dtype: DType = setting_field(
        "auto",
        one_of(get_args(DType)),
        "--dtype",
        group=MODEL,
        help="type of weights and KV cache",
        default="auto: the checkpoint's if bf16 or fp16, else the device's, which is bf16",
    )
    runner: Runner = setting_field(
        "generate",
        one_of(get_args(Runner)),
        "--runner",
        group=MODEL,
        help="pooling: the model computes embeddings of prompts by their last token or, where "
        "it is a reranker, scores of pairs, and generates nothing",
    )
    score_prompt: ScorePrompt = setting_field(
        "auto",
        one_of(get_args(ScorePrompt)),
        "--score-prompt",
        group=MODEL,
        help="how a reranker's query and document become its prompt: auto, as the checkpoint "
        "declares; template, by the roles query and document of the chat template; "
        "qwen3-reranker, that of this family; conversation, a question and its answer, for "
        "reward models; joined, one after the other",
    )
    quantization: Quantization = setting_field(
        "none",
        one_of(get_args(Quantization)),
        "--quantization",
        group=MODEL,
        help="rounds the bf16 weights of linear layers at load: int8, with a scale for each "
        "output, and inputs too where that is faster, or int4, for 32 inputs, with attention and "
        "some others by int8; embedding and output head by int8; on hpu fp8, or inc, by "
        "--quant-config",
    )
    quant_config: str | None = attrs.field(
        default=None,
        converter=_optional_path,
        validator=text(optional=True),
        metadata=setting(
            "--quant-config",
            env="QUANT_CONFIG",
            metavar="FILE",
            group=MODEL,
            help="settings of Intel Neural Compressor: FP8 on hpu by scales that vllm-gaudi's "
            "calibration measured",
            default="none",
        ),
    )
    enable_lora: bool = setting_field(
        False,
        boolean(),
        "--enable-lora",
        group=LORA,
        help="serve adapters (LoRA)",
    )
    lora_modules: Mapping[str, str] = attrs.field(
        factory=dict,
        converter=_modules,
        validator=_check_modules,
        metadata=setting(
            "--lora-modules",
            metavar="NAME=DIRECTORY",
            group=LORA,
            parse=parse_module,
            repeated=True,
            several=True,
            help="adapters that are loaded at start",
            default="none",
        ),
    )
    max_loras: int = setting_field(
        1,
        integer(1, 1024),
        "--max-loras",
        metavar="N",
        group=LORA,
        help="most adapters in one step",
    )
    max_lora_rank: int = setting_field(
        16,
        integer(1, 1024),
        "--max-lora-rank",
        metavar="N",
        group=LORA,
        help="highest rank of an adapter",
    )
    max_cpu_loras: int | None = setting_field(
        None,
        integer(1, INT32_MAX, optional=True),
        "--max-cpu-loras",
        metavar="N",
        group=LORA,
        help="most adapters in host memory",
        default="any number",
    )
    device: str | Device = setting_field(
        "auto",
        _check_device,
        "--device",
        env_patterns=("PT_HPU_LAZY_MODE", "PT_HPU_WEIGHT_SHARING"),
        metavar="NAME",
        group=MODEL,
        help=f"auto, {', '.join(DEVICES)}, or module:Class for a device of your own",
    )
    tensor_parallel_size: int = setting_field(
        1,
        integer(1, 64),
        "--tensor-parallel-size",
        metavar="N",
        group=MODEL,
        help="processes that divide each layer, on cpu or hpu; memory settings are "
        "for all together",
    )
    kv_cache_memory: int | None = setting_field(
        None,
        integer(1, MAX_BYTES, optional=True),
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        metavar="SIZE",
        group=MEMORY,
        parse=parse_size,
        help="most memory for the KV cache, in bytes or as in 2GiB or 512MiB",
        default="what is free, or 1GiB where the device's memory is the host's",
    )
    kv_cache_dtype: KVCacheDType = setting_field(
        "auto",
        one_of(get_args(KVCacheDType)),
        "--kv-cache-dtype",
        group=MEMORY,
        help="type of the KV cache: auto, that of the weights; or 8 bits with a scale for each "
        "token and head: int8, or fp8, which is fp8_e4m3, or fp8_e5m2; names of vLLM: "
        "int8_per_token_head, fp8_per_token_head (fp8); on cpu; on hpu fp8 (fp8_inc)",
    )
    mamba_ssm_cache_dtype: StateDType = setting_field(
        "auto",
        one_of(get_args(StateDType)),
        "--mamba-ssm-cache-dtype",
        group=MEMORY,
        help="type of the sums that layers with a state keep: auto, that in which they are "
        "computed (Mamba 2: float32); bfloat16 takes half of their memory, and rounds after each "
        "chunk",
    )
    async_scheduling: bool | None = setting_field(
        None,
        boolean(optional=True),
        "--async-scheduling",
        group=MEMORY,
        negatable=True,
        help="let the host prepare a step while the device computes the one before",
        default="on, except on the CPU",
    )
    enable_prefix_caching: bool = setting_field(
        True,
        boolean(),
        "--enable-prefix-caching",
        group=MEMORY,
        negatable=True,
        help="reuse the KV blocks of prompts that begin alike",
        default="yes",
    )
    scheduling_policy: SchedulingPolicy = setting_field(
        "fcfs",
        one_of(get_args(SchedulingPolicy)),
        "--scheduling-policy",
        group=MEMORY,
        help="first come, first served, or requests of a lower priority value first",
    )
    swap_space: float | None = setting_field(
        None,
        number(0, MAX_BYTES >> 30, optional=True),
        "--swap-space",
        metavar="GIB",
        group=MEMORY,
        help="host memory for preempted sequences, in GiB",
        default=f"{DEFAULT_SWAP_SPACE:g}, or 0 where the device's memory is the host's",
    )
    num_host_blocks: int | None = setting_field(
        None,
        integer(0, INT32_MAX, optional=True),
        help="host memory for preempted sequences, in blocks; replaces `swap_space`",
    )
    swap_bandwidth: float = setting_field(
        20.0,
        number(0, MAX_SWAP_BANDWIDTH, exclusive_low=True),
        "--swap-bandwidth",
        metavar="GB_PER_S",
        group=MEMORY,
        help="most traffic between device and host for preempted sequences, in GB/s",
    )
    defrag: DefragConfig = attrs.field(
        factory=lambda: library_settings({})[2],
        metadata=setting(
            env_patterns=DEFRAG_VARIABLES,
            help="whether and when the KV cache is defragmented, and if that is logged",
        ),
    )
    use_buckets: bool = setting_field(
        True,
        boolean(),
        "--disable-bucketing",
        group=MEMORY,
        help="run every shape as it comes, unpadded",
    )
    bucketing: BucketingConfig | None = attrs.field(
        default=None,
        metadata=setting(
            env_patterns=BUCKETING_VARIABLES,
            help=f"the buckets that shapes are padded to; * is {AXIS_SETTINGS}",
            default="the device's own grid",
        ),
    )
    bucket_grid: str = setting_field(
        "paged",
        _check_grid,
        "--bucketing",
        env=GRID_VARIABLE,
        metavar="GRID",
        group=MEMORY,
        help="what a bucket is: paged, batch size and new tokens and KV blocks; seq, batch "
        "size and sequence length; fitted:FILE, paged buckets of a bucket file or, from a "
        ".json file of recorded traffic, fitted to it; learn, fitted to what this model was "
        "served before, which is recorded",
    )
    record_traffic: str | None = attrs.field(
        default=None,
        converter=_optional_path,
        validator=text(optional=True),
        metadata=setting(
            "--record-traffic",
            metavar="FILE",
            group=MEMORY,
            help="count the sizes of batches, never their content, in this file for prompts and "
            "one beside it for decodes; --bucketing fitted:FILE reads both, `trencadis-buckets "
            "fit` that of prompts",
            default="none; with --bucketing learn a file in the user's cache directory",
        ),
    )
    warmup: WarmupMode = setting_field(
        "full",
        one_of(get_args(WarmupMode)),
        "--warmup",
        env_patterns=(SKIP_WARMUP,),
        group=WARMUP,
        help="warm up all buckets before the first request; some before it and the rest "
        f"between requests; or none (also {SKIP_WARMUP}=true), so that the first requests are "
        "slower",
    )
    on_bucket_miss: OnBucketMiss = setting_field(
        "auto",
        one_of(get_args(OnBucketMiss)),
        "--on-bucket-miss",
        group=WARMUP,
        help="a batch in a shape that was not warmed up is compiled first, runs eagerly, or is "
        "rejected: its request ends with an error that names the shape",
        default="auto: eager where the device can and shapes are warmed up, else compile",
    )
    graphs: WarmupConfig = attrs.field(
        factory=lambda: library_settings({})[1],
        metadata=setting(
            env_patterns=GRAPH_VARIABLES,
            help="which graphs are captured, within which memory, on a device that has graphs",
        ),
    )
    compile: bool | None = setting_field(
        None,
        boolean(optional=True),
        "--compile",
        group=WARMUP,
        negatable=True,
        help="compile the decoder layers for each bucket: faster steps, a longer first start",
        default="no; on hpu yes, outside of lazy mode",
    )
    compile_cache: str | None = attrs.field(
        default=None,
        converter=_optional_path,
        validator=text(optional=True),
        metadata=setting(
            "--compile-cache",
            env_patterns=("PT_HPU_RECIPE_CACHE_CONFIG",),
            metavar="DIRECTORY",
            group=WARMUP,
            help="where compiled programs are kept; `engine-serve warmup` fills it, and then it "
            "may be read-only",
            default="in the user's cache directory",
        ),
    )
    trust_compile_cache: bool = setting_field(
        False,
        boolean(),
        "--trust-compile-cache",
        group=WARMUP,
        help="load compiled programs from --compile-cache also where another user may have "
        "made them, who can then run code as this user",
    )
    cpu_threads: int | None = setting_field(
        None,
        integer(1, 1024, optional=True),
        "--cpu-threads",
        metavar="N",
        group=MODEL,
        help="threads of an operation, on cpu",
        default="OMP_NUM_THREADS, or as many as cores are free, adapted while serving",
    )
    cpu_numa: Literal["off", "auto"] = setting_field(
        "off",
        one_of(("off", "auto")),
        "--cpu-numa",
        group=MODEL,
        help="auto: a rank per NUMA node, on cpu",
    )
    fp32_softmax: bool = setting_field(
        False,
        boolean(),
        env="VLLM_FP32_SOFTMAX",
        parse=parse_flag,
        help="compute the softmax of prefill attention in fp32, on hpu, where bf16 is the default",
    )
    temperature_source: str | None = setting_field(
        None,
        text(optional=True),
        "--temperature-source",
        metavar="SOURCE",
        group=HEAT,
        help="where temperatures are read: nvml, hlml, sensors, exporter:URL, "
        "sidecar:HOST:PORT or recorded:FILE",
        default="the device's own, nvml or hlml, if it can be read",
    )
    thermal_devices: tuple[int, ...] | None = attrs.field(
        default=None,
        converter=_tuple_of,
        validator=Validator(
            "distinct indices of devices from 0, as in (0, 1)", _are_indices, optional=True
        ),
        metadata=setting(
            "--thermal-devices",
            metavar="N,...",
            group=HEAT,
            parse=parse_indices,
            help="indices of the source's devices that count, as in 0,1",
            default="the engine's own, where the source is the device's own; otherwise all",
        ),
    )
    thermal_policy: str | None = setting_field(
        None,
        text(optional=True),
        "--thermal-policy",
        env="VLLM_THERMAL_POLICY",
        metavar="NAME",
        group=HEAT,
        help="what limits the running sequences, and the prefill of a step, by heat or power: "
        f"{THERMAL_POLICIES}, a name that a package offers, or module:Class",
        default="none",
    )
    thermal_policy_config: Mapping[str, Any] = attrs.field(
        factory=dict,
        validator=_check_names,
        metadata=setting(
            "--thermal-policy-config",
            metavar="JSON",
            group=HEAT,
            parse=parse_json_object,
            help="the policy's settings, as in '{\"target_temp_c\": 80}'",
            default="the policy's own",
        ),
    )

    kv_events_config: Mapping[str, Any] = attrs.field(
        factory=dict,
        validator=_check_kv_events,
        metadata=setting(
            "--kv-events-config",
            metavar="JSON",
            group=MEMORY,
            parse=parse_json_object,
            help="publishes what the prefix cache gets and loses, with the token ids of prompts: "
            "'{\"enable_kv_cache_events\": true}', and vLLM's other names",
            default="nothing is published",
        ),
    )
    kv_tiers: str = attrs.field(
        default="",
        validator=_check_kv_tiers,
        metadata=setting(
            "--kv-tiers",
            metavar="TIERS",
            group=MEMORY,
            help="where KV blocks of prompts and answers are kept for later prompts beside the "
            "device: host:GIB, disk:PATH:GIB, module:Class:GIB, or several with commas between",
            default="nowhere",
        ),
    )
    engine_restarts: int = setting_field(
        3,
        integer(0, INT32_MAX),
        "--engine-restarts",
        metavar="N",
        group=FAULTS,
        help="how often the engine core is restarted after it has died, before the server ends",
    )
    hang_timeout: float = setting_field(
        60.0,
        number(2, 86_400),
        "--hang-timeout",
        metavar="SECONDS",
        group=FAULTS,
        help="seconds without a message of the engine core after which it counts as hung; half "
        "an hour while it compiles or warms up",
    )
    hang_restart_timeout: float = setting_field(
        300.0,
        number(0, 86_400),
        "--hang-restart-timeout",
        metavar="SECONDS",
        group=FAULTS,
        help="seconds without a message of the engine core after which it is killed and "
        "restarted, as after its death; half an hour while it compiles or warms up; at least "
        "--hang-timeout; 0: never",
    )

    def __attrs_post_init__(self) -> None:
        self._check_library_settings()
        self._check_source_of_buckets()
        self._check_programs()
        self._check_quantization()
        self._check_adapters()
        if self.kv_tiers and not self.enable_prefix_caching:
            raise ConfigError(
                f"kv_tiers {self.kv_tiers} keeps blocks of the prefix cache, which "
                "enable_prefix_caching turns off: leave one of them out",
                "kv_tiers",
            )

    @property
    def rounding(self) -> Quantization:
        """How weights are rounded at load: ``inc`` where a file of its settings is named."""
        return self.quantization if self.quant_config is None else "inc"

    def _check_quantization(self) -> None:
        if self.quantization == "inc" and self.quant_config is None:
            raise ConfigError(
                "quantization inc needs measured scales: name the file of settings with "
                "quant_config (QUANT_CONFIG), or choose fp8, which needs none",
                "quant_config",
            )
        if self.quant_config is not None and self.quantization not in ("none", "inc"):
            raise ConfigError(
                f"quant_config {shown(self.quant_config)} is for quantization inc, and "
                f"quantization is {self.quantization}: leave one of them out (QUANT_CONFIG)",
                "quant_config",
            )

    def _check_adapters(self) -> None:
        if self.enable_lora and self.runner == "pooling":
            raise ConfigError(
                "enable_lora does not work with the runner pooling yet: leave one out",
                "enable_lora",
            )
        if self.lora_modules and not self.enable_lora:
            raise ConfigError(
                f"lora_modules {shown(dict(self.lora_modules))} need enable_lora: set it, or leave "
                "them out",
                "lora_modules",
            )
        limit = self.max_cpu_loras
        if limit is not None and len(self.lora_modules) > limit:
            raise ConfigError(
                f"lora_modules names {len(self.lora_modules)} adapters, and max_cpu_loras is "
                f"{limit}: raise it",
                "max_cpu_loras",
            )
        if limit is not None and limit < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras {limit} is below max_loras {self.max_loras}, and what has a slot "
                "is in host memory, too: raise the first or lower the second",
                "max_cpu_loras",
            )

    def _check_library_settings(self) -> None:
        kinds = map(type, library_settings({}))
        for name, kind in zip(("bucketing", "graphs", "defrag"), kinds, strict=True):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (name == "bucketing" and value is None):
                raise ConfigError(f"{name} must be a {kind.__name__}, got {shown(value)}", name)

    def _check_source_of_buckets(self) -> None:
        file = None if self.bucketing is None else self.bucketing.bucket_file
        is_fit = self.bucket_grid.startswith(FITTED) and self.bucket_grid.endswith(".json")
        if file and (is_fit or self.bucket_grid == "learn"):
            raise ConfigError(
                f"bucket file {file} (VLLM_BUCKETING_FROM_FILE) and bucket_grid {self.bucket_grid} "
                "both choose the buckets: leave one out",
                "bucket_grid",
            )

    def _check_programs(self) -> None:
        """What is compiled or warmed up needs buckets."""
        if self.compile and not self.use_buckets:
            raise ConfigError(
                "compile needs buckets, since a program is for one shape: leave use_buckets on, "
                "or compile off"
            )
        if self.on_bucket_miss == "refuse" and (self.warmup != "full" or not self.use_buckets):
            raise ConfigError(
                "on_bucket_miss refuse needs a full warm-up of buckets, since it serves nothing "
                "else: leave warmup and use_buckets at their defaults",
                "on_bucket_miss",
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **settings: Any) -> EngineConfig:
        """These settings, and what the environment says under their names.

        A setting given here wins. Warns of a variable whose name is a misspelling of one that is
        read. Raises `ConfigError`, which names the setting or variable.
        """
        warn_of_misspelt_variables(environ, (*variables_of(cls), *library_variables()))
        bucketing, graphs, defrag = library_settings(environ)
        grid = settings.get("bucket_grid", environ.get(GRID_VARIABLE, "").strip())
        if isinstance(grid, str) and grid == "seq" and not sets_strategy(environ):
            bucketing = attrs.evolve(bucketing, strategy="lin")  # that of seed 002
        found: dict[str, Any] = {
            **from_env(environ, cls),
            "bucketing": bucketing if sets_buckets(environ) else None,
            "warmup": "none" if graphs.skip else "full",
            "graphs": attrs.evolve(graphs, skip=False),
            "defrag": defrag,
        }
        return cls(**{**found, **settings})

    def for_device(self, defaults: Mapping[str, Any]) -> EngineConfig:
        """These settings, with a device's ``defaults`` for those that were not set.

        Nothing is compiled by default without buckets, or where eager execution is enforced. A
        device's tokens of mixed steps belong to its own ``max_num_batched_tokens``.
        """
        unset = attrs.asdict(
            self,
            recurse=False,
            filter=lambda _, value: value is None or type(value) is DeviceDefault,
        )
        plain = {name: int(value) for name, value in unset.items() if value is not None}
        chosen = plain | {name: value for name, value in defaults.items() if name in unset}
        if not self.use_buckets or self.graphs.enforce_eager:
            chosen.pop("compile", None)
        if "max_num_batched_tokens" not in unset:
            chosen.pop("max_mixed_prefill_tokens", None)
        return attrs.evolve(self, **chosen)

    @property
    def name(self) -> str:
        """The name under which clients address the model."""
        return self.served_model_name or self.model
