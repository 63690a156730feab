"""Sampling and stopping rules: one frozen value per request.

Names, defaults and ranges are those of the OpenAI API where it defines the parameter, otherwise
those of vLLM's ``SamplingParams``. The server's API derives names, ranges and descriptions of its
request fields from this class.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sized
from functools import partial
from typing import Any, Literal

import attrs

from trencadis.engine.api.structured_output import StructuredOutput
from trencadis.engine.errors import InvalidRequest, shown
from trencadis.engine.validators import (
    boolean,
    integer,
    is_integer,
    is_text,
    items_of,
    number,
    one_of,
    plain_number,
)

MAX_LOGPROBS = 20
"""Maximum number of alternatives per position: the OpenAI API's limit of ``top_logprobs``."""

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 4096
MAX_BIASES = 4096
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_LOGPROB_TOKEN_IDS = 128
"""vLLM's limit."""
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 128
"""In characters."""
MAX_SEQUENCES = 128
"""Maximum number of sequences of one request."""

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id of any vocabulary: models have at most some hundred thousand tokens."""

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1

_integer = partial(integer, error=InvalidRequest)
_number = partial(number, error=InvalidRequest)

_MAX_TOKENS = _integer(1, _INT32_MAX, optional=True)
_BIAS = number(-100, 100, error=lambda message, _: InvalidRequest(message, "logit_bias"))


def _help(text: str) -> Mapping[str, str]:
    return {"help": text}


def _parameter(default: Any, validator: Any, help: str) -> Any:
    return attrs.field(default=default, validator=validator, metadata=_help(help))


# Converters, because type checkers read the accepted types of an argument from them.


def _stop_strings(values: str | Iterable[str] | None) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else _tuple(values, "stop", "strings")


def _stop_token_ids(values: Iterable[int] | None) -> tuple[int, ...]:
    return _token_ids(values, "stop_token_ids")


def _bad_words(values: Iterable[str | Iterable[int]] | None) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(values, str):  # each of its characters would be a word
        raise InvalidRequest(f"bad_words must be a list of texts, got {shown(values)}", "bad_words")
    words = _tuple(values, "bad_words", "texts")
    is_text = (isinstance(word, (str, bytes)) for word in words)  # bytes are rejected, too
    return tuple(
        word if keeps else _token_ids(word, "bad_words")
        for word, keeps in zip(words, is_text, strict=True)
    )


def _logprob_token_ids(values: Iterable[int] | None) -> tuple[int, ...]:
    return _token_ids(values, "logprob_token_ids")


def _allowed_token_ids(values: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if values is None else _token_ids(values, "allowed_token_ids")


def _token_ids(values: Iterable[int] | None, name: str) -> tuple[int, ...]:
    items = _tuple(values, name, "token ids")
    return items if _are_token_ids(items) else tuple(map(plain_number, items))


def _biases(values: Mapping[int, float] | None) -> dict[int, float]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise InvalidRequest(
            f"logit_bias must map token ids to numbers, as in {{42: -1.5}}, got {shown(values)}",
            "logit_bias",
        )
    # A copy, because the caller may change its own after the checks.
    if _are_token_ids(values) and _are_biases(values.values()):
        return dict(values)
    return {plain_number(token): plain_number(bias) for token, bias in values.items()}


def _tuple(values: Iterable[Any] | None, name: str, content: str) -> tuple[Any, ...]:
    if values is None:
        return ()
    items = items_of(values)
    if items is None:
        raise InvalidRequest(f"{name} must be a list of {content}, got {shown(values)}", name)
    return items


@attrs.frozen(kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one request.

    Each field's ``metadata["help"]`` describes it; each range is the ``low`` and ``high`` of the
    field's validator.

    Beam search follows ``transformers``. It draws no tokens and knows the text of a beam only at
    its end, so parameters that shape a draw, ``stop`` and log-probabilities are rejected with it.

    Raises `InvalidRequest`, which names the parameter, on a value out of range and on parameters
    that contradict each other.
    """

    n: int = _parameter(1, _integer(1, MAX_SEQUENCES), "Number of answers per prompt.")
    best_of: int | None = _parameter(
        None,
        _integer(1, MAX_SEQUENCES, optional=True),
        "Number of sequences to generate, or of beams to search; the n answers are those with "
        "the highest mean log-probability or beam score. Null: n.",
    )
    use_beam_search: bool = _parameter(
        False, boolean(error=InvalidRequest), "Search beams instead of drawing tokens."
    )
    length_penalty: float = _parameter(
        1.0,
        _number(-100.0, 100.0),
        "Beam search: a hypothesis scores its summed log-probability divided by its length "
        "to this power.",
    )
    early_stopping: bool | Literal["never"] = _parameter(
        False,
        one_of((True, False, "never"), error=InvalidRequest),
        "Beam search: true ends it at the first best_of finished hypotheses, false when no "
        "running beam scores higher at its present length, 'never' when none could at any "
        "length.",
    )
    temperature: float = _parameter(
        1.0, _number(0.0, 2.0), "Divisor of the logits. 0: always the most probable token."
    )
    top_p: float = _parameter(
        1.0,
        _number(0.0, 1.0, exclusive_low=True),
        "Draw from the most probable tokens whose probabilities sum up to this.",
    )
    top_k: int = _parameter(
        0, _integer(-1, _INT32_MAX), "Draw from this many most probable tokens. 0 or -1: from all."
    )
    min_p: float = _parameter(
        0.0,
        _number(0.0, 1.0),
        "Draw from tokens of at least this probability, relative to the most probable token.",
    )
    seed: int | None = _parameter(
        None,
        _integer(-_INT64_MAX - 1, _INT64_MAX, optional=True),
        "Seed of the draws; answer i draws with seed + i. Null: a random seed.",
    )
    presence_penalty: float = _parameter(
        0.0, _number(-2.0, 2.0), "Subtracted from the logit of each token that the output contains."
    )
    frequency_penalty: float = _parameter(
        0.0,
        _number(-2.0, 2.0),
        "Subtracted from a token's logit once for each time that the output contains it.",
    )
    repetition_penalty: float = _parameter(
        1.0,
        _number(0.0, 10.0, exclusive_low=True),
        "Divides the positive logits, and multiplies the negative ones, of tokens that prompt "
        "or output contain.",
    )
    max_tokens: int | None = _parameter(
        16,
        _MAX_TOKENS,
        "Maximum number of output tokens. Null: the rest of the model's context.",
    )
    min_tokens: int = _parameter(
        0,
        _integer(0, _INT32_MAX),
        "Number of output tokens before an end-of-sequence or stop token may end an answer. "
        "A structured output that is complete ends it earlier.",
    )
    stop: tuple[str, ...] = attrs.field(
        default=(),
        converter=_stop_strings,
        metadata=_help(
            f"A string that ends an answer, or at most {MAX_STOP_STRINGS} of which each does."
        ),
    )
    stop_token_ids: tuple[int, ...] = attrs.field(
        default=(),
        converter=_stop_token_ids,
        metadata=_help("Token ids, each of which ends an answer."),
    )
    ignore_eos: bool = _parameter(
        False, boolean(error=InvalidRequest), "Continue after the model's end-of-sequence token."
    )
    include_stop_str_in_output: bool = _parameter(
        False, boolean(error=InvalidRequest), "Keep the stop string in the text of the answer."
    )
    skip_special_tokens: bool = _parameter(
        True, boolean(error=InvalidRequest), "Leave special tokens out of the text of the answer."
    )
    logprobs: int | None = _parameter(
        None,
        _integer(0, MAX_LOGPROBS, optional=True),
        "Number of most probable tokens to report per position, besides the chosen one. "
        "Null: no log-probabilities.",
    )
    prompt_logprobs: int | None = _parameter(
        None,
        _integer(0, MAX_LOGPROBS, optional=True),
        "Number of most probable tokens to report for each token of the prompt, besides it. "
        "Null: no log-probabilities of the prompt.",
    )
    logprob_token_ids: tuple[int, ...] = attrs.field(
        default=(),
        converter=_logprob_token_ids,
        metadata=_help(
            f"At most {MAX_LOGPROB_TOKEN_IDS} token ids whose log-probabilities to report per "
            "position, instead of the most probable ones. Needs logprobs."
        ),
    )
    logit_bias: Mapping[int, float] = attrs.field(
        factory=dict,
        converter=_biases,
        metadata=_help("Added to the logits: a number from -100 to 100 for each token id."),
    )
    allowed_token_ids: tuple[int, ...] | None = attrs.field(
        default=None,
        converter=_allowed_token_ids,
        metadata=_help(
            "The only token ids that an answer may have; it ends early only if one of them ends "
            "it. Null: all."
        ),
    )
    bad_words: tuple[str | tuple[int, ...], ...] = attrs.field(
        default=(),
        converter=_bad_words,
        metadata=_help(
            f"At most {MAX_BAD_WORDS} texts that an answer must not have: the last token of each "
            "is forbidden after the others, as the text is tokenized alone and after a space. A "
            "word that other tokens spell is not noticed."
        ),
    )
    """Also lists of token ids: an `EngineCore`, which has no tokenizer, takes no texts."""
    structured_output: StructuredOutput | None = attrs.field(
        default=None,
        metadata=_help("The form that each answer has: JSON, a schema, a regex, a grammar."),
    )

    @stop.validator
    def _check_stop(self, _: object, value: tuple[str, ...]) -> None:
        if len(value) > MAX_STOP_STRINGS or not all(is_text(string) and string for string in value):
            raise InvalidRequest(
                f"stop must be at most {MAX_STOP_STRINGS} non-empty strings that UTF-8 can encode, "
                f"got {shown(value)}",
                "stop",
            )

    @stop_token_ids.validator
    def _check_stop_token_ids(self, _: object, value: tuple[int, ...]) -> None:
        _check_count(value, MAX_STOP_TOKEN_IDS, "stop_token_ids")
        if not _are_token_ids(value):
            for token in value:
                _check_token_id(token, "stop_token_ids")

    @logprob_token_ids.validator
    def _check_logprob_token_ids(self, _: object, value: tuple[int, ...]) -> None:
        _check_count(value, MAX_LOGPROB_TOKEN_IDS, "logprob_token_ids")
        if not _are_token_ids(value):
            for token in value:
                _check_token_id(token, "logprob_token_ids")

    @allowed_token_ids.validator
    def _check_allowed_token_ids(self, _: object, value: tuple[int, ...] | None) -> None:
        if value is None:
            return
        if not value:
            raise InvalidRequest(
                "allowed_token_ids names no token: name one, or leave it out", "allowed_token_ids"
            )
        _check_count(value, MAX_ALLOWED_TOKEN_IDS, "allowed_token_ids")
        if not _are_token_ids(value):
            for token in value:
                _check_token_id(token, "allowed_token_ids")

    @bad_words.validator
    def _check_bad_words(self, _: object, value: tuple[str | tuple[int, ...], ...]) -> None:
        texts = [word for word in value if isinstance(word, str)]
        _check_count(texts, MAX_BAD_WORDS, "bad_words")
        _check_count(value, 2 * MAX_BAD_WORDS, "bad_words")  # a text is two lists of tokens
        for word in value:
            if isinstance(word, tuple) and word:
                for token in word:  # of a text, up to four for each character, and a space
                    _check_token_id(token, "bad_words")
                _check_count(word, 4 * MAX_BAD_WORD_LENGTH + 1, "bad_words")
                continue
            if not 1 <= len(word) <= MAX_BAD_WORD_LENGTH or word == " " * len(word):
                raise InvalidRequest(
                    f"bad_words must be texts of 1 to {MAX_BAD_WORD_LENGTH} characters that are "
                    f"not spaces alone, got {shown(word)}",
                    "bad_words",
                )
            if not is_text(word):
                raise InvalidRequest(
                    f"bad_words must be texts that UTF-8 can encode, got {shown(word)}", "bad_words"
                )

    @logit_bias.validator
    def _check_logit_bias(self, _: object, value: Mapping[int, float]) -> None:
        _check_count(value, MAX_BIASES, "logit_bias")
        if _are_token_ids(value) and _are_biases(value.values()):
            return
        for token, bias in value.items():
            _check_token_id(token, "logit_bias")
            _BIAS.checked(f"logit_bias of token {token}", bias)

    @structured_output.validator
    def _check_structured_output(self, _: object, value: StructuredOutput | None) -> None:
        if value is None:
            return
        if not isinstance(value, StructuredOutput):
            raise InvalidRequest(
                "structured_output must be a StructuredOutput, as in "
                f"StructuredOutput(json_object=True), got {shown(value)}",
                "structured_output",
            )
        for name in ("use_beam_search", "ignore_eos", "allowed_token_ids"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} and structured_output exclude each other", name)

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(
                f"best_of {self.best_of} is below n {self.n}: raise it, or leave it out", "best_of"
            )
        if self.seed is not None and self.seed + self.num_seqs > 2**63:
            raise InvalidRequest(
                f"seed {self.seed} is too large for {self.num_seqs} samples: seed + i must stay "
                "below 2**63",
                "seed",
            )
        if self.use_beam_search:
            self._check_beam_search()
        else:
            self._check_sampling()

    def _check_beam_search(self) -> None:
        without_effect: dict[str, tuple[object, ...]] = {
            "temperature": (0.0, 1.0),
            "top_p": (1.0,),
            "top_k": (0, -1),
            "min_p": (0.0,),
            "stop": ((),),
            "allowed_token_ids": (None,),
            "logprobs": (None,),
            "logprob_token_ids": ((),),
            "prompt_logprobs": (None,),
        }
        for name, values in without_effect.items():
            value = getattr(self, name)
            if value not in values:
                raise InvalidRequest(
                    f"{name} {shown(value)} has no meaning with use_beam_search: leave it out", name
                )

    def _check_sampling(self) -> None:
        for name, without_effect in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(self, name) != without_effect:
                raise InvalidRequest(f"{name} needs use_beam_search", name)
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest("logprob_token_ids needs logprobs: set it", "logprob_token_ids")

    def with_max_tokens(self, max_tokens: int | None) -> SamplingParams:
        """The same rules with another ``max_tokens``.

        Takes microseconds where a further value would check its thousands of token ids again.
        """
        changed = copy.copy(self)
        object.__setattr__(changed, "max_tokens", _MAX_TOKENS.checked("max_tokens", max_tokens))
        changed.__attrs_post_init__()
        return changed

    @property
    def greedy(self) -> bool:
        """Whether each token is the most probable one."""
        return self.temperature == 0.0

    @property
    def num_seqs(self) -> int:
        """Number of sequences to generate: samples or beams."""
        return self.n if self.best_of is None else self.best_of

    @property
    def needs_ranking(self) -> bool:
        """Whether the answers are known only after all sequences have ended."""
        return self.use_beam_search or self.num_seqs > self.n


def _check_count(value: Sized, limit: int, name: str) -> None:
    if len(value) > limit:
        raise InvalidRequest(f"{name} names {len(value)} tokens: give at most {limit}", name)


# Both in a few passes, because a request may name thousands of tokens, and be one of a thousand.
# What they do not accept is looked at one by one, with a message.


def _are_token_ids(values: Collection[Any]) -> bool:
    is_plain = set(map(type, values)) <= {int}
    return is_plain and (not values or 0 <= min(values) <= max(values) <= MAX_TOKEN_ID)


def _are_biases(values: Collection[Any]) -> bool:
    is_plain = set(map(type, values)) <= {int, float}
    return is_plain and all(-100 <= value <= 100 for value in values)


def _check_token_id(value: Any, name: str) -> None:
    if not is_integer(value) or not 0 <= value <= MAX_TOKEN_ID:
        raise InvalidRequest(
            f"{name} must name token ids, integers from 0 to {MAX_TOKEN_ID}, got {shown(value)}",
            name,
        )
