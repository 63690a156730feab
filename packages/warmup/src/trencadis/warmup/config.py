"""The settings of warm-up, with the environment variables of Gaudi's vLLM plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from trencadis.bucketing.validators import Validator
from trencadis.warmup.errors import ConfigError
from trencadis.warmup.memory_plan import GRAPH_PROMPT_RATIO, GRAPH_RESERVED_MEM
from trencadis.warmup.strategies import STRATEGIES
from trencadis.warmup.validators import boolean, instance_of, number, one_of

_TRUE, _FALSE = {"1", "true", "yes", "on", "y", "t"}, {"0", "false", "no", "off", "n", "f"}


def _setting(default: Any, validator: Validator, help: str, **env: str) -> Any:
    """A field with its meaning, and its environment variable, as metadata."""
    return attrs.field(default=default, validator=validator, metadata={"help": help, **env})


@attrs.frozen(kw_only=True)
class WarmupConfig:
    """What is warmed up, and how graphs share their memory. Defaults: seeds 000 and 002.

    The metadata of each field has its meaning (``help``) and its environment variable (``env``).
    Raises `ConfigError`.
    """

    skip: bool = _setting(
        False,
        boolean(),
        "Skip warm-up: each bucket is compiled when a request first needs it.",
        env="VLLM_SKIP_WARMUP",
    )
    enforce_eager: bool = _setting(
        False,
        boolean(),
        "Execute every bucket, but capture no graphs and do not warm up the sampler.",
    )
    graph_reserved_mem: float = _setting(
        GRAPH_RESERVED_MEM,
        number(0, 1),
        "Share of the usable device memory that is reserved for graphs, 0 to 1.",
        env="VLLM_GRAPH_RESERVED_MEM",
    )
    graph_prompt_ratio: float = _setting(
        GRAPH_PROMPT_RATIO,
        number(0, 1),
        "Share of the graph memory that prompt graphs may take first, 0 to 1.",
        env="VLLM_GRAPH_PROMPT_RATIO",
    )
    prompt_strategy: str = _setting(
        "min_tokens",
        one_of(STRATEGIES),
        f"Order in which prompt graphs are captured: {', '.join(STRATEGIES)}.",
        env="VLLM_GRAPH_PROMPT_STRATEGY",
    )
    decode_strategy: str = _setting(
        "max_bs",
        one_of(STRATEGIES),
        f"Order in which decode graphs are captured: {', '.join(STRATEGIES)}.",
        env="VLLM_GRAPH_DECODE_STRATEGY",
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> WarmupConfig:
        """Read the settings that have an environment variable.

        An unset or empty variable means the default. Raises `ConfigError`, which names the
        variable.
        """
        instance_of(Mapping).checked("environ", environ)
        settings: dict[str, Any] = {}
        for field in attrs.fields(cls):
            variable = field.metadata.get("env")
            text = environ.get(variable, "").strip() if variable is not None else ""
            if not text:
                continue
            try:
                settings[field.name] = _PARSERS[type(field.default)](text)
                cls(**{field.name: settings[field.name]})
            except ValueError as error:
                raise ConfigError(f"{variable}={text}: {error}") from None
        return cls(**settings)


def _parse_flag(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ConfigError("must be true or false")


_PARSERS: Mapping[type, Callable[[str], object]] = {
    bool: _parse_flag,
    float: float,
    str: str.lower,
}
"""How the text of a variable becomes a value, by the type of the field's default."""
