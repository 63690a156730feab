"""Chat messages: from the API's forms to a role and a text, which chat templates take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator
from typing_extensions import Self

from trencadis.engine import InvalidRequest

_UNSUPPORTED = ("tool_calls", "function_call", "audio")
"""Fields of a message that are not passed to the chat template."""


def check_characters(text: str) -> str:
    """Return the text.

    Raises `InvalidRequest` for a lone surrogate, which JSON allows and UTF-8 does not.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("holds a lone surrogate, which is no character") from None
    return text


Text = Annotated[str, AfterValidator(check_characters)]


def _joined_text(content: Any) -> Any:
    """A list of text parts as one text, joined by newlines as in vLLM."""
    if not isinstance(content, list):
        return content
    return "\n".join(_part_text(position, part) for position, part in enumerate(content))


def _part_text(position: int, part: Any) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"content part {position} must be an object with a type")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise InvalidRequest(f"content part {position} is of type {kind!r}: only text is supported")
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"content part {position} has no string under {kind!r}")
    return text


class ChatMessage(BaseModel):
    """One message of a conversation. ``developer`` is OpenAI's newer name for ``system``."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_joined_text, str | list[dict[str, Any]])]
    name: Text | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        for name in _UNSUPPORTED:
            if (self.model_extra or {}).get(name):
                raise InvalidRequest(f"{name} in a message is not supported")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as the chat template takes it."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}
