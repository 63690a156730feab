"""``POST /v1/responses``: the fields of OpenAI's Responses API, and its response.

Fields as in
https://platform.openai.com/docs/api-reference/responses; those that this server does not support
are rejected.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import attrs
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)
from typing_extensions import Self

from trencadis.engine import InvalidRequest, SamplingParams
from trencadis.server.api.attrs_fields import derived_field
from trencadis.server.api.characters import Text, check_characters
from trencadis.server.api.chat_messages import ChatMessage, joined_text
from trencadis.server.api.protocol import (
    MAX_MESSAGES,
    ChatCompletionRequest,
    ReasoningEffort,
    SamplingFields,
    ServiceTier,
    TemplateArguments,
)
from trencadis.server.api.tools import (
    MAX_TOOLS,
    CalledFunction,
    EarlierCall,
    FunctionDefinition,
    FunctionTool,
    ObjectSchema,
    ToolChoice,
    ToolName,
    parsed_arguments,
)
from trencadis.server.api.translation import chat_request
from trencadis.server.api.unsupported_fields import RequestPart, refuse_undeclared

CLIENT_FIELDS = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""The names of chat fields in this API, where they differ."""

_PARAMETERS = attrs.fields_dict(SamplingParams)
_TEXT_KEYS = dict.fromkeys(("input_text", "output_text", "text", "reasoning_text"), "text")
_TEXT_KEYS |= {"summary_text": "text", "refusal": "refusal"}

_REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""The fields that an item of each type must have."""

_WITHOUT_EFFECT = (
    *("user", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
)
"""Fields that do not affect the output of a text model."""

_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled",),
    "stream_options": ({"include_obfuscation": False},),
}
"""Unsupported fields, each with the values that have no effect."""

MAX_DEPTH = 128
"""How deep a schema may be nested. The response repeats schemas, and pydantic writes at most 255
levels."""


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema.

    Raises `InvalidRequest` if it is nested deeper than `MAX_DEPTH` or is not JSON in UTF-8.
    """
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            part
            for value in level
            for part in (value.values() if isinstance(value, dict) else value)
            if isinstance(part, (dict, list))
        ]
        if not level:
            try:
                check_characters(json.dumps(schema, ensure_ascii=False, allow_nan=False))
            except ValueError as error:
                raise InvalidRequest(f"is not JSON: {error}") from error
            return schema
    raise InvalidRequest(f"is nested more than {MAX_DEPTH} deep")


JoinedText = Annotated[
    Text,
    BeforeValidator(lambda value: joined_text(value, _TEXT_KEYS), str | list[dict[str, Any]]),
]
"""A text, or a list of text parts."""


class InputItem(RequestPart):
    """One item of the conversation: a message, a tool call, its output, or reasoning.

    The items of an earlier response's ``output`` are accepted unchanged.
    """

    ignored = ("id", "status", "phase", "encrypted_content")

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: JoinedText | None = None
    call_id: Text | None = None
    name: Text | None = None
    namespace: Text | None = None
    arguments: Text | None = None
    output: JoinedText | None = None
    summary: JoinedText | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        for name in _REQUIRED[self.type]:
            if getattr(self, name) is None:
                raise InvalidRequest(f"an item of type {self.type!r} needs {name}")
        if self.arguments is not None:
            parsed_arguments(self.arguments)
        return self


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


@attrs.frozen
class NamespacedName:
    """The name of a function in its namespace, None for none, as calls tell them apart."""

    name: str
    namespace: str | None = None

    @property
    def flat(self) -> str:
        """The name that the model sees, as of vLLM."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class ResponsesTool(RequestPart):
    """A function that the model may call, or a namespace of functions.

    Other tools run at OpenAI, and are rejected. ``strict`` changes nothing, as in
    `FunctionDefinition`.
    """

    type: Literal["function", "namespace"]
    name: ToolName
    description: Text | None = None
    parameters: Annotated[ObjectSchema, AfterValidator(_bounded)] | None = None
    strict: bool | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check_namespace(self) -> Self:
        is_namespace = self.type == "namespace"
        if is_namespace and not self.tools:
            raise InvalidRequest("a namespace needs tools: functions")
        if any(tool.type == "namespace" for tool in self.tools or ()):
            raise InvalidRequest("tools of a namespace must be functions")
        given = {"tools": self.tools} if not is_namespace else {"parameters": self.parameters}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise InvalidRequest(f"a {self.type} has no {wrong[0]}")
        return self

    def functions(self) -> Iterable[tuple[NamespacedName, FunctionTool]]:
        """The tools of a chat request; one of a namespace has its description if it lacks one."""
        for tool in self.tools or [self]:
            is_part = tool is not self
            name = NamespacedName(tool.name, self.name if is_part else None)
            function = FunctionDefinition(
                name=name.flat,
                description=tool.description or self.description,
                parameters=tool.parameters,
            )
            yield name, FunctionTool(type="function", function=function)

    def as_sent(self) -> dict[str, Any]:
        """The tool as responses repeat it."""
        nested = {"tools": [tool.as_sent() for tool in self.tools]} if self.tools else {}
        return self.model_dump(exclude={"tools"}) | nested


def _tool_choice(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if isinstance(value, dict) and value.get("type") == "function":
        name = value.get("name")
        if isinstance(name, str):
            others = {key: value[key] for key in value if key not in ("type", "name")}
            refuse_undeclared(others, nested=True)
            return ToolChoice("required", name)
    raise InvalidRequest(
        'must be "none", "auto", "required" or {"type": "function", "name": …}, '
        f"got {reprlib.repr(value)}"
    )


class TextFormat(RequestPart):
    """The form of the answer. ``strict`` changes nothing: an answer always has this form."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    json_schema: Annotated[dict[str, Any], AfterValidator(_bounded)] | None = Field(
        default=None, alias="schema"
    )
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise InvalidRequest("needs schema, as its type says")
        if self.type != "json_schema" and self.json_schema is not None:
            raise InvalidRequest(f"has a schema, which type {self.type!r} does not take")
        return self

    def for_chat(self) -> dict[str, Any]:
        """The ``response_format`` of a chat request."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": "json_schema", "json_schema": {"schema": self.json_schema}}


class TextConfig(BaseModel):
    """How the text of the answer is to be."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: TextFormat | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        refuse_undeclared(self.model_extra, accepted={"verbosity": ("medium",)}, nested=True)
        return self


class ReasoningConfig(RequestPart):
    """OpenAI's settings of reasoning. There are no summaries: the reasoning is answered whole."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
"""What a response can have besides: log-probabilities of its text. Reasoning has it anyway, and
unencrypted."""


class ResponsesRequest(SamplingFields):
    """``POST /v1/responses``. ``store`` and what needs it: where the server stores responses."""

    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(_items, str | list[InputItem]),
    ]
    instructions: Text | None = None
    max_output_tokens: int | None = derived_field(_PARAMETERS["max_tokens"], None)
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[
        ToolChoice | None, PlainValidator(_tool_choice, str | dict[str, Any] | None)
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: TemplateArguments | None = None
    include: list[Included] | None = Field(default=None, max_length=16)
    top_logprobs: int | None = derived_field(_PARAMETERS["logprobs"], None)
    stream: bool | None = None
    metadata: dict[Text, Text] | None = None
    service_tier: ServiceTier | None = None
    include_reasoning: bool | None = None
    enable_response_messages: bool | None = Field(
        default=None,
        description="Whether the response has the prompt and the answer as texts and token ids.",
    )
    store: bool | None = None
    previous_response_id: Text | None = None
    background: bool | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        if self.top_logprobs and not self.has_logprobs:
            raise InvalidRequest(
                'top_logprobs needs "message.output_text.logprobs" in include', "top_logprobs"
            )
        if self.background and self.store is False:
            raise InvalidRequest("background can only be used when `store` is true", "background")
        if self.background and self.stream:
            raise InvalidRequest(
                "background and stream exclude each other: leave stream out, and ask for the "
                "response by its id",
                "stream",
            )
        refuse_undeclared(self.model_extra, _WITHOUT_EFFECT, accepted=_ACCEPTED)
        return self

    def check_store(self, *, stores: bool) -> None:
        """Raise `InvalidRequest` for what needs stored responses on a server without them."""
        for name in ("background", "previous_response_id"):
            if getattr(self, name) and not stores:
                raise InvalidRequest(
                    f"{name} needs stored responses: start the server with "
                    "VLLM_ENABLE_RESPONSES_API_STORE=1, or leave it out",
                    name,
                )

    def continuing(self, conversation: bytes) -> ResponsesRequest:
        """This request after the items of a stored conversation. Raises `InvalidRequest`."""
        earlier = [InputItem.model_validate(item) for item in json.loads(conversation)]
        if len(earlier) + len(self.input) > MAX_MESSAGES:
            raise InvalidRequest(
                f"the stored conversation has {len(earlier)} items, with those of input at most "
                f"{MAX_MESSAGES} may be sent: begin a new one",
                "previous_response_id",
            )
        return self.model_copy(update={"input": [*earlier, *self.input]})

    def conversation(self) -> bytes:
        """The items of the input as a JSON list."""
        items = (item.model_dump_json(exclude_none=True) for item in self.input)
        return f"[{','.join(items)}]".encode()

    @property
    def has_logprobs(self) -> bool:
        """Whether the response has the log-probabilities of its text."""
        return "message.output_text.logprobs" in (self.include or ())

    @property
    def function_names(self) -> dict[str, NamespacedName]:
        """The names of the tools, by those that the model sees."""
        names = (name for tool in self.tools or () for name, _ in tool.functions())
        return {name.flat: name for name in names}

    def _chosen_tool(self) -> ToolChoice | None:
        """The choice with the name that the model sees, which clients may leave to the namespace.

        Raises `InvalidRequest` for a name that several namespaces have.
        """
        choice, names = self.tool_choice, self.function_names
        if choice is None or choice.name is None or choice.name in names:
            return choice
        flat = [flat for flat, name in names.items() if name.name == choice.name]
        if len(flat) > 1:
            raise InvalidRequest(
                f"tool_choice names {choice.name!r}, which several namespaces have: name one of "
                f"{', '.join(flat)}",
                "tool_choice",
            )
        return ToolChoice(choice.mode, flat[0]) if flat else choice

    def chat(self) -> ChatCompletionRequest:
        """This request as a chat request. Raises `InvalidRequest`."""
        text_format = self.text.format if self.text else None
        functions = [function for tool in self.tools or () for _, function in tool.functions()]
        return chat_request(
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.has_logprobs or None,
            top_logprobs=self.top_logprobs,
            tools=None if self.tools is None else functions,
            tool_choice=self._chosen_tool(),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=None if text_format is None else text_format.for_chat(),
            stream=self.stream,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            chat_template_kwargs=self.chat_template_kwargs,
            include_reasoning=self.include_reasoning,
            return_prompt_text=self.enable_response_messages,
            **{name: getattr(self, name) for name in SamplingFields.model_fields},
        )

    def _messages(self) -> list[ChatMessage]:
        messages = list(_messages_of(self.input))
        if self.instructions is not None:
            messages.insert(0, ChatMessage(role="system", content=self.instructions))
        return messages


def _messages_of(items: Iterable[InputItem]) -> Iterable[ChatMessage]:
    """The messages of a conversation.

    Reasoning, text and calls of an answer are several items here, and one message in chat.
    """
    answer: dict[str, Any] = {}
    for item in items:
        is_text = item.type == "message" and item.role == "assistant"
        is_answer = is_text or item.type in ("reasoning", "function_call")
        begins_answer = (item.type == "reasoning" and answer) or (
            is_text and answer.keys() & {"content", "tool_calls"}
        )
        if answer and (begins_answer or not is_answer):
            yield _assistant(answer)
            answer = {}
        if item.type == "function_call":
            name = NamespacedName(item.name or "", item.namespace).flat
            function = CalledFunction(name=name, arguments=item.arguments or "{}")
            answer.setdefault("tool_calls", []).append(
                EarlierCall(id=item.call_id, function=function)
            )
        elif item.type == "reasoning":
            answer["reasoning"] = item.content or item.summary or ""
        elif is_text:
            answer["content"] = item.content
        elif item.type == "function_call_output":
            yield ChatMessage(role="tool", tool_call_id=item.call_id, content=item.output)
        else:
            yield ChatMessage(role=item.role or "user", content=item.content)
    if answer:
        yield _assistant(answer)


def _assistant(answer: dict[str, Any]) -> ChatMessage:
    return ChatMessage(role="assistant", **({"content": ""} | answer))


# the response

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """Text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[dict[str, Any]] = []


class ReasoningText(BaseModel):
    """Text of the reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(BaseModel):
    """Text for the reader."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(BaseModel):
    """What the model wrote before its answer. There are no summaries."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    summary: list[dict[str, Any]] = []
    content: list[ReasoningText]
    status: ItemStatus


class FunctionCallItem(BaseModel):
    """A tool call. ``arguments`` is JSON as the model wrote it.

    ``namespace``: that of the tool, if it has one.
    """

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(BaseModel):
    """``cached_tokens``: prefix hits. Writing to the cache costs nothing here."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """Of the output tokens."""

    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why an answer was cut."""

    reason: Literal["max_output_tokens"]


class RawMessage(BaseModel):
    """What the model read or wrote, as vLLM calls it: text and token ids, which tell more."""

    type: Literal["raw_message_tokens"] = "raw_message_tokens"
    message: str
    tokens: list[int]


class ResponseError(BaseModel):
    """Why there is no complete answer."""

    code: str
    message: str


class ResponseObject(BaseModel):
    """The response. Fields of the request are repeated.

    ``store``: whether it is stored; None while it is made, before its size is known.
    ``input_messages`` and ``output_messages``: with ``enable_response_messages``, of one that has
    ended.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    background: bool = False
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: dict[str, Any]
    service_tier: Literal["default"] | None = None
    store: bool | None = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    input_messages: list[RawMessage] | None = None
    output_messages: list[RawMessage] | None = None
