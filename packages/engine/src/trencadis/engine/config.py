"""Engine settings: one frozen value, checked before anything is loaded.

The settings classes of the libraries are imported when a configuration is made: the libraries load
NumPy, which takes longer than everything else that ``engine-serve --help`` needs.
"""

from __future__ import annotations

import fnmatch
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import attrs

from trencadis.engine.errors import ConfigError
from trencadis.engine.settings import (
    from_env,
    parse_flag,
    parse_indices,
    parse_json_object,
    parse_size,
    setting,
    variables_of,
    warn_of_misspelt_variables,
)
from trencadis.engine.validators import (
    boolean,
    device_indices,
    integer,
    items_of,
    number,
    one_of,
    power_of_two,
    shown,
    text,
)

if TYPE_CHECKING:
    from trencadis.bucketing import BucketingConfig
    from trencadis.engine.devices import Device
    from trencadis.kvcache import DefragConfig
    from trencadis.warmup import WarmupConfig

DEVICES = ("cpu", "cuda", "hpu")
"""The devices of `trencadis.engine.devices`, which is not imported here because it needs torch."""

DEFAULT_SWAP_SPACE = 4.0
"""GiB, as in ``vllm serve --swap-space``."""

INT32_MAX = 2**31 - 1
MAX_NUM_SEQS = 1 << 16
MAX_BATCHED_TOKENS = 1 << 24
"""Bounds beyond which a number is a slip of the pen: no device holds a batch of that size."""

MAX_BYTES = 1 << 50
MAX_SWAP_BANDWIDTH = 1e6
"""GB/s. The fastest links between device and host have some hundred."""


class DeviceDefault(int):
    """A default that the device replaces by its own (``Device.defaults``), if it has one."""


DType = Literal["auto", "bfloat16", "float16", "float32"]
SchedulingPolicy = Literal["fcfs", "priority"]
WarmupMode = Literal["full", "background", "none"]
Quantization = Literal["none", "int8"]
Runner = Literal["generate", "pooling"]
ScorePrompt = Literal["auto", "template", "qwen3-reranker", "conversation", "joined"]
OnBucketMiss = Literal["auto", "compile", "eager", "refuse"]

MODEL, MEMORY, WARMUP, HEAT = "model", "batches and memory", "warm-up", "heat"
FAULTS = "faults"
"""Groups of flags in ``--help``."""

BUCKETING_VARIABLES = (
    "VLLM_BUCKETING_STRATEGY",
    "VLLM_PROMPT_BUCKETING_STRATEGY",
    "VLLM_DECODE_BUCKETING_STRATEGY",
    "VLLM_PROMPT_BS_BUCKET_*",
    "VLLM_PROMPT_QUERY_BUCKET_*",
    "VLLM_PROMPT_SEQ_BUCKET_*",
    "VLLM_PROMPT_CTX_BUCKET_*",
    "VLLM_DECODE_BS_BUCKET_*",
    "VLLM_DECODE_BLOCK_BUCKET_*",
    "VLLM_DECODE_SEQ_BUCKET_*",
    "VLLM_BUCKETING_FROM_FILE",
    "VLLM_PROMPT_BUCKETING_TRAFFIC",
    "VLLM_DECODE_BUCKETING_TRAFFIC",
    "VLLM_CONTIGUOUS_PA",
    "VLLM_EXPONENTIAL_BUCKETING",
)
AXIS_SETTINGS = "MIN, STEP, MAX, LIMIT, PAD_MAX or PAD_PERCENT"
GRIDS = ("paged", "seq", "learn")
FITTED = "fitted:"
"""Values of `EngineConfig.bucket_grid`, and the beginning of one that names a file."""

DEFRAG_VARIABLES = (
    "VLLM_DEFRAG",
    "VLLM_DEFRAG_WARMUP",
    "VLLM_DEFRAG_THRESHOLD",
    "VLLM_DEBUG",
)
GRAPH_VARIABLES = (
    "VLLM_GRAPH_RESERVED_MEM",
    "VLLM_GRAPH_PROMPT_RATIO",
    "VLLM_GRAPH_PROMPT_STRATEGY",
    "VLLM_GRAPH_DECODE_STRATEGY",
)
SKIP_WARMUP = "VLLM_SKIP_WARMUP"
"""The variables of Gaudi's vLLM plugin that the settings classes of the libraries read."""


def library_settings(
    environ: Mapping[str, str],
) -> tuple[BucketingConfig, WarmupConfig, DefragConfig]:
    """What the environment says of the libraries' settings.

    Raises `ConfigError`, which names the variable.
    """
    from trencadis.bucketing import BucketingConfig, BucketingError  # noqa: PLC0415
    from trencadis.kvcache import DefragConfig, KVCacheError  # noqa: PLC0415
    from trencadis.warmup import WarmupConfig, WarmupError  # noqa: PLC0415

    try:
        return (
            BucketingConfig.from_env(environ),
            WarmupConfig.from_env(environ),
            DefragConfig.from_env(environ),
        )
    except (BucketingError, WarmupError, KVCacheError) as error:
        raise ConfigError(str(error)) from error


def library_variables() -> Iterable[str]:
    """The variables of the libraries' settings, except those of the buckets.

    `BucketingConfig.from_env` itself knows the names of its many variables.
    """
    _, graphs, defrag = library_settings({})
    return (*variables_of(type(graphs)), *variables_of(type(defrag)))


def _default_graphs() -> WarmupConfig:
    return library_settings({})[1]


def _default_defrag() -> DefragConfig:
    return library_settings({})[2]


@attrs.frozen(kw_only=True)
class CapacitySettings:
    """The settings that an engine and a simulation of it share."""

    max_model_len: int | None = attrs.field(
        default=None,
        validator=integer(2, INT32_MAX, optional=True),
        metadata=setting(
            "--max-model-len",
            metavar="TOKENS",
            group=MODEL,
            help="longest sequence: the tokens of a prompt and its answer together",
            default="the model's context length",
        ),
    )
    seed: int = attrs.field(
        default=0,
        validator=integer(0, 2**63 - 1),
        metadata=setting(
            "--seed",
            metavar="N",
            group=MODEL,
            help="seed of the random draws, except for requests with their own seed",
        ),
    )
    max_num_seqs: int = attrs.field(
        default=DeviceDefault(32),
        validator=integer(1, MAX_NUM_SEQS),
        metadata=setting(
            "--max-num-seqs",
            metavar="N",
            group=MEMORY,
            help="most sequences decoded in one step",
            default="32; 128 on hpu",
        ),
    )
    max_num_batched_tokens: int = attrs.field(
        default=DeviceDefault(256),
        validator=integer(1, MAX_BATCHED_TOKENS),
        metadata=setting(
            "--max-num-batched-tokens",
            metavar="TOKENS",
            group=MEMORY,
            help="most prompt tokens computed in one step; a longer prompt is split",
            default="256; 2048 on hpu",
        ),
    )
    max_waiting: int = attrs.field(
        default=2048,
        validator=integer(1, INT32_MAX),
        metadata=setting(
            "--max-waiting",
            metavar="N",
            group=MEMORY,
            help="most requests in the waiting queue; further requests are refused",
        ),
    )
    block_size: int = attrs.field(
        default=DeviceDefault(32),
        validator=power_of_two,
        metadata=setting(
            "--block-size",
            metavar="TOKENS",
            group=MEMORY,
            parse=int,
            help="tokens per KV block, a power of two",
            default="32; 128 on hpu",
        ),
    )
    num_blocks: int | None = attrs.field(
        default=None,
        validator=integer(2, INT32_MAX, optional=True),
        metadata=setting(
            "--num-gpu-blocks-override",
            metavar="BLOCKS",
            group=MEMORY,
            help="number of KV blocks",
            default="as many as fit the memory",
        ),
    )
    gpu_memory_utilization: float = attrs.field(
        default=0.9,
        validator=number(0, 1, exclusive_low=True),
        metadata=setting(
            "--gpu-memory-utilization",
            metavar="SHARE",
            group=MEMORY,
            help="share of the free device memory to use, above 0 and at most 1",
        ),
    )


def _path(path: str | os.PathLike[str]) -> str:
    # What is no path is left to the validator, which names the field.
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _optional_path(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else _path(path)


def _tuple_of(value: Any) -> Any:
    """A list as a tuple. None, and what is no list, is left to the validator."""
    items = items_of(value)
    return value if items is None else items


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


@attrs.frozen(kw_only=True)
class EngineConfig(CapacitySettings):
    """The settings of an engine. Names are those of ``vllm serve`` flags.

    The README's table lists meaning, default and flag of each. Raises `ConfigError` on a value out
    of range or on settings that contradict each other.
    """

    model: str = attrs.field(
        converter=_path,
        validator=text(),
        metadata=setting(help="directory of a checkpoint, GGUF file, or hub id"),
    )
    served_model_name: str | None = attrs.field(
        default=None,
        validator=text(optional=True),
        metadata=setting(
            "--served-model-name",
            metavar="NAME",
            group=MODEL,
            help="name under which clients address the model",
            default="MODEL",
        ),
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
    dtype: DType = attrs.field(
        default="auto",
        validator=one_of(*get_args(DType)),
        metadata=setting(
            "--dtype",
            group=MODEL,
            help="type of weights and KV cache",
            default="auto, the checkpoint's own",
        ),
    )
    runner: Runner = attrs.field(
        default="generate",
        validator=one_of(*get_args(Runner)),
        metadata=setting(
            "--runner",
            group=MODEL,
            help="pooling: the model computes embeddings of prompts by their last token or, where "
            "it is a reranker, scores of pairs, and generates nothing",
        ),
    )
    score_prompt: ScorePrompt = attrs.field(
        default="auto",
        validator=one_of(*get_args(ScorePrompt)),
        metadata=setting(
            "--score-prompt",
            group=MODEL,
            help="how a reranker's query and document become its prompt: auto, as the checkpoint "
            "tells; template, by the roles query and document of the chat template; "
            "qwen3-reranker, that of this family; conversation, a question and its answer, for "
            "reward models; joined, one after the other",
        ),
    )
    quantization: Quantization = attrs.field(
        default="none",
        validator=one_of(*get_args(Quantization)),
        metadata=setting(
            "--quantization",
            group=MODEL,
            help="int8 rounds the weights of linear layers to 8 bits, with a scale for each "
            "output; on cpu, with bf16 and the kernel of linear layers",
        ),
    )
    device: str | Device = attrs.field(
        default="auto",
        validator=_check_device,
        metadata=setting(
            "--device",
            env_patterns=("PT_HPU_LAZY_MODE", "PT_HPU_WEIGHT_SHARING"),
            metavar="NAME",
            group=MODEL,
            help=f"auto, {', '.join(DEVICES)}, or module:Class for a device of your own",
        ),
    )
    kv_cache_memory: int | None = attrs.field(
        default=None,
        validator=integer(1, MAX_BYTES, optional=True),
        metadata=setting(
            "--kv-cache-memory",
            "--kv-cache-memory-bytes",
            metavar="SIZE",
            group=MEMORY,
            parse=parse_size,
            help="most memory for the KV cache, in bytes or as in 2GiB or 512MiB",
            default="what is free, or 1GiB where the device's memory is the host's",
        ),
    )
    enable_prefix_caching: bool = attrs.field(
        default=True,
        validator=boolean(),
        metadata=setting(
            "--enable-prefix-caching",
            group=MEMORY,
            negatable=True,
            help="reuse the KV blocks of prompts that begin alike",
            default="yes",
        ),
    )
    scheduling_policy: SchedulingPolicy = attrs.field(
        default="fcfs",
        validator=one_of(*get_args(SchedulingPolicy)),
        metadata=setting(
            "--scheduling-policy",
            group=MEMORY,
            help="first come, first served, or requests of a lower priority value first",
        ),
    )
    swap_space: float | None = attrs.field(
        default=None,
        validator=number(0, MAX_BYTES >> 30, optional=True),
        metadata=setting(
            "--swap-space",
            metavar="GIB",
            group=MEMORY,
            help="host memory for preempted sequences, in GiB",
            default=f"{DEFAULT_SWAP_SPACE:g}, or 0 where the device's memory is the host's",
        ),
    )
    num_host_blocks: int | None = attrs.field(
        default=None,
        validator=integer(0, INT32_MAX, optional=True),
        metadata=setting(
            help="host memory for preempted sequences, in blocks; replaces `swap_space`"
        ),
    )
    swap_bandwidth: float = attrs.field(
        default=20.0,
        validator=number(0, MAX_SWAP_BANDWIDTH, exclusive_low=True),
        metadata=setting(
            "--swap-bandwidth",
            metavar="GB_PER_S",
            group=MEMORY,
            help="most traffic between device and host for preempted sequences, in GB/s",
        ),
    )
    defrag: DefragConfig = attrs.field(
        factory=_default_defrag,
        metadata=setting(
            env_patterns=DEFRAG_VARIABLES,
            help="whether and when the KV cache is defragmented, and if that is logged",
        ),
    )
    use_buckets: bool = attrs.field(
        default=True,
        validator=boolean(),
        metadata=setting(
            "--disable-bucketing", group=MEMORY, help="run every shape as it comes, unpadded"
        ),
    )
    bucketing: BucketingConfig | None = attrs.field(
        default=None,
        metadata=setting(
            env_patterns=BUCKETING_VARIABLES,
            help=f"the buckets that shapes are padded to; * is {AXIS_SETTINGS}",
            default="the device's own grid",
        ),
    )
    bucket_grid: str = attrs.field(
        default="paged",
        validator=_check_grid,
        metadata=setting(
            "--bucketing",
            metavar="GRID",
            group=MEMORY,
            help="what a bucket is: paged, batch size and new tokens and KV blocks; seq, batch "
            "size and sequence length; fitted:FILE, paged buckets of a bucket file or, from a "
            ".json file of recorded traffic, fitted to it; learn, fitted to what this model was "
            "served before, which is recorded",
        ),
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
    warmup: WarmupMode = attrs.field(
        default="full",
        validator=one_of(*get_args(WarmupMode)),
        metadata=setting(
            "--warmup",
            env_patterns=(SKIP_WARMUP,),
            group=WARMUP,
            help="warm up all buckets before the first request; some before it and the rest "
            f"between requests; or none (also {SKIP_WARMUP}=true), so that the first requests are "
            "slower",
        ),
    )
    on_bucket_miss: OnBucketMiss = attrs.field(
        default="auto",
        validator=one_of(*get_args(OnBucketMiss)),
        metadata=setting(
            "--on-bucket-miss",
            group=WARMUP,
            help="a batch in a shape that was not warmed up is compiled first, runs eagerly, or is "
            "refused: its request ends with an error that names the shape",
            default="auto: eager where the device can and shapes are warmed up, else compile",
        ),
    )
    graphs: WarmupConfig = attrs.field(
        factory=_default_graphs,
        metadata=setting(
            env_patterns=GRAPH_VARIABLES,
            help="which graphs are captured, within which memory, on a device that has graphs",
        ),
    )
    compile: bool | None = attrs.field(
        default=None,
        validator=boolean(optional=True),
        metadata=setting(
            "--compile",
            group=WARMUP,
            negatable=True,
            help="compile the decoder layers for each bucket: faster steps, a longer first start",
            default="no; on hpu yes, outside of lazy mode",
        ),
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
    trust_compile_cache: bool = attrs.field(
        default=False,
        validator=boolean(),
        metadata=setting(
            "--trust-compile-cache",
            group=WARMUP,
            help="load compiled programs from --compile-cache also where another user may have "
            "made them, who can then run code as this user",
        ),
    )
    cpu_threads: int | None = attrs.field(
        default=None,
        validator=integer(1, 1024, optional=True),
        metadata=setting(
            "--cpu-threads",
            metavar="N",
            group=MODEL,
            help="threads of an operation, on cpu",
            default="OMP_NUM_THREADS; without it as many as cores are free, adapted while serving",
        ),
    )
    fp32_softmax: bool = attrs.field(
        default=False,
        validator=boolean(),
        metadata=setting(
            env="VLLM_FP32_SOFTMAX",
            parse=parse_flag,
            help="compute the softmax of prefill attention in fp32, on hpu, where bf16 is the "
            "default",
        ),
    )
    temperature_source: str | None = attrs.field(
        default=None,
        validator=text(optional=True),
        metadata=setting(
            "--temperature-source",
            metavar="SOURCE",
            group=HEAT,
            help="where temperatures are read: nvml, hlml, sensors, exporter:URL, "
            "sidecar:HOST:PORT or recorded:FILE",
            default="the device's own, nvml or hlml, if it can be read",
        ),
    )
    thermal_devices: tuple[int, ...] | None = attrs.field(
        default=None,
        converter=_tuple_of,
        validator=device_indices,
        metadata=setting(
            "--thermal-devices",
            metavar="N,...",
            group=HEAT,
            parse=parse_indices,
            help="indices of the source's devices that count, as in 0,1",
            default="the engine's own, where the source is the device's own; otherwise all",
        ),
    )
    thermal_policy: str | None = attrs.field(
        default=None,
        validator=text(optional=True),
        metadata=setting(
            "--thermal-policy",
            env="VLLM_THERMAL_POLICY",
            metavar="NAME",
            group=HEAT,
            help="what limits the running sequences, and the prefill of a step, by heat or power: "
            "none, proportional, power, two_phase, a name that a package offers, or module:Class",
            default="none",
        ),
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

    engine_restarts: int = attrs.field(
        default=3,
        validator=integer(0, INT32_MAX),
        metadata=setting(
            "--engine-restarts",
            metavar="N",
            group=FAULTS,
            help="how often the engine core is restarted after it has died, before the server ends",
        ),
    )
    hang_timeout: float = attrs.field(
        default=60.0,
        validator=number(2, 86_400),
        metadata=setting(
            "--hang-timeout",
            metavar="SECONDS",
            group=FAULTS,
            help="seconds without a message of the engine core after which it counts as hung; half "
            "an hour while it compiles or warms up",
        ),
    )
    hang_restart_timeout: float = attrs.field(
        default=300.0,
        validator=number(0, 86_400),
        metadata=setting(
            "--hang-restart-timeout",
            metavar="SECONDS",
            group=FAULTS,
            help="seconds without a message of the engine core after which it is killed and "
            "restarted, as after its death; half an hour while it compiles or warms up; at least "
            "--hang-timeout; 0: never",
        ),
    )

    def __attrs_post_init__(self) -> None:
        kinds = map(type, library_settings({}))
        for name, kind in zip(("bucketing", "graphs", "defrag"), kinds, strict=True):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (name == "bucketing" and value is None):
                raise ConfigError(f"{name} must be a {kind.__name__}, got {shown(value)}", name)
        file = None if self.bucketing is None else self.bucketing.bucket_file
        is_fit = self.bucket_grid.startswith(FITTED) and self.bucket_grid.endswith(".json")
        if file and (is_fit or self.bucket_grid == "learn"):
            raise ConfigError(
                f"bucket file {file} (VLLM_BUCKETING_FROM_FILE) and bucket_grid {self.bucket_grid} "
                "both choose the buckets: leave one out",
                "bucket_grid",
            )
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
        """These settings, and what the environment says under the README's names.

        A setting given here wins. Warns of a variable whose name is a misspelling of one that is
        read. Raises `ConfigError`, which names the setting or variable.
        """
        warn_of_misspelt_variables(environ, (*variables_of(cls), *library_variables()))
        bucketing, graphs, defrag = library_settings(environ)
        grid = settings.get("bucket_grid")
        if isinstance(grid, str) and grid == "seq" and not _sets_strategy(environ):
            bucketing = attrs.evolve(bucketing, strategy="lin")  # that of seed 002
        found: dict[str, Any] = {
            **from_env(environ, cls),
            "bucketing": bucketing if _sets_buckets(environ) else None,
            "warmup": "none" if graphs.skip else "full",
            "graphs": attrs.evolve(graphs, skip=False),
            "defrag": defrag,
        }
        return cls(**{**found, **settings})

    def for_device(self, defaults: Mapping[str, Any]) -> EngineConfig:
        """These settings, with a device's ``defaults`` for those that were not set.

        Nothing is compiled by default without buckets, or where eager execution is enforced.
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
        return attrs.evolve(self, **chosen)

    @property
    def name(self) -> str:
        """The name under which clients address the model."""
        return self.served_model_name or self.model


def _sets_buckets(environ: Mapping[str, str]) -> bool:
    """Whether a variable of the bucket settings is set, be it to its default.

    Without any, the device's own default grid applies.
    """
    from trencadis.bucketing import describe_variables  # noqa: PLC0415

    patterns = describe_variables()
    return any(
        text.strip() and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        for name, text in environ.items()
    )


def _sets_strategy(environ: Mapping[str, str]) -> bool:
    """Whether a variable chooses the strategy of buckets, for any phase."""
    return any(
        text.strip()
        and (name.endswith("BUCKETING_STRATEGY") or name == "VLLM_EXPONENTIAL_BUCKETING")
        for name, text in environ.items()
    )


def resolve_max_model_len(configured: int | None, model_max: int) -> int:
    """The longest sequence in tokens: ``configured``, by default ``model_max``.

    Raises `ConfigError` where ``configured`` is above ``model_max``, the model's context length.
    """
    if configured is not None and configured > model_max:
        raise ConfigError(
            f"max_model_len {configured} is above the model's context length {model_max}: lower it",
            "max_model_len",
        )
    return model_max if configured is None else configured
