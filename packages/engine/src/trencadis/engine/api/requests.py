"""The requests to an engine: one frozen value each, which goes whole from the API to the core.

A field is declared here, together with its check. `RequestFields` repeats those that callers give
as keyword arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, TypeAlias, TypedDict

import attrs

from trencadis.engine.api.sampling_params import MAX_TOKEN_ID, SamplingParams
from trencadis.engine.errors import InvalidRequest, shown
from trencadis.engine.validators import MAX_ITEMS, is_text, items_of, plain_number

MAX_CACHE_SALT = 1024
"""Most characters of a cache salt."""

MAX_CLIENT = 256
"""Most characters of a client's name."""

MAX_ADAPTER_NAME = 256
"""Most characters of an adapter's name."""

_INT64_MAX = 2**63 - 1
"""The largest integer that a message can carry to the core."""


def _token_ids(prompt: Iterable[int]) -> tuple[int, ...]:
    if isinstance(prompt, (str, bytes)):
        raise InvalidRequest(
            f"the prompt must be token ids, got the text {shown(prompt)}: encode it first, with "
            "tokenizer.encode",
            "prompt",
        )
    token_ids = items_of(prompt)
    if token_ids is None:
        raise InvalidRequest(
            f"the prompt must be at most {MAX_ITEMS} token ids, got {shown(prompt)}", "prompt"
        )
    if not set(map(type, token_ids)) <= {int}:
        token_ids = tuple(map(plain_number, token_ids))
        wrong = [token for token in token_ids if type(token) is not int]
        if wrong:
            raise InvalidRequest(
                f"token ids of the prompt must be integers, got {shown(wrong[0])}", "prompt"
            )
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_TOKEN_ID:
        raise InvalidRequest(
            f"token ids of the prompt must be from 0 to {MAX_TOKEN_ID}, "
            f"got {shown(min(token_ids))} to {shown(max(token_ids))}",
            "prompt",
        )
    return token_ids


def check_request_id(request_id: str | None) -> None:
    """Raise `InvalidRequest` for what cannot name a request."""
    if not is_text(request_id):
        raise InvalidRequest(
            f"request_id must be a text that UTF-8 can encode, got {shown(request_id)}",
            "request_id",
        )


def check_adapter_name(name: object, field: str) -> None:
    """Raise `InvalidRequest` for what cannot name an adapter, or would break lines of a log."""
    if not is_text(name) or not 1 <= len(name) <= MAX_ADAPTER_NAME or not name.isprintable():
        raise InvalidRequest(
            f"{field} must be the name of an adapter, a text of 1 to {MAX_ADAPTER_NAME} printable "
            f"characters that UTF-8 can encode, got {shown(name)}",
            field,
        )


class RequestFields(TypedDict, total=False):
    """The fields that the requests of one call share, as keyword arguments: see `PromptRequest`."""

    priority: int
    cache_salt: str | None
    client: str
    lora: str | None


def _bad_tokens(params: SamplingParams) -> list[tuple[int, ...]]:
    """Those of ``params.bad_words``. Raises `InvalidRequest` for texts."""
    tokens = [word for word in params.bad_words if not isinstance(word, str)]
    if len(tokens) < len(params.bad_words):
        raise InvalidRequest("bad_words has texts, and this needs their token ids", "bad_words")
    return tokens


@attrs.frozen
class PromptRequest:
    """The fields of every request. Raises `InvalidRequest`, which names the field.

    - ``prompt_token_ids``: the prompt.
    - ``request_id``: its name in outputs and logs; None: the engine makes one.
    - ``priority``: with the scheduling policy ``priority``, requests of a lower value run first.
    - ``cache_salt``: only requests of the same salt share cached prefixes, so that the time of a
      prompt reveals nothing about the prompts of others.
    - ``client``: who sends it. Of the clients whose requests wait with equal priority, the one that
      got the fewest tokens is served next.
    - ``model``: the model whose tokenizer made the prompt: the request is rejected where another
      one is active. None: it is for whichever is active.
    - ``lora``: the name of the adapter that it is computed with; None: the model's own weights.
    - ``lora_digest``: where it is resumed, the content of the adapter that it began with.
    - ``is_resumed``: it was accepted before, and parked. The length of the queue does not bind it.
    """

    prompt_token_ids: tuple[int, ...] = attrs.field(converter=_token_ids, repr=False)
    request_id: str | None = attrs.field(default=None, kw_only=True)
    priority: int = attrs.field(default=0, kw_only=True)
    cache_salt: str | None = attrs.field(default=None, kw_only=True)
    client: str = attrs.field(default="", kw_only=True)
    model: str | None = attrs.field(default=None, kw_only=True)
    lora: str | None = attrs.field(default=None, kw_only=True)
    lora_digest: str = attrs.field(default="", kw_only=True)
    is_resumed: bool = attrs.field(default=False, kw_only=True)

    @request_id.validator
    def _check_request_id(self, _: object, value: str | None) -> None:
        if value is not None:
            check_request_id(value)

    @priority.validator
    def _check_priority(self, _: object, value: int) -> None:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not -_INT64_MAX - 1 <= value <= _INT64_MAX:
            raise InvalidRequest(
                f"priority must be an integer from -2**63 to 2**63 - 1, got {shown(value)}",
                "priority",
            )

    @cache_salt.validator
    def _check_cache_salt(self, _: object, value: str | None) -> None:
        if value is not None and not (is_text(value) and 1 <= len(value) <= MAX_CACHE_SALT):
            raise InvalidRequest(
                f"cache_salt must be a text of 1 to {MAX_CACHE_SALT} characters that UTF-8 can "
                f"encode, got {shown(value)}",
                "cache_salt",
            )

    @model.validator
    def _check_model(self, _: object, value: str | None) -> None:
        if value is not None and not is_text(value):
            raise InvalidRequest(
                f"model must be a text that UTF-8 can encode, got {shown(value)}", "model"
            )

    @lora.validator
    def _check_lora(self, _: object, value: str | None) -> None:
        if value is not None:
            check_adapter_name(value, "lora")

    @lora_digest.validator
    def _check_lora_digest(self, _: object, value: str) -> None:
        if not isinstance(value, str):
            raise InvalidRequest(f"lora_digest must be a text, got {shown(value)}", "lora_digest")

    @is_resumed.validator
    def _check_is_resumed(self, _: object, value: bool) -> None:
        if not isinstance(value, bool):
            raise InvalidRequest(
                f"is_resumed must be True or False, got {shown(value)}", "is_resumed"
            )

    @client.validator
    def _check_client(self, _: object, value: str) -> None:
        if not is_text(value) or len(value) > MAX_CLIENT:
            raise InvalidRequest(
                f"client must be a text of at most {MAX_CLIENT} characters that UTF-8 can encode, "
                f"got {shown(value)}",
                "client",
            )

    def _check_prompt(self, vocab_size: int) -> None:
        token_ids = self.prompt_token_ids
        if not token_ids:
            raise InvalidRequest("the prompt is empty: give at least one token", "prompt")
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            raise InvalidRequest(
                f"token ids of the prompt must be from 0 to {vocab_size - 1}", "prompt"
            )


@attrs.frozen
class GenerateRequest(PromptRequest):
    """A request to continue a prompt. Its other fields and errors are those of `PromptRequest`.

    ``output_token_ids``: what its one sequence has generated before, as when it was parked; it goes
    on after them.
    """

    params: SamplingParams = attrs.field()
    output_token_ids: tuple[int, ...] = attrs.field(
        default=(), converter=_token_ids, kw_only=True, repr=False
    )

    @params.validator
    def _check_params(self, _: object, value: SamplingParams) -> None:
        if not isinstance(value, SamplingParams):
            raise InvalidRequest(f"params must be SamplingParams, got {shown(value)}", "params")

    def check(self, vocab_size: int, max_model_len: int, *, is_pooling: bool) -> None:
        """Raise `InvalidRequest`, naming the field, where this model cannot serve the request."""
        self._check_prompt(vocab_size)
        if is_pooling:
            raise generates_nothing()
        length, params = len(self.prompt_token_ids), self.params
        if length >= max_model_len:
            raise InvalidRequest(
                f"the prompt has {length} tokens and the model's context is {max_model_len}, of "
                "which at least one is needed for the output: shorten the prompt",
                "prompt",
            )
        if params.max_tokens is not None and length + params.max_tokens > max_model_len:
            raise InvalidRequest(
                f"max_tokens {params.max_tokens} and a prompt of {length} tokens exceed the "
                f"model's context of {max_model_len}: lower max_tokens to {max_model_len - length}",
                "max_tokens",
            )
        listed = {
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids,
            "logprob_token_ids": params.logprob_token_ids,
            "bad_words": [token for word in _bad_tokens(params) for token in word],
        }
        for name, token_ids in listed.items():
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                raise InvalidRequest(
                    f"{name} has token ids past the vocabulary of {vocab_size}", name
                )
        self._check_output(vocab_size)

    def _check_output(self, vocab_size: int) -> None:
        output, limit = self.output_token_ids, self.params.max_tokens
        if not output:
            return
        if self.params.num_seqs != 1 or self.params.use_beam_search:
            raise InvalidRequest("only a request for one sequence goes on after tokens", "prompt")
        if max(output) >= vocab_size or (limit is not None and len(output) >= limit):
            raise InvalidRequest(
                f"{len(output)} generated tokens leave none of max_tokens {limit}, or are past the "
                f"vocabulary of {vocab_size}",
                "prompt",
            )


@attrs.frozen
class PoolingRequest(PromptRequest):
    """A request for the embedding of a prompt, or for the score of a pair.

    Its fields and errors are those of `PromptRequest`. The prompt may take all of the context.
    """

    params: ClassVar[SamplingParams] = SamplingParams(max_tokens=1, temperature=0.0)
    output_token_ids: ClassVar[tuple[int, ...]] = ()

    def check(self, vocab_size: int, max_model_len: int, *, is_pooling: bool) -> None:
        """Raise `InvalidRequest`, naming the field, where this model cannot serve the request."""
        self._check_prompt(vocab_size)
        if not is_pooling:
            raise InvalidRequest(
                "this engine has the runner generate and computes no embeddings or scores: start "
                "it with the runner pooling"
            )
        length = len(self.prompt_token_ids)
        if length > max_model_len:
            raise InvalidRequest(
                f"the prompt has {length} tokens and the model's context is {max_model_len}: "
                "shorten the prompt",
                "prompt",
            )


EngineRequest: TypeAlias = GenerateRequest | PoolingRequest
"""A request of either kind."""


def check_is_request(request: object) -> None:
    """Raise `InvalidRequest` for another value."""
    if not isinstance(request, (GenerateRequest, PoolingRequest)):
        raise InvalidRequest(
            "a request must be a GenerateRequest or a PoolingRequest, as in "
            f"GenerateRequest([1, 2, 3], SamplingParams()), got {shown(request)}",
            "request",
        )


def generates_nothing() -> InvalidRequest:
    """The error for a request to generate, of an engine that computes embeddings or scores."""
    return InvalidRequest(
        "this engine has the runner pooling: it computes embeddings or scores and generates "
        "nothing. Call embed or score, or start it with the runner generate",
        "params",
    )
