"""The settings of bucketing, under the environment names of Gaudi's vLLM plugin.

A setting that is None was not given. Its default depends on the serving limits and is resolved in
`serving_grids`.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

import attrs

from trencadis.bucketing.config.axis_config import AxisConfig, axis_settings, setting
from trencadis.bucketing.config.environment import (
    all_variables,
    describe_settings,
    read_flag,
    read_settings,
    variable_of,
)
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.strategies import STRATEGIES
from trencadis.bucketing.validators import boolean, instance_of, one_of

logger = logging.getLogger(__name__)

Phase: TypeAlias = Literal["prompt", "decode"]

_EXPONENTIAL = "VLLM_EXPONENTIAL_BUCKETING"
_STRATEGY_NAMES = ", ".join(STRATEGIES)


@attrs.frozen
class BucketingConfig:
    """Everything that a user can set about buckets: plain values, safe to pickle.

    The metadata of each field has its meaning (`help`) and its environment variable (`env`).

    Raises:
        BucketingError: an unknown strategy, or a value of the wrong type.
    """

    strategy: str = setting(
        "exp",
        one_of(STRATEGIES),
        f"bucketing strategy of both phases: {_STRATEGY_NAMES}",
        env="VLLM_BUCKETING_STRATEGY",
    )
    prompt_strategy: str | None = setting(
        None,
        one_of(STRATEGIES, optional=True),
        "bucketing strategy of prompt batches, where it differs",
        env="VLLM_PROMPT_BUCKETING_STRATEGY",
    )
    decode_strategy: str | None = setting(
        None,
        one_of(STRATEGIES, optional=True),
        "bucketing strategy of decode batches, where it differs",
        env="VLLM_DECODE_BUCKETING_STRATEGY",
    )
    prompt_batch: AxisConfig = axis_settings(
        "batch size of prompt batches, in sequences", env="VLLM_PROMPT_BS_BUCKET_{}"
    )
    prompt_query: AxisConfig = axis_settings(
        "query length of prompt batches, in new tokens of one sequence",
        env="VLLM_PROMPT_QUERY_BUCKET_{}",
        env_alias="VLLM_PROMPT_SEQ_BUCKET_{}",
    )
    prompt_context: AxisConfig = axis_settings(
        "context of prompt batches, in cached blocks of one sequence",
        env="VLLM_PROMPT_CTX_BUCKET_{}",
    )
    decode_batch: AxisConfig = axis_settings(
        "batch size of decode batches, in sequences", env="VLLM_DECODE_BS_BUCKET_{}"
    )
    decode_blocks: AxisConfig = axis_settings(
        "KV cache of decode batches, in blocks of the batch", env="VLLM_DECODE_BLOCK_BUCKET_{}"
    )
    decode_seq: AxisConfig = axis_settings(
        "sequence length of decode batches, in tokens; where a grid has blocks, read "
        "as VLLM_DECODE_BLOCK_BUCKET_* that are not set: tokens / block size",
        env="VLLM_DECODE_SEQ_BUCKET_{}",
    )
    bucket_file: str | None = setting(
        None,
        instance_of(str, optional=True),
        "path of a bucket file; a phase that it does not list uses its strategy",
        env="VLLM_BUCKETING_FROM_FILE",
    )
    prompt_traffic: str | None = setting(
        None,
        instance_of(str, optional=True),
        "path of recorded prompt traffic, for strategy fit",
        env="VLLM_PROMPT_BUCKETING_TRAFFIC",
    )
    decode_traffic: str | None = setting(
        None,
        instance_of(str, optional=True),
        "path of recorded decode traffic, for strategy fit",
        env="VLLM_DECODE_BUCKETING_TRAFFIC",
    )
    contiguous_pa: bool = setting(
        True,
        boolean(),
        "decode reads the KV cache from block 0 to the highest block in use (true), "
        "or a list of blocks (false)",
        env="VLLM_CONTIGUOUS_PA",
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> BucketingConfig:
        """The settings in `environ` (usually `os.environ`); docs/bucketing/settings.md lists them.

        Raises:
            BucketingError: a value that cannot be used, with its variable.
        """
        instance_of(Mapping).checked("environ", environ)
        _warn_of_misspelt(environ)
        settings = read_settings(cls, _without_deprecated(environ))
        try:
            return cls(**settings)
        except BucketingError as error:
            raise BucketingError(f"{variable_of(cls, str(error.field))}: {error}") from None

    def strategy_of(self, phase: Phase) -> str:
        """The strategy that is in force for a phase."""
        own = self.prompt_strategy if phase == "prompt" else self.decode_strategy
        return own or self.strategy


def describe_variables() -> dict[str, str]:
    """The meaning of every variable that `from_env` reads; `*` stands for an axis setting."""
    deprecated = "deprecated: true selects exp, false selects lin, over every other strategy"
    return {**describe_settings(BucketingConfig), _EXPONENTIAL: deprecated}


def describe_axis_settings() -> dict[str, str]:
    """The meaning of every axis setting that can stand for `*`, with the strategies that use it."""
    meanings: dict[str, str] = {}
    for field in attrs.fields(AxisConfig):
        users = [name for name, strategy in STRATEGIES.items() if field.name in strategy.settings]
        only = "" if len(users) == len(STRATEGIES) else f" ({', '.join(users)})"
        meanings[field.metadata["env"]] = field.metadata["help"] + only
    return meanings


def _without_deprecated(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables with the deprecated one replaced: it overrides every strategy."""
    text = environ.get(_EXPONENTIAL)
    if not text:
        return environ
    fields = attrs.fields(BucketingConfig)
    names = [
        field.metadata["env"]
        for field in (fields.strategy, fields.prompt_strategy, fields.decode_strategy)
    ]
    chosen = "exp" if read_flag(_EXPONENTIAL, text) else "lin"
    logger.warning("%s is deprecated: set %s=%s", _EXPONENTIAL, names[0], chosen)
    return {**environ, **dict.fromkeys(names, ""), names[0]: chosen}


def _warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Warn of variables that resemble one of these settings and are none.

    Other variables of vLLM and of its plugins are left alone.
    """
    known = [*all_variables(BucketingConfig), _EXPONENTIAL]
    for name in environ:
        if not isinstance(name, str) or name in known:
            continue
        nearest = difflib.get_close_matches(name.upper(), known, n=1, cutoff=_RESEMBLANCE)
        if nearest or _AXIS_VARIABLE.fullmatch(name):
            nearest = nearest or difflib.get_close_matches(name, known, n=1, cutoff=0)
            logger.warning(
                "%s has no effect: no bucketing setting has this name; the nearest is %s",
                name,
                nearest[0],
            )


_AXIS_VARIABLE = re.compile(r"VLLM_(PROMPT|DECODE)_\w+_BUCKET_\w+")

_RESEMBLANCE = 0.83
"""From this ratio of `difflib` on, a name counts as a misspelt setting: a few wrong letters, or a
word less. Names of vLLM and of its Gaudi plugin that are not bucketing settings stay below: the
nearest, VLLM_ENABLE_BUCKETING, has 0.81, VLLM_PROMPT_USE_FUSEDSDPA 0.73."""
