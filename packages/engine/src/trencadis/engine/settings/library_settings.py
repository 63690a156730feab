"""The settings classes of the libraries, and the environment variables that they read.

The libraries are imported when a configuration is made: they load NumPy, which takes longer than
everything else that ``engine-serve --help`` needs.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from trencadis.engine.errors import ConfigError
from trencadis.engine.settings.flags import variables_of

if TYPE_CHECKING:
    from trencadis.bucketing import BucketingConfig
    from trencadis.kvcache import DefragConfig
    from trencadis.warmup import WarmupConfig

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


def sets_buckets(environ: Mapping[str, str]) -> bool:
    """Whether a variable of the bucket settings is set, also to its default.

    Without any, the device's own default grid applies.
    """
    from trencadis.bucketing import describe_variables  # noqa: PLC0415

    patterns = describe_variables()
    return any(
        text.strip() and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        for name, text in environ.items()
    )


def sets_strategy(environ: Mapping[str, str]) -> bool:
    """Whether a variable chooses the strategy of buckets, for any phase."""
    return any(
        text.strip()
        and (name.endswith("BUCKETING_STRATEGY") or name == "VLLM_EXPONENTIAL_BUCKETING")
        for name, text in environ.items()
    )
