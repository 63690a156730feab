"""The settings of bucketing, under the names that users of Gaudi's vLLM plugin already set.

The environment is read in one place, `BucketingConfig.from_env`. A setting that is None was not
given; its default depends on the serving limits and is worked out in `serving_grids`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import attrs

from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.validators import instance_of, one_of, optional_integer

logger = logging.getLogger(__name__)

STRATEGIES = ("exp", "lin", "pad", "fit")

# Field of BucketingConfig -> the part of the variable's name that says which axis it is.
_AXES = {
    "prompt_batch": "PROMPT_BS",
    "prompt_query": "PROMPT_QUERY",
    "prompt_context": "PROMPT_CTX",
    "decode_batch": "DECODE_BS",
    "decode_blocks": "DECODE_BLOCK",
    "decode_seq": "DECODE_SEQ",
}
_TRUE, _FALSE = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f")


@attrs.frozen
class AxisConfig:
    """What the user said about one axis of one phase; None is what the user left open.

    Attributes:
        min, step, max: of the range, in units of the axis (sequences, tokens or blocks).
        limit: the greatest number of values (`exp`, `fit`).
        pad_max: the most padding, in units of the axis (`pad`).
        pad_percent: the most padding, in percent of a bucket (`pad`), 0 to 50.
    """

    min: int | None = attrs.field(default=None, validator=optional_integer(0))
    step: int | None = attrs.field(default=None, validator=optional_integer(1))
    max: int | None = attrs.field(default=None, validator=optional_integer(0))
    limit: int | None = attrs.field(default=None, validator=optional_integer(1))
    pad_max: int | None = attrs.field(default=None, validator=optional_integer(0))
    pad_percent: int | None = attrs.field(default=None, validator=optional_integer(0, 50))

    def __attrs_post_init__(self) -> None:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise BucketingError(
                f"bucket min {self.min} is above max {self.max}: lower min or raise max"
            )


_PARAMETERS = tuple(attribute.name for attribute in attrs.fields(AxisConfig))


@attrs.frozen
class BucketingConfig:
    """Everything that a user can say about buckets; plain values, safe to send to a process.

    Attributes:
        strategy: `exp`, `lin`, `pad`, or `fit` (to recorded traffic).
        prompt_strategy, decode_strategy: for that phase instead of `strategy`.
        prompt_batch ... decode_blocks: the axes of `prompt_grid` and `decode_grid`.
        decode_seq: the sequence axis of the two-axis decode grid; the prompt's is `prompt_query`.
        bucket_file: path of a bucket file to take the grids from, instead of any strategy.
        prompt_traffic, decode_traffic: paths of saved `TrafficRecorder`s, for `fit`.
        contiguous_pa: decode reads the prefix of the KV cache up to the highest block in use, so
            that any number of blocks can meet any batch size.
    """

    strategy: str = attrs.field(
        default="exp", validator=one_of(STRATEGIES), metadata={"env": "VLLM_BUCKETING_STRATEGY"}
    )
    prompt_strategy: str | None = attrs.field(
        default=None,
        validator=one_of(STRATEGIES, optional=True),
        metadata={"env": "VLLM_PROMPT_BUCKETING_STRATEGY"},
    )
    decode_strategy: str | None = attrs.field(
        default=None,
        validator=one_of(STRATEGIES, optional=True),
        metadata={"env": "VLLM_DECODE_BUCKETING_STRATEGY"},
    )
    prompt_batch: AxisConfig = attrs.field(default=AxisConfig(), validator=instance_of(AxisConfig))
    prompt_query: AxisConfig = attrs.field(default=AxisConfig(), validator=instance_of(AxisConfig))
    prompt_context: AxisConfig = attrs.field(
        default=AxisConfig(), validator=instance_of(AxisConfig)
    )
    decode_batch: AxisConfig = attrs.field(default=AxisConfig(), validator=instance_of(AxisConfig))
    decode_blocks: AxisConfig = attrs.field(default=AxisConfig(), validator=instance_of(AxisConfig))
    decode_seq: AxisConfig = attrs.field(default=AxisConfig(), validator=instance_of(AxisConfig))
    bucket_file: str | None = attrs.field(default=None, validator=instance_of(str, optional=True))
    prompt_traffic: str | None = attrs.field(
        default=None, validator=instance_of(str, optional=True)
    )
    decode_traffic: str | None = attrs.field(
        default=None, validator=instance_of(str, optional=True)
    )
    contiguous_pa: bool = attrs.field(default=True, validator=instance_of(bool))

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> BucketingConfig:
        """The settings in `environ` (usually `os.environ`); README.md lists the names.

        `VLLM_PROMPT_SEQ_BUCKET_*` stands in for a `VLLM_PROMPT_QUERY_BUCKET_*` that is not set.
        The deprecated `VLLM_EXPONENTIAL_BUCKETING` overrules every strategy, as in the plugin.

        Raises:
            BucketingError: a value that cannot be used, naming the variable.
        """
        _warn_of_unknown(environ)
        strategies: dict[str, Any] = {
            "strategy": environ.get("VLLM_BUCKETING_STRATEGY") or "exp",
            "prompt_strategy": environ.get("VLLM_PROMPT_BUCKETING_STRATEGY") or None,
            "decode_strategy": environ.get("VLLM_DECODE_BUCKETING_STRATEGY") or None,
        }
        exponential = environ.get("VLLM_EXPONENTIAL_BUCKETING")
        if exponential:
            chosen = "exp" if _flag("VLLM_EXPONENTIAL_BUCKETING", exponential) else "lin"
            logger.warning(
                "VLLM_EXPONENTIAL_BUCKETING is deprecated: set VLLM_BUCKETING_STRATEGY=%s", chosen
            )
            strategies = {"strategy": chosen}
        axes: dict[str, Any] = {field: _axis(environ, part) for field, part in _AXES.items()}
        return cls(
            **strategies,
            **axes,
            bucket_file=environ.get("VLLM_BUCKETING_FROM_FILE") or None,
            prompt_traffic=environ.get("VLLM_PROMPT_BUCKETING_TRAFFIC") or None,
            decode_traffic=environ.get("VLLM_DECODE_BUCKETING_TRAFFIC") or None,
            contiguous_pa=_flag("VLLM_CONTIGUOUS_PA", environ.get("VLLM_CONTIGUOUS_PA") or "true"),
        )

    def to_env(self) -> dict[str, str]:
        """The variables that make `from_env` give these settings back."""
        variables = {
            "VLLM_BUCKETING_STRATEGY": self.strategy,
            "VLLM_PROMPT_BUCKETING_STRATEGY": self.prompt_strategy,
            "VLLM_DECODE_BUCKETING_STRATEGY": self.decode_strategy,
            "VLLM_BUCKETING_FROM_FILE": self.bucket_file,
            "VLLM_PROMPT_BUCKETING_TRAFFIC": self.prompt_traffic,
            "VLLM_DECODE_BUCKETING_TRAFFIC": self.decode_traffic,
            "VLLM_CONTIGUOUS_PA": str(self.contiguous_pa).lower(),
        }
        for field, part in _AXES.items():
            for parameter, value in attrs.asdict(getattr(self, field)).items():
                variables[_variable(part, parameter)] = None if value is None else str(value)
        return {name: value for name, value in variables.items() if value is not None}


def _axis(environ: Mapping[str, str], part: str) -> AxisConfig:
    settings: dict[str, int] = {}
    for parameter in _PARAMETERS:
        name = _variable(part, parameter)
        if part == "PROMPT_QUERY" and not environ.get(name):
            name = _variable("PROMPT_SEQ", parameter)
        text = environ.get(name)
        if not text:
            continue
        try:
            settings[parameter] = int(text)
            AxisConfig(**{parameter: settings[parameter]})
        except BucketingError as error:
            raise BucketingError(f"{name}={text}: {error}") from None
        except ValueError:
            raise BucketingError(f"{name}={text} is not an integer: change it") from None
    try:
        return AxisConfig(**settings)
    except BucketingError as error:
        names = f"{_variable(part, 'min')} and {_variable(part, 'max')}"
        raise BucketingError(f"{names}: {error}") from None


def _variable(part: str, parameter: str) -> str:
    return f"VLLM_{part}_BUCKET_{parameter.upper()}"


def _flag(name: str, text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise BucketingError(f"{name}={text} is neither true nor false: set it to true or false")


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    known = {_variable(part, p) for part in (*_AXES.values(), "PROMPT_SEQ") for p in _PARAMETERS}
    for name in environ:
        if re.fullmatch(r"VLLM_(PROMPT|DECODE)_\w+_BUCKET_\w+", name) and name not in known:
            logger.warning("%s has no effect: no bucket grid has such an axis or setting", name)
