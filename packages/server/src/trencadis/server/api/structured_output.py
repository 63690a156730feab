"""The fields that ask for an answer of a form: OpenAI's ``response_format``, and vLLM's fields.

A request names the form once, in one of the fields.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SkipValidation,
    model_validator,
)
from typing_extensions import Self

from trencadis.engine import InvalidRequest, StructuredOutput
from trencadis.server.api.characters import Listed, Text
from trencadis.server.parsers.closed_schemas import closed, closed_text
from trencadis.server.parsers.structural_tags import StructuralTag, tagged_text

Schema = SkipValidation[str | dict[str, Any] | bool]
"""A JSON schema, or its text. `StructuredOutput` checks it: pydantic would name a type of the union
in its errors, as if it were a field."""


MAX_TAGS = 128
"""Most structural tags of a request, and most of their triggers."""


class JsonSchemaFormat(BaseModel):
    """A named schema. ``strict`` changes nothing: an answer always has the form of its schema."""

    model_config = ConfigDict(strict=True)

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class Structure(BaseModel):
    """A tag of vLLM's structural tags."""

    model_config = ConfigDict(strict=True)

    begin: Annotated[Text, Field(min_length=1)]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    end: Text


class ResponseFormat(BaseModel):
    """OpenAI's ``response_format``: any text, any JSON object, or JSON that a schema accepts.

    vLLM's ``structural_tag`` is text with tags: see `tagged_text`.
    """

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[list[Structure], Field(max_length=MAX_TAGS)] | None = None
    triggers: (
        Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=MAX_TAGS)] | None
    ) = None
    _tags: str | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise InvalidRequest("needs json_schema, as its type says")
        if self.type == "structural_tag":
            if self.structures is None or self.triggers is None:
                raise InvalidRequest("needs structures and triggers, as its type says")
            tags = [StructuralTag(tag.begin, tag.json_schema, tag.end) for tag in self.structures]
            self._tags = tagged_text(tags, self.triggers)
        return self

    def form(self) -> dict[str, Any] | None:
        """Arguments of `StructuredOutput`; None for any text."""
        if self.type == "json_schema" and self.json_schema is not None:
            return {"json_schema": self.json_schema.json_schema}
        if self._tags is not None:
            return {"grammar": self._tags}
        return {"json_object": True} if self.type == "json_object" else None


class StructuredOutputs(BaseModel):
    """vLLM's ``structured_outputs``: exactly one of these."""

    model_config = ConfigDict(strict=True, extra="allow")

    json_schema: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is not None and value is not False:
                raise InvalidRequest(f"{name} is not supported by this server: leave it out")
        return self

    def form(self) -> dict[str, Any]:
        """Arguments of `StructuredOutput`."""
        fields = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: value for name, value in fields if value is not None}


def requested_form(forms: dict[str, dict[str, Any]]) -> tuple[str, StructuredOutput | None]:
    """The field that names the form of an answer, and the form; ("", None) for any text.

    ``forms``: for each field that was sent, arguments of `StructuredOutput`. Raises
    `InvalidRequest` for a second field, and for a form that is none. Objects of a schema have no
    properties that it does not name: see `closed`.
    """
    if not forms:
        return "", None
    (field, form), *others = forms.items()
    if others:
        raise InvalidRequest(f"{field} and {others[0][0]} exclude each other", others[0][0])
    schema = form.get("json_schema")
    if isinstance(schema, (dict, str)):
        shut = closed_text(schema) if isinstance(schema, str) else closed(schema)
        with suppress(InvalidRequest):  # it is longer, and may be too long
            return field, StructuredOutput(json_schema=shut)
    try:
        return field, StructuredOutput(**form)
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error}", field) from error
