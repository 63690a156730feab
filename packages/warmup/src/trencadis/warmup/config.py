"""The settings of warm-up, under the names that users of Gaudi's vLLM plugin already set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trencadis.warmup.errors import ConfigError
from trencadis.warmup.strategies import STRATEGIES
from trencadis.warmup.validators import fraction

_TRUE, _FALSE = {"1", "true", "yes", "on", "y", "t"}, {"0", "false", "no", "off", "n", "f"}


def _strategy(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    if value not in STRATEGIES:
        raise ConfigError(f"{attribute.name} must be one of {', '.join(STRATEGIES)}, got {value!r}")


@attrs.frozen(kw_only=True)
class WarmupConfig:
    """What to warm up, and how to spend the memory of graphs. Defaults: seeds 000 and 002.

    Attributes:
        skip: no warm-up at all; every shape is compiled when it first comes.
        enforce_eager: buckets are executed, graphs not captured, the sampler not warmed up.
        graph_reserved_mem: share of the usable memory that is kept for graphs, 0 to 1.
        graph_prompt_ratio: share of that which prompts may use first, 0 to 1.
        prompt_strategy, decode_strategy: which graphs come first: ``min_tokens``, ``max_bs``, or
            ``traffic`` for most replays per byte.
    """

    skip: bool = False
    enforce_eager: bool = False
    graph_reserved_mem: float = attrs.field(default=0.1, validator=fraction)
    graph_prompt_ratio: float = attrs.field(default=0.3, validator=fraction)
    prompt_strategy: str = attrs.field(default="min_tokens", validator=_strategy)
    decode_strategy: str = attrs.field(default="max_bs", validator=_strategy)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> WarmupConfig:
        """Settings from ``VLLM_SKIP_WARMUP``, ``VLLM_GRAPH_RESERVED_MEM``,
        ``VLLM_GRAPH_PROMPT_RATIO``, ``VLLM_GRAPH_PROMPT_STRATEGY``, ``VLLM_GRAPH_DECODE_STRATEGY``.

        Unset and empty mean the default. Raises `ConfigError`, which names the variable.
        """
        given: dict[str, Any] = {}
        for variable, (field, parse) in _VARIABLES.items():
            text = environ.get(variable, "").strip()
            if not text:
                continue
            try:
                given[field] = parse(text)
                cls(**{field: given[field]})
            except ValueError as error:
                raise ConfigError(f"{variable}={text}: {error}") from None
        return cls(**given)


def _flag(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ConfigError("must be true or false")


_VARIABLES: dict[str, tuple[str, Any]] = {
    "VLLM_SKIP_WARMUP": ("skip", _flag),
    "VLLM_GRAPH_RESERVED_MEM": ("graph_reserved_mem", float),
    "VLLM_GRAPH_PROMPT_RATIO": ("graph_prompt_ratio", float),
    "VLLM_GRAPH_PROMPT_STRATEGY": ("prompt_strategy", str.lower),
    "VLLM_GRAPH_DECODE_STRATEGY": ("decode_strategy", str.lower),
}
