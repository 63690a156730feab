"""The request bodies: the OpenAI API's fields, and vLLM's extensions.

Types are strict, as in the OpenAI API: ``"temperature": "0.5"`` is an error that names the field.
A field that OpenAI or vLLM defines and this server does not support is rejected (see
`unsupported_fields`). An unknown field is ignored with a debug log line, as in vLLM.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, cast

import attrs
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    SkipValidation,
    model_validator,
)
from typing_extensions import Self

from trencadis.engine import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CACHE_SALT,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
    InvalidRequest,
    RequestFields,
    SamplingParams,
    StructuredOutput,
)
from trencadis.server.api.attrs_fields import derived_field
from trencadis.server.api.characters import Listed, Text, check_characters
from trencadis.server.api.chat_messages import ChatMessage
from trencadis.server.api.structured_output import (
    ResponseFormat,
    Schema,
    StructuredOutputs,
    requested_form,
)
from trencadis.server.api.tools import MAX_TOOLS, FunctionTool, ToolChoice, ToolChoiceField
from trencadis.server.api.unsupported_fields import RequestPart, refuse_unsupported
from trencadis.server.request_ids import REQUEST_ID_PATTERN
from trencadis.server.settings import RESERVED_TEMPLATE_NAMES

MAX_CHOICES = 1024
"""Maximum number of choices (prompts times ``n``) of one request."""

MAX_MESSAGES = 8192
"""Maximum number of messages of one request. Rendering so many takes a thread about a second, and
other prompts wait for it."""

MAX_DOCUMENTS = 1024
"""Maximum number of documents of a conversation."""

_PARAMETERS = attrs.fields_dict(SamplingParams)

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""The older fields of vLLM, and what each is in `StructuredOutput`."""


def _parameter(name: str, *, default: Any = None, low: int | None = None) -> Any:
    """A request field with the range and the description of a sampling parameter.

    ``low``: the least value, if it is another one.
    """
    return derived_field(_PARAMETERS[name], default, low)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _is_bias(token: Any, bias: Any) -> bool:
    is_id = isinstance(token, int) or (token.isdecimal() and len(token) < 10)
    return is_id and isinstance(bias, (int, float)) and not isinstance(bias, bool)


def _logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("must map token ids to numbers")
    if len(value) > MAX_BIASES:
        raise InvalidRequest(f"has {len(value)} entries, at most {MAX_BIASES} may be sent")
    wrong = [f"{token!r}: {bias!r}" for token, bias in value.items() if not _is_bias(token, bias)]
    if wrong:
        raise InvalidRequest(f"must map token ids to numbers, got {', '.join(wrong)[:200]}")
    try:
        return {int(token): float(bias) for token, bias in value.items()}
    except OverflowError:
        raise InvalidRequest("has a number that no float can hold") from None


def _template_arguments(value: dict[str, Any]) -> dict[str, Any]:
    reserved = sorted(RESERVED_TEMPLATE_NAMES & value.keys())
    if reserved:
        raise InvalidRequest(f"may not set {', '.join(reserved)}")
    try:
        check_characters(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise InvalidRequest("is nested too deep") from None
    return value


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_template_arguments)]
"""Arguments of a client for a chat template."""


def as_prompts(value: Any, most: int, noun: str = "prompts") -> list[str | list[int]]:
    """A prompt in any of the API's four forms, as a list of texts and of lists of token ids.

    ``noun`` is what an error calls them. Raises `InvalidRequest` for more than ``most`` of them.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("must be a text, token ids, or a list of texts or of token ids")
    prompts = [value] if type(value[0]) is int else value
    if len(prompts) > most:
        raise InvalidRequest(f"holds {len(prompts)} {noun}, at most {most} may be sent")
    for prompt in prompts:
        _check_prompt(prompt)
    return prompts


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str):
        check_characters(prompt)
    elif not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise InvalidRequest("must be a text, token ids, or a list of texts or of token ids")


def _token_ids(value: Any) -> list[int] | None:
    """Those of one prompt. In Python: pydantic would check each of any number of items."""
    if value is not None and not (
        isinstance(value, list) and all(type(token) is int for token in value)
    ):
        raise InvalidRequest("must be a list of token ids")
    return value


ServiceTier = Literal["auto", "default"]
"""The service tiers of the OpenAI API that ask for nothing but the ordinary one."""

CacheSalt = Annotated[
    Text,
    Field(
        min_length=1,
        max_length=MAX_CACHE_SALT,
        description="Only requests with the same salt share cached prefixes (of the same API key, "
        "under --prefix-cache-per-key). Random and secret, so that no other client can send it.",
    ),
]


Priority = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

RequestId = Annotated[
    str,
    Field(
        pattern=REQUEST_ID_PATTERN,
        description="With which the id of the response ends; the header X-Request-Id wins.",
    ),
]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model is to reason, which its chat template tells it, if it takes that."""


class StreamOptions(BaseModel):
    """``include_usage`` adds a last event with the token counts. ``continuous_usage_stats`` (vLLM)
    adds the counts so far to every event."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestBody(BaseModel):
    """The fields of every request to a model."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    cache_salt: CacheSalt | None = None

    @property
    def engine_fields(self) -> RequestFields:
        """The fields that the engine's requests have under the same names, where they are set."""
        # Not what a client calls so: extra fields are attributes, too.
        names = RequestFields.__annotations__.keys() & type(self).model_fields.keys()
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        return cast(RequestFields, fields)


class SamplingFields(RequestBody):
    """The fields of the Responses API, completions and chat completions that shape an answer."""

    priority: Priority | None = None
    temperature: float | None = _parameter("temperature")
    top_p: float | None = _parameter("top_p")
    top_k: int | None = _parameter("top_k")
    min_p: float | None = _parameter("min_p")
    seed: int | None = _parameter("seed")
    presence_penalty: float | None = _parameter("presence_penalty")
    frequency_penalty: float | None = _parameter("frequency_penalty")
    repetition_penalty: float | None = _parameter("repetition_penalty")
    logit_bias: Annotated[
        dict[int, float] | None, PlainValidator(_logit_bias, dict[str, float] | None)
    ] = _parameter("logit_bias")
    stop: Annotated[Listed[Text] | None, BeforeValidator(_as_list, str | list[str] | None)] = (
        _parameter("stop")
    )
    stop_token_ids: (
        Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None
    ) = _parameter("stop_token_ids")
    ignore_eos: bool | None = _parameter("ignore_eos")
    include_stop_str_in_output: bool | None = _parameter("include_stop_str_in_output")
    skip_special_tokens: bool | None = _parameter("skip_special_tokens")
    structured_outputs: StructuredOutputs | None = None


class GenerationRequest(SamplingFields):
    """The fields that completions and chat completions share.

    The fields of `SamplingParams` have its names, ranges and descriptions. Null means its default.
    """

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: RequestId | None = None
    # sampling parameters
    n: int | None = _parameter("n")
    max_tokens: int | None = _parameter("max_tokens")
    min_tokens: int | None = _parameter("min_tokens")
    prompt_logprobs: int | None = _parameter("prompt_logprobs")
    allowed_token_ids: (
        Annotated[list[int], Field(fail_fast=True, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = _parameter("allowed_token_ids")
    logprob_token_ids: (
        Annotated[list[int], Field(fail_fast=True, max_length=MAX_LOGPROB_TOKEN_IDS)] | None
    ) = _parameter("logprob_token_ids")
    bad_words: Annotated[list[Text], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = (
        _parameter("bad_words")
    )
    use_beam_search: bool | None = _parameter("use_beam_search")
    length_penalty: float | None = _parameter("length_penalty")
    early_stopping: SkipValidation[bool | Literal["never"] | None] = _parameter("early_stopping")
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=2**31 - 1,
        description="Of a longer prompt so many last tokens are kept; -1: what the context has "
        "beside max_tokens. By default a prompt beyond the context is an error.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None,
        description="Where truncate_prompt_tokens cuts: left, the default, or right.",
    )
    # what the answers carry besides
    return_token_ids: bool | None = Field(
        default=None,
        description="Whether the response has the token ids of the prompt and of each answer; in a "
        "stream the prompt's come with the first chunk.",
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None,
        description="Whether the tokens of log-probabilities are written as token_id:N, since "
        "several tokens may have the same text.",
    )
    # the form of the answers
    response_format: ResponseFormat | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None
    _structured_output: StructuredOutput | None = PrivateAttr(default=None)
    _structured_output_field: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _find_structured_output(self) -> Self:
        forms = {field: {name: getattr(self, field)} for field, name in _GUIDED.items()}
        forms = {field: form for field, form in forms.items() if None not in form.values()}
        if self.response_format is not None and (form := self.response_format.form()) is not None:
            forms["response_format"] = form
        if self.structured_outputs is not None:
            forms["structured_outputs"] = self.structured_outputs.form()
        self._structured_output_field, self._structured_output = requested_form(forms)
        return self

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        refuse_unsupported(self.model_extra or {})
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs cannot be streamed: leave stream out", "prompt_logprobs"
            )
        return self

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens is 0: leave at least one token", "truncate_prompt_tokens"
            )
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidRequest(
                "truncation_side needs truncate_prompt_tokens, which says how much is kept",
                "truncation_side",
            )
        return self

    def truncated(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """The tokens of a prompt that are kept, for a model with this context.

        Raises `InvalidRequest` where ``truncate_prompt_tokens`` is above it.
        """
        most = self.truncate_prompt_tokens
        if most is None:
            return token_ids
        check_truncation(most, max_model_len)
        if most == -1:
            most = max(1, max_model_len - (self.requested_tokens or 1))
        return token_ids[:most] if self.truncation_side == "right" else token_ids[-most:]

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def max_tokens_field(self) -> str:
        """The field that limits the output."""
        return "max_tokens"

    @property
    def requested_tokens(self) -> int | None:
        """Maximum number of output tokens; None means the rest of the context."""
        value: int | None = getattr(self, self.max_tokens_field)
        return value

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The form of the answers that the request asks for."""
        return self._structured_output

    @property
    def structured_output_field(self) -> str:
        """The field that asks for a form of the answer; "" without any."""
        return self._structured_output_field

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives reported per position; None means no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives reported per token of the prompt; None means no log-probabilities."""
        return self.prompt_logprobs

    @property
    def echoes(self) -> bool:
        """Whether each choice begins with the prompt."""
        return False

    @property
    def drops_output(self) -> bool:
        """Whether the response has the prompt alone."""
        return False

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with an event of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_throughout(self) -> bool:
        """Whether every event of a stream carries the token counts so far."""
        return self.usage_at_end and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    def sets_max_tokens(self) -> bool:
        """Whether the request limits its output itself."""
        field = self.max_tokens_field
        return field in self.model_fields_set and getattr(self, field) is not None

    def sampling_params(
        self, max_tokens: int | None, defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """The sampling parameters of this request, with another ``max_tokens``.

        ``defaults`` hold for parameters that the request does not set. Beam search has none: it
        draws no tokens. Raises `InvalidRequest` on a value out of range.
        """
        given = {
            name: value
            for name in _PARAMETERS.keys() & type(self).model_fields.keys()
            if (value := getattr(self, name)) is not None
        }
        given = {**({} if self.use_beam_search else defaults or {}), **given}
        given |= {"max_tokens": max_tokens, "logprobs": self.num_logprobs}
        given["prompt_logprobs"] = self.num_prompt_logprobs
        return SamplingParams(**given, structured_output=self._structured_output)


def check_truncation(num_kept: int, max_model_len: int) -> None:
    """Raise `InvalidRequest` where ``truncate_prompt_tokens`` cuts nothing that is too long."""
    if num_kept > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens {num_kept} is above the {max_model_len} tokens of this "
            "model's context. Please request a smaller truncation size.",
            "truncate_prompt_tokens",
        )


class KvTransferParams(RequestPart):
    """vLLM's parameters of a prefill that another server computes, as far as they concern prompts.

    ``prompt_token_ids``: the prompt, as the other server returned it. The conversation is not
    rendered then.
    """

    prompt_token_ids: Annotated[list[int] | None, PlainValidator(_token_ids, list[int] | None)] = (
        None
    )


class ChatCompletionRequest(GenerationRequest):
    """``POST /v1/chat/completions``. ``max_completion_tokens`` wins over ``max_tokens``."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: int | None = _parameter("max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = _parameter("logprobs")
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    service_tier: ServiceTier | None = None
    reasoning_effort: ReasoningEffort | None = None
    # vLLM extensions
    include_reasoning: bool | None = None
    echo: bool | None = Field(
        default=None,
        description="Whether the answer begins with the last message, if that is the assistant's.",
    )
    documents: Annotated[list[dict[Text, Text]], Field(max_length=MAX_DOCUMENTS)] | None = Field(
        default=None,
        description="Texts for chat templates that take documents, each with title and text.",
    )
    add_special_tokens: bool | None = Field(
        default=None,
        description="Whether the tokens that begin and end a text are added to those of the "
        "chat template.",
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    return_prompt_text: bool | None = Field(
        default=None,
        description="Whether the response has the prompt that the chat template made; in a stream "
        "it comes with the first chunk.",
    )
    kv_transfer_params: KvTransferParams | None = None

    @property
    def given_prompt(self) -> list[int] | None:
        """The tokens of the prompt, where a client sends them instead of having it rendered."""
        transfer = self.kv_transfer_params
        return None if transfer is None else transfer.prompt_token_ids

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def structured_output_field(self) -> str:
        return self._structured_output_field or ("tools" if self.tools else "")

    @property
    def template_arguments(self) -> dict[str, Any] | None:
        """What the chat template gets besides messages and tools; None for nothing.

        As in vLLM, an effort also switches the reasoning of a template that has
        ``enable_thinking`` on, or off for ``none``. ``chat_template_kwargs`` win.
        """
        arguments: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
            arguments["enable_thinking"] = self.reasoning_effort != "none"
        if self.documents:
            arguments["documents"] = self.documents
        return arguments | (self.chat_template_kwargs or {}) or None

    @property
    def echoed(self) -> str:
        """The text with which an answer begins under ``echo``."""
        last = self.messages[-1]
        return last.content or "" if self.echo and last.role == "assistant" else ""

    @property
    def choice_of_tools(self) -> ToolChoice:
        """Whether the model may call tools: by default, if there are any."""
        if not self.tools:
            return ToolChoice("none")
        return self.tool_choice or ToolChoice("auto")

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        for name, count in Counter(names).items():
            if count > 1:
                raise InvalidRequest(f"tools has {name!r} more than once", "tools")
        choice = self.tool_choice
        if choice is None:
            return self
        if (choice.mode == "required" and not names) or (
            choice.mode == "auto" and self.tools is None
        ):
            raise InvalidRequest("tool_choice needs tools", "tool_choice")
        if choice.name is not None and choice.name not in names:
            raise InvalidRequest(f"tool_choice names {choice.name!r}, not in tools", "tool_choice")
        # Clients send a response_format with every turn: it concerns answers without calls.
        if choice.mode == "required" and self._structured_output_field not in (
            "",
            "response_format",
        ):
            raise InvalidRequest(
                f"{self._structured_output_field} and a tool_choice that demands a call exclude "
                "each other",
                "tool_choice",
            )
        return self

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        return self


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``. ``max_tokens`` null means the rest of the context, 0 with ``echo``
    the prompt alone."""

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(
            partial(as_prompts, most=MAX_CHOICES), str | list[str] | list[int] | list[list[int]]
        ),
    ]
    max_tokens: int | None = _parameter(
        "max_tokens", default=_PARAMETERS["max_tokens"].default, low=0
    )
    echo: bool | None = None
    logprobs: int | None = _parameter("logprobs")
    best_of: int | None = _parameter("best_of")
    # vLLM extensions
    add_special_tokens: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def drops_output(self) -> bool:
        return self.max_tokens == 0

    @property
    def requested_tokens(self) -> int | None:
        # The model computes one token after a prompt, if it computes the prompt.
        return 1 if self.drops_output else self.max_tokens

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        generated = self.best_of or self.num_choices
        if self.stream and generated > self.num_choices and not self.use_beam_search:
            raise InvalidRequest(
                f"the best of {generated} answers cannot be streamed: it is known only in the end",
                "stream",
            )
        if self.drops_output and not self.echo:
            raise InvalidRequest("max_tokens 0 needs echo to be true", "max_tokens")
        if self.drops_output and self.logprob_token_ids:
            raise InvalidRequest(
                "logprob_token_ids are reported for generated tokens: set max_tokens above 0",
                "logprob_token_ids",
            )
        if len(self.prompt) * max(generated, self.num_choices) > MAX_CHOICES:
            field = "n" if self.best_of is None else "best_of"
            raise InvalidRequest(
                f"{len(self.prompt)} prompts with {field} {generated} ask for more than "
                f"{MAX_CHOICES} answers",
                field,
            )
        return self
