"""JSON schemas whose objects have no other properties than they name.

By JSON Schema, an object may have any property that its schema does not mention. A small model then
adds some until its tokens end, and no client asks for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose value has a schema under each name."""

_INNER = frozenset({"items", "prefixItems", "additionalProperties", "contains", "anyOf", "oneOf"})
"""Keywords whose value is a schema or a list of schemas."""

_COMBINED = frozenset(
    {"allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}
)
"""With one of these, several schemas describe the same object, or one says what it must not be."""

_OF_OBJECTS = frozenset({"properties", "required", "patternProperties", "additionalProperties"})

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})
"""Keywords that no value depends on."""


def closed(schema: Any) -> Any:
    """``schema`` with ``additionalProperties`` false in each object that does not have the keyword.

    ``"additionalProperties": true`` keeps an object open. Unchanged where several schemas describe
    one object, because a property that only one of them names would be forbidden.
    """
    try:
        return schema if _is_combined(schema) else _closed(schema)
    except RecursionError:
        return schema  # too deep: the engine says so


def closed_text(text: str) -> str:
    """As `closed`, for the text of a schema; what is not JSON is returned unchanged."""
    try:
        schema = json.loads(text, parse_float=_exact_float)
    except (ValueError, RecursionError):
        return text
    return json.dumps(closed(schema), ensure_ascii=False) if isinstance(schema, dict) else text


def each_schema(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """``schema`` with the schemas in it changed; values such as those of ``enum`` are none."""
    changed = dict(schema)
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            changed[key] = {name: change(inner) for name, inner in value.items()}
        elif key in _INNER | _COMBINED:
            is_list = isinstance(value, list)
            changed[key] = [change(inner) for inner in value] if is_list else change(value)
    return changed


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    properties, required = schema.get("properties"), schema.get("required", [])
    result = each_schema(schema, _closed)
    # No object would have a property that is required and not named.
    if "additionalProperties" not in schema and _names_all(properties, required):
        result["additionalProperties"] = False
    return result


def _names_all(properties: Any, required: Any) -> bool:
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _is_combined(schema: Any) -> bool:
    """Whether more than one schema may describe an object."""
    if isinstance(schema, list):
        return any(map(_is_combined, schema))
    if not isinstance(schema, Mapping):
        return False
    if _COMBINED & schema.keys() or ("$ref" in schema and schema.keys() & _OF_OBJECTS):
        return True
    if ("anyOf" in schema or "oneOf" in schema) and schema.keys() & (_OF_OBJECTS | {"$ref"}):
        return True
    return any(map(_is_combined, schema.values()))


def _exact_float(text: str) -> float:
    value = float(text)
    if Decimal(repr(value)) != Decimal(text):
        raise ValueError(f"no float is {text}")
    return value
