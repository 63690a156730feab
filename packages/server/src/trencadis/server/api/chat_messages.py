"""Chat messages: from the API's forms to a role and a text, which chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from trencadis.engine import InvalidRequest
from trencadis.server.api.characters import Listed, Text
from trencadis.server.api.tools import EarlierCall

_UNSUPPORTED = ("function_call", "audio")
"""Fields of a message that are not passed to the chat template."""

_TEXT_KEYS = {"text": "text", "refusal": "refusal"}
"""The types of parts that hold text, each with the name of its text."""


def joined_text(content: Any, kinds: Mapping[str, str] = _TEXT_KEYS) -> Any:
    """A list of text parts as one text, joined by newlines as in vLLM; other values unchanged.

    ``kinds``: the types of parts that hold text, each with the name of its text. Raises
    `InvalidRequest` for a part of another type.
    """
    if not isinstance(content, list):
        return content
    return "\n".join(_part_text(position, part, kinds) for position, part in enumerate(content))


def _part_text(position: int, part: Any, kinds: Mapping[str, str]) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"content part {position} must be an object with a type")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidRequest(f"content part {position} is of type {kind!r}: only text is supported")
    text = part.get(kinds[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"content part {position} has no string under {kinds[kind]!r}")
    return text


def _content_or_answer(content: str | None, info: ValidationInfo) -> str | None:
    # An answer that was cut may be without text and without calls: reasoning alone, or nothing.
    if content is None and info.data.get("role") not in ("assistant", None):
        raise PydanticCustomError("missing", "only a message of the assistant may lack content")
    return content


class ChatMessage(BaseModel):
    """One message of a conversation. ``developer`` is OpenAI's newer name for ``system``.

    Roles that OpenAI does not have reach the chat template unchanged, as in vLLM.

    A message of the assistant may have ``tool_calls``, and the reasoning of its answer; a message
    of a ``tool`` answers the call ``tool_call_id``.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    tool_calls: Listed[EarlierCall] | None = None
    content: Annotated[
        Text | None,
        BeforeValidator(joined_text, str | list[dict[str, Any]] | None),
        AfterValidator(_content_or_answer),
    ] = Field(default=None, validate_default=True)
    name: Text | None = None
    tool_call_id: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        for name in _UNSUPPORTED:
            if (self.model_extra or {}).get(name):
                raise InvalidRequest(f"{name} in a message is not supported")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"a message of role {self.role!r} has no tool_calls")
        return self

    def for_template(
        self,
        *,
        text_arguments: bool = False,
        has_thinking: bool = False,
        has_thinking_alone: bool = False,
    ) -> dict[str, Any]:
        """The message as the chat template takes it; see `TemplateTraits`.

        Missing content is empty: many templates look for a tag in it, or join it with their text.
        """
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template(text_arguments) for call in self.tool_calls]
        reasoning = self.reasoning_content or self.reasoning
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": reasoning,
        }
        if has_thinking and self.tool_calls and reasoning:
            message["thinking"] = reasoning
            if has_thinking_alone:
                message["content"] = ""
        return message | {name: text for name, text in optional.items() if text is not None}


def messages_for_template(
    messages: Sequence[ChatMessage],
    *,
    text_arguments: bool = False,
    has_thinking: bool = False,
    has_thinking_alone: bool = False,
) -> list[dict[str, Any]]:
    """The messages as the chat template takes them; see `TemplateTraits`.

    A tool's message gets the name of the tool, which some templates need and OpenAI's API leaves
    out: that of the call it answers.
    """
    names = {call.id: call.function.name for m in messages for call in m.tool_calls or ()}
    rendered = []
    for message in messages:
        fields = message.for_template(
            text_arguments=text_arguments,
            has_thinking=has_thinking,
            has_thinking_alone=has_thinking_alone,
        )
        if message.role == "tool" and message.tool_call_id in names:
            fields.setdefault("name", names[message.tool_call_id])
        rendered.append(fields)
    return rendered
