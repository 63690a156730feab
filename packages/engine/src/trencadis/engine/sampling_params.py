"""How the next token is chosen and when generation ends: one frozen value per request.

Names, defaults and ranges are those of the OpenAI API where it has them and of ``vllm``'s
``SamplingParams`` elsewhere, so that existing clients keep their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

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


# With ``converter=tuple`` mypy does not know the element type, and refuses every argument.
def _strings(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


def _token_ids(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@attrs.frozen(kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one request.

    ``temperature == 0`` is greedy. ``top_k`` 0 or -1 keeps the whole vocabulary. ``max_tokens``
    None means up to the model's context. ``logprobs`` counts alternatives reported per position
    (0 reports the chosen token alone, None nothing).

    ``n`` answers are wanted, of ``best_of`` samples (None: n) those with the highest mean
    log-probability. With ``use_beam_search`` they are the best hypotheses of so many beams, by the
    rules of ``transformers``: ``length_penalty`` is the power of the length that scores are divided
    by, ``early_stopping`` True, False or ``"never"``. Beams are not drawn, so what shapes a draw
    is refused with them (``temperature`` may be 0, or 1, which does nothing), and so are ``stop``
    and ``logprobs``. Sample ``i`` draws with ``seed + i``.

    Raises `InvalidRequest`, which names the parameter, on a value out of range.
    """

    n: int = attrs.field(default=1, validator=_integer(1, 128, "an integer from 1 to 128"))
    best_of: int | None = attrs.field(
        default=None, validator=_integer(1, 128, "an integer from 1 to 128", optional=True)
    )
    use_beam_search: bool = False
    length_penalty: float = attrs.field(
        default=1.0, validator=_number(-100.0, 100.0, "from -100 to 100")
    )
    early_stopping: bool | Literal["never"] = attrs.field(default=False)
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
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_token_ids)
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

    @early_stopping.validator
    def _known_stopping(self, _: object, value: object) -> None:
        if not isinstance(value, bool) and value != "never":
            raise InvalidRequest(
                f"early_stopping must be True, False or 'never', got {value!r}", "early_stopping"
            )

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(
                f"best_of {self.best_of} is below n {self.n}: raise it, or leave it out", "best_of"
            )
        if self.seed is not None and self.seed + self.width > 2**63:
            raise InvalidRequest(
                f"seed {self.seed} leaves no seed of their own for {self.width} samples", "seed"
            )
        if self.use_beam_search:
            self._check_beams()
        else:
            self._check_samples()

    def _check_beams(self) -> None:
        """Nothing is drawn, and the text of a beam is not known before its search has ended."""
        idle: dict[str, tuple[object, ...]] = {
            "temperature": (0.0, 1.0),
            "top_p": (1.0,),
            "top_k": (0, -1),
            "min_p": (0.0,),
            "stop": ((),),
            "logprobs": (None,),
        }
        for name, values in idle.items():
            value = getattr(self, name)
            if value not in values:
                raise InvalidRequest(
                    f"{name} {value!r} has no meaning with use_beam_search: leave it out", name
                )

    def _check_samples(self) -> None:
        for name, idle in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(self, name) != idle:
                raise InvalidRequest(f"{name} needs use_beam_search", name)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def width(self) -> int:
        """Sequences that are generated, to take ``n`` of them: samples, or beams."""
        return self.n if self.best_of is None else self.best_of

    @property
    def chooses(self) -> bool:
        """Whether it is known only in the end which sequences are answers."""
        return self.use_beam_search or self.width > self.n
