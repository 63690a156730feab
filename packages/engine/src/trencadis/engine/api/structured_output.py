"""What the text of an answer must match: JSON, a JSON schema, a regex, a choice, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from trencadis.engine.errors import InvalidRequest, shown
from trencadis.engine.validators import boolean, is_text, items_of

FIELD = "structured_output"
"""The field that errors name."""

MAX_BYTES = 1 << 16
"""Longest schema, regex, grammar, or choices together, in bytes of UTF-8."""


def _refusal(message: str, _: str) -> InvalidRequest:
    return InvalidRequest(message, FIELD)


def _schema(value: str | Mapping[str, Any] | bool | None) -> str | None:
    """A schema as JSON text, which is hashable and can be sent to the core.

    The schema true, which accepts any value, becomes an object that does the same.
    """
    if value is None:
        return None
    if isinstance(value, str):
        word = value.strip()
        if word and word not in ("true", "false") and not word.startswith("{"):
            raise InvalidRequest(
                f"json_schema must be a JSON schema, which is an object, got {shown(value)}", FIELD
            )
        if word not in ("true", "false"):
            return value
        value = word == "true"
    if value is True:
        return "{}"
    if value is False:
        raise InvalidRequest("json_schema false accepts no value: give another schema", FIELD)
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f"json_schema must be a JSON schema as a dict or as text, got {shown(value)}", FIELD
        )
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"json_schema cannot be written as JSON: {error}", FIELD) from error


def _as_dict(value: Any) -> dict[Any, Any]:
    """Mappings other than dict, which `json` does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{shown(value)} is not a JSON value")


def _choice(values: Iterable[str] | None) -> tuple[str, ...] | None:
    if values is None:
        return None
    items = items_of(values)
    if items is None:
        raise InvalidRequest(f"choice must be a list of texts, got {shown(values)}", FIELD)
    return items


@attrs.frozen(kw_only=True)
class StructuredOutput:
    """A form that each answer of a request has, whatever the model's weights. Exactly one of:

    - ``json_object``: True for any JSON object.
    - ``json_schema``: a JSON value that the schema accepts; a dict, or its JSON text. Properties
      come in the schema's order. A keyword that cannot be guaranteed is rejected.
    - ``regex``: the whole answer matches this, in the syntax of Rust's ``regex`` crate.
    - ``choice``: one of these texts.
    - ``grammar``: a grammar in llguidance's Lark syntax, or in llama.cpp's GBNF.

    Needs llguidance (``pip install 'trencadis-engine[structured]'``). An answer that ``max_tokens``
    or a stop string cuts is only the beginning of a match.

    Raises `InvalidRequest` unless there is exactly one, on a wrong type, and on more than
    `MAX_BYTES` bytes. Whether it can be compiled is checked when the request is sent.
    """

    json_object: bool = attrs.field(default=False, validator=boolean(error=_refusal))
    json_schema: str | None = attrs.field(default=None, converter=_schema)
    regex: str | None = attrs.field(default=None)
    choice: tuple[str, ...] | None = attrs.field(default=None, converter=_choice)
    grammar: str | None = attrs.field(default=None)

    def __attrs_post_init__(self) -> None:
        fields = attrs.asdict(self, recurse=False)
        given = [name for name, value in fields.items() if value is not None and value is not False]
        if len(given) != 1:
            raise InvalidRequest(
                f"a structured output has exactly one of {', '.join(fields)}, "
                f"got {' and '.join(given) or 'none'}",
                FIELD,
            )
        texts = self.choice if self.choice is not None else (fields[given[0]],)
        if self.json_object:
            return
        if not texts or not all(is_text(text) and text for text in texts):
            raise InvalidRequest(
                f"{given[0]} must be non-empty text that UTF-8 can encode, "
                f"got {shown(fields[given[0]])}",
                FIELD,
            )
        size = sum(len(text.encode()) for text in texts)
        if size > MAX_BYTES:
            raise InvalidRequest(
                f"{given[0]} has {size} bytes, more than {MAX_BYTES}: shorten it", FIELD
            )
