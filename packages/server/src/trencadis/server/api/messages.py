"""``POST /v1/messages``: the fields of Anthropic's Messages API, and its response.

Fields as in https://docs.anthropic.com/en/api/messages; those that this server does not support
are rejected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import attrs
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import Self

from trencadis.engine import InvalidRequest, SamplingParams
from trencadis.server.api.attrs_fields import derived_field
from trencadis.server.api.characters import Listed, Text, check_characters
from trencadis.server.api.chat_messages import ChatMessage, joined_text
from trencadis.server.api.protocol import MAX_MESSAGES, ChatCompletionRequest, RequestBody
from trencadis.server.api.tools import (
    MAX_TOOLS,
    CalledFunction,
    EarlierCall,
    FunctionDefinition,
    FunctionTool,
    ObjectSchema,
    ToolChoice,
    ToolName,
)
from trencadis.server.api.translation import chat_request
from trencadis.server.api.unsupported_fields import RequestPart, refuse_undeclared

CLIENT_FIELDS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""The names of chat fields in this API, where they differ."""

_PARAMETERS = attrs.fields_dict(SamplingParams)
_TEXT_KEYS = {"text": "text"}
_REQUIRED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""The fields that a block of each type must have."""

_ROLES = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}
"""The types of blocks that only messages of one role have."""

_WITHOUT_EFFECT = ("metadata", "cache_control")
"""Fields that do not affect the output. Prompts are always cached."""

_ACCEPTED = {"service_tier": ("auto", "standard_only"), "speed": ("standard",)}
"""Unsupported fields, each with the values that have no effect."""

JoinedText = Annotated[
    Text,
    BeforeValidator(lambda value: joined_text(value, _TEXT_KEYS), str | list[dict[str, Any]]),
]
"""A text, or a list of blocks of text."""


class ContentBlock(RequestPart):
    """A part of a message: text, reasoning, a tool call, or the result of one."""

    ignored = (*_WITHOUT_EFFECT, "signature")

    type: Literal["text", "thinking", "tool_use", "tool_result"]
    text: Text | None = None
    thinking: Text | None = None
    id: Text | None = None
    name: Text | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Text | None = None
    content: JoinedText | None = None
    is_error: bool | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        for name in _REQUIRED[self.type]:
            if getattr(self, name) is None:
                raise InvalidRequest(f"a block of type {self.type!r} needs {name}")
        if self.input is not None:
            _json_text(self.input)
        return self

    def as_call(self) -> EarlierCall:
        """The call of a block ``tool_use``."""
        arguments = _json_text(self.input or {})
        return EarlierCall(
            id=self.id, function=CalledFunction(name=self.name or "", arguments=arguments)
        )


def _json_text(value: dict[str, Any]) -> str:
    try:
        return check_characters(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise InvalidRequest("input is nested too deep") from None


def _blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class InputMessage(RequestPart):
    """A turn of the conversation. A last turn of the assistant is continued."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[ContentBlock],
        Field(fail_fast=True),
        BeforeValidator(_blocks, str | list[ContentBlock]),
    ]

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        for block in self.content:
            if _ROLES.get(block.type, self.role) != self.role:
                raise InvalidRequest(
                    f"a message of role {self.role!r} has no block of type {block.type!r}"
                )
        return self

    def for_chat(self) -> Iterator[ChatMessage]:
        """The messages of a chat request: results of tools are messages of their own there."""
        if self.role == "assistant":
            yield self._answer()
            return
        texts: list[str] = []
        for block in self.content:
            if block.type == "text":
                texts.append(block.text or "")
                continue
            if texts:
                yield ChatMessage(role=self.role, content="\n".join(texts))
                texts = []
            mark = "Error: " if block.is_error else ""
            result = mark + (block.content or "")
            yield ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=result)
        if texts or not self.content:
            yield ChatMessage(role=self.role, content="\n".join(texts))

    def _answer(self) -> ChatMessage:
        texts = [block.text or "" for block in self.content if block.type == "text"]
        thoughts = [block.thinking or "" for block in self.content if block.type == "thinking"]
        calls = [block.as_call() for block in self.content if block.type == "tool_use"]
        return ChatMessage(
            role="assistant",
            content="\n".join(texts),
            reasoning="\n".join(thoughts) if thoughts else None,
            tool_calls=calls or None,
        )


class MessagesTool(RequestPart):
    """A tool that the client runs. Other tools run at Anthropic, and are rejected."""

    ignored = (*_WITHOUT_EFFECT, "eager_input_streaming")

    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: ObjectSchema
    strict: bool | None = None

    def for_chat(self) -> FunctionTool:
        """The tool of a chat request."""
        function = FunctionDefinition(
            name=self.name, description=self.description, parameters=self.input_schema
        )
        return FunctionTool(type="function", function=function)


class MessagesToolChoice(RequestPart):
    """Whether the model may call tools (``auto``), has to (``any``, ``tool``), or must not."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise InvalidRequest("names a tool if its type is 'tool', and only then")
        return self

    def for_chat(self) -> ToolChoice:
        """The choice of a chat request."""
        if self.type in ("auto", "none"):
            return ToolChoice(self.type)
        return ToolChoice("required", self.name)


class Thinking(RequestPart):
    """Whether the reasoning is part of the answer, unabridged also where it may be summarized.

    ``budget_tokens`` is a target, which is not enforced.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_shown(self) -> bool:
        """Whether the reasoning is part of the answer."""
        return self.type != "disabled" and self.display != "omitted"


class OutputFormat(RequestPart):
    """The form of the answer: JSON that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestPart):
    """How the answer is to be, and how much the model is to reason for it."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(BaseModel):
    """``POST /v1/messages/count_tokens``: the fields that the prompt is made of."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    messages: Annotated[
        list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    system: JoinedText | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        refuse_undeclared(self.model_extra, _WITHOUT_EFFECT, accepted=_ACCEPTED)
        return self

    def chat(self, **fields: Any) -> ChatCompletionRequest:
        """This request as a chat request, with more ``fields``. Raises `InvalidRequest`."""
        continues = self.messages[-1].role == "assistant" and not any(
            block.type == "tool_use" for block in self.messages[-1].content
        )
        choice = self.tool_choice
        config = self.output_config or OutputConfig()
        form = config.format
        thinking = self.thinking
        is_off = thinking is not None and thinking.type == "disabled"
        return chat_request(
            model=self.model,
            messages=self._messages(),
            continue_final_message=continues or None,
            tools=None if self.tools is None else [tool.for_chat() for tool in self.tools],
            tool_choice=None if choice is None else choice.for_chat(),
            parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
            response_format=None
            if form is None
            else {"type": "json_schema", "json_schema": {"schema": form.json_schema}},
            reasoning_effort=config.effort,
            include_reasoning=thinking is not None and thinking.is_shown,
            chat_template_kwargs={"enable_thinking": False} if is_off else None,
            **fields,
        )

    def _messages(self) -> Sequence[ChatMessage]:
        messages = [message for turn in self.messages for message in turn.for_chat()]
        if self.system is not None:
            messages.insert(0, ChatMessage(role="system", content=self.system))
        return messages


class MessagesRequest(CountTokensRequest, RequestBody):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, derived_field(_PARAMETERS["max_tokens"], ...)]
    stop_sequences: Listed[Text] | None = derived_field(_PARAMETERS["stop"], None)
    temperature: float | None = derived_field(_PARAMETERS["temperature"], None)
    top_p: float | None = derived_field(_PARAMETERS["top_p"], None)
    top_k: int | None = derived_field(_PARAMETERS["top_k"], None)
    stream: bool | None = None

    def chat(self, **fields: Any) -> ChatCompletionRequest:
        """This request as a chat request. Raises `InvalidRequest`."""
        return super().chat(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stream=self.stream,
            **self.engine_fields,
            **fields,
        )


# the response


class TokenCount(BaseModel):
    """The tokens of a prompt."""

    input_tokens: int


class TokenDetails(BaseModel):
    """Of the output tokens: those of the reasoning, whether it is part of the answer or not."""

    thinking_tokens: int


class MessagesUsage(BaseModel):
    """Token counts. The prompt has ``input_tokens`` and ``cache_read_input_tokens`` together."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: TokenDetails


class OutputBlock(BaseModel):
    """A part of the answer: ``text``, ``thinking`` with a blank signature, or ``tool_use``."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "thinking", "tool_use"]


class MessageObject(BaseModel):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage
