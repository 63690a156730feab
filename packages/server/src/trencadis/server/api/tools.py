"""Tools of a chat request, which of them the model may call, and calls of earlier answers."""

from __future__ import annotations

import json
import re
import reprlib
from typing import Annotated, Any, Literal

import attrs
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic_core import from_json
from typing_extensions import Self

from trencadis.engine import InvalidRequest
from trencadis.server.api.characters import Text, check_characters

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NO_PARAMETERS = {"type": "object", "properties": {}}

MAX_TOOLS = 1024
"""Most tools of a request."""


def _tool_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"must be 1 to 128 letters, digits and _ . : / -, got {name[:200]!r}")
    return name


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        check_characters(json.dumps(schema, ensure_ascii=False))
    except RecursionError:
        raise InvalidRequest("is nested too deep") from None
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"must be the schema of an object, got type {schema['type']!r}")
    return schema


ToolName = Annotated[str, AfterValidator(_tool_name)]
ObjectSchema = Annotated[dict[str, Any], AfterValidator(_parameters)]
"""The JSON schema of a tool's arguments."""


class FunctionDefinition(BaseModel):
    """A function: ``parameters`` is the JSON schema of its arguments, an object.

    ``strict`` changes nothing: forced calls always have valid arguments, others are the model's.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    name: ToolName
    description: Text | None = None
    parameters: ObjectSchema | None = None
    strict: bool | None = None


class FunctionTool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = self.function.model_dump(exclude={"strict"}, exclude_none=True)
        return {"type": "function", "function": {"parameters": _NO_PARAMETERS, **function}}

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The schema of an object, whatever is left out."""
        schema = self.function.parameters or _NO_PARAMETERS
        return schema if "$ref" in schema else {"type": "object", **schema}


@attrs.frozen
class ToolChoice:
    """``mode``: whether the model may call tools, has to, or must not. ``name``: the only one."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None


def tool_choice(value: Any) -> ToolChoice | None:
    """OpenAI's ``tool_choice``. Raises `InvalidRequest`."""
    if value is None or isinstance(value, ToolChoice):
        return value
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    kind = value.get("type") if isinstance(value, dict) else None
    function = value.get("function") if isinstance(value, dict) else None
    if kind != "function" or not isinstance(function, dict):
        raise InvalidRequest(
            'must be "none", "auto", "required" or '
            f'{{"type": "function", "function": {{"name": …}}}}, got {reprlib.repr(value)}'
        )
    name = function.get("name")
    if not isinstance(name, str):
        raise InvalidRequest("function has no name")
    return ToolChoice("required", name)


ToolChoiceField = Annotated[
    ToolChoice | None, PlainValidator(tool_choice, str | dict[str, Any] | None)
]


class CalledFunction(BaseModel):
    """The function of an earlier call. ``arguments`` is a JSON object as text.

    The object may have been cut by ``max_tokens``: what is complete of it counts.
    """

    model_config = ConfigDict(strict=True)

    name: Text
    arguments: Text = Field(default="{}")

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        self.parsed()
        return self

    def parsed(self) -> dict[str, Any]:
        """The arguments. Raises `InvalidRequest` for what is not the beginning of an object."""
        return parsed_arguments(self.arguments)


def parsed_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call, as far as they were written.

    Raises `InvalidRequest` for what is not the beginning of a JSON object.
    """
    try:
        value = json.loads(text.strip() or "{}", strict=False)
    except ValueError:
        value = _beginning(text)
    except RecursionError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"arguments must be a JSON object as text: {text[:200]}")
    return value


def _beginning(text: str) -> Any:
    """What the text of an object holds up to where it was cut, or is not JSON; None for another."""
    text = text.lstrip()
    if not text.startswith("{"):
        return None
    value, readable, unreadable = {}, 1, len(text) + 1
    middle = len(text)  # a text that was only cut is readable whole
    while unreadable - readable > 1:
        try:
            value, readable = from_json(text[:middle], allow_partial=True), middle
        except ValueError:
            unreadable = middle
        middle = (readable + unreadable) // 2
    return value


class EarlierCall(BaseModel):
    """A tool call in a message of the assistant."""

    model_config = ConfigDict(strict=True)

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self, text_arguments: bool) -> dict[str, Any]:
        """The call as chat templates take it, its arguments as an object or as JSON text."""
        function = self.function
        arguments: Any = (function.arguments or "{}") if text_arguments else function.parsed()
        call = {
            "type": "function",
            "function": {"name": function.name, "arguments": arguments},
        }
        return call if self.id is None else {"id": self.id, **call}
