"""How the next token is chosen and when generation ends: one frozen value per request.

Names, defaults and ranges are those of the OpenAI API where it has them and of ``vllm``'s
``SamplingParams`` elsewhere, so that existing clients keep their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from trencadis.engine.errors import InvalidRequest

MAX_LOGPROBS = 20
"""Most alternatives per position: the limit of the OpenAI API for ``top_logprobs``."""

MAX_STOP_STRINGS = 16


def _number(low: float, high: float, accepted: str) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not ok or math.isnan(value) or not low <= value <= high:
            raise InvalidRequest(
                f"{attribute.name} must be {accepted}, got {value!r}", attribute.name
            )

    return check


def _integer(low: int, high: float, accepted: str, *, optional: bool = False) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if optional and value is None:
            return
        ok = isinstance(value, int) and not isinstance(value, bool)
        if not ok or not low <= value <= high:
            raise InvalidRequest(
                f"{attribute.name} must be {accepted}, got {value!r}", attribute.name
            )

    return check


@attrs.frozen(kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one request.

    ``temperature == 0`` is greedy. ``top_k`` 0 or -1 keeps the whole vocabulary. ``max_tokens``
    None means up to the model's context. ``logprobs`` counts alternatives reported per position
    (0 reports the chosen token alone, None nothing). Raises `InvalidRequest`, which names the
    parameter, on a value out of range.
    """

    n: int = attrs.field(default=1, validator=_integer(1, 128, "an integer from 1 to 128"))
    temperature: float = attrs.field(default=1.0, validator=_number(0.0, 2.0, "from 0 to 2"))
    top_p: float = attrs.field(default=1.0, validator=_number(0.0, 1.0, "above 0, at most 1"))
    top_k: int = attrs.field(default=0, validator=_integer(-1, math.inf, "-1, 0 or positive"))
    min_p: float = attrs.field(default=0.0, validator=_number(0.0, 1.0, "from 0 to 1"))
    seed: int | None = attrs.field(
        default=None, validator=_integer(-(2**63), 2**63 - 1, "a 64-bit integer", optional=True)
    )
    presence_penalty: float = attrs.field(default=0.0, validator=_number(-2.0, 2.0, "from -2 to 2"))
    frequency_penalty: float = attrs.field(
        default=0.0, validator=_number(-2.0, 2.0, "from -2 to 2")
    )
    repetition_penalty: float = attrs.field(
        default=1.0, validator=_number(0.0, 10.0, "above 0, at most 10")
    )
    max_tokens: int | None = attrs.field(
        default=16, validator=_integer(1, math.inf, "a positive integer", optional=True)
    )
    min_tokens: int = attrs.field(default=0, validator=_integer(0, math.inf, "0 or positive"))
    stop: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=tuple)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = attrs.field(
        default=None,
        validator=_integer(0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}", optional=True),
    )
    logit_bias: Mapping[int, float] = attrs.field(factory=dict)

    @top_p.validator
    def _top_p_above_zero(self, _: object, value: float) -> None:
        if value == 0.0:
            raise InvalidRequest("top_p must be above 0, at most 1, got 0", "top_p")

    @repetition_penalty.validator
    def _repetition_penalty_above_zero(self, _: object, value: float) -> None:
        if value == 0.0:
            raise InvalidRequest(
                "repetition_penalty must be above 0, at most 10, got 0", "repetition_penalty"
            )

    @stop.validator
    def _stop_strings(self, _: object, value: tuple[str, ...]) -> None:
        if len(value) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in value):
            raise InvalidRequest(
                f"stop must be at most {MAX_STOP_STRINGS} non-empty strings, got {value!r}", "stop"
            )

    @logit_bias.validator
    def _bias_range(self, _: object, value: Mapping[int, float]) -> None:
        for token, bias in value.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(
                    f"logit_bias of token {token} must be from -100 to 100, got {bias!r}",
                    "logit_bias",
                )

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def split(self) -> list[SamplingParams]:
        """One value per sample of the request, each with a seed of its own where one was given."""
        seeds = [None if self.seed is None else self.seed + i for i in range(self.n)]
        return [attrs.evolve(self, n=1, seed=seed) for seed in seeds]
