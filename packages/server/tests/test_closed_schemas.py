"""Objects of a JSON schema have no properties that it does not name, unless it says so."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.server.parsers.closed_schemas import closed, closed_text

pytestmark = pytest.mark.asyncio

STRING = {"type": "string"}
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}


class Part(pydantic.BaseModel):
    name: str
    parts: list[Part] = []


class Order(pydantic.BaseModel):
    part: Part
    other: Part | None = None
    prices: dict[str, float]


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        (POINT, {"x": 1}, True),
        (POINT, {"x": 1, "y": 2}, False),
        ({**POINT, "additionalProperties": True}, {"x": 1, "y": 2}, True),
        ({**POINT, "additionalProperties": STRING}, {"x": 1, "y": "2"}, True),
        ({**POINT, "patternProperties": {"^y": STRING}}, {"x": 1, "y": "2"}, True),
        ({"type": "object"}, {"y": 2}, True),
        ({"type": "array", "items": POINT}, [{"x": 1, "y": 2}], False),
        ({"type": "array", "prefixItems": [POINT]}, [{"x": 1, "y": 2}], False),
        ({"anyOf": [POINT, STRING]}, {"x": 1, "y": 2}, False),
        ({"properties": {"title": POINT}}, {"title": {"x": 1, "y": 2}}, False),
        ({"enum": [{"properties": {}, "z": 1}]}, {"properties": {}, "z": 1}, True),
        ({"properties": {}, "required": ["x"]}, {"x": 1}, True),
        ({"allOf": [POINT, {"properties": {"y": STRING}}]}, {"x": 1, "y": "2"}, True),
        ({**POINT, "anyOf": [{"properties": {"y": STRING}}]}, {"x": 1, "y": "2"}, True),
        ({"not": POINT}, {"x": 1, "y": 2}, False),
        ({"$defs": {"p": POINT}, "$ref": "#/$defs/p"}, {"x": 1, "y": 2}, False),
        (
            {"$defs": {"p": POINT}, "$ref": "#/$defs/p", "properties": {"y": STRING}},
            {"x": 1, "y": "2"},
            True,
        ),
        (Order.model_json_schema(), {"part": {"name": "a"}, "prices": {"b": 1}}, True),
        (Order.model_json_schema(), {"part": {"name": "a", "b": 1}, "prices": {}}, False),
        (
            Order.model_json_schema(),
            {"part": {"name": "a", "parts": [{"name": "b", "c": 1}]}, "prices": {}},
            False,
        ),
    ],
)
async def test_what_a_closed_schema_accepts(schema: dict[str, Any], value: Any, fits: bool) -> None:
    assert jsonschema.Draft202012Validator(closed(schema)).is_valid(value) == fits
    assert json.loads(closed_text(json.dumps(schema))) == closed(schema)
    assert closed(closed(schema)) == closed(schema)


NAMES = st.sampled_from(["a", "b", "title", "anyOf"])
LEAVES = st.sampled_from([{}, True, STRING, {"type": "integer"}, {"enum": [1, {"a": 1}]}])


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = {
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "required": st.lists(NAMES, max_size=2),
        "additionalProperties": inner,
        "items": inner,
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "not": inner,
        "title": STRING_VALUES,
    }
    return st.fixed_dictionaries({}, optional=fields)


STRING_VALUES = st.sampled_from(["a", "b"])
VALUES = st.recursive(
    st.integers(0, 2) | STRING_VALUES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


@given(st.recursive(LEAVES, objects, max_leaves=6), VALUES)
@settings(max_examples=400)
async def test_closing_never_accepts_more_and_no_object_that_it_names_less(
    schema: Any, value: Any
) -> None:
    before = jsonschema.Draft202012Validator(schema)
    after = jsonschema.Draft202012Validator(closed(schema))
    if after.is_valid(value):
        assert before.is_valid(value)
    elif before.is_valid(value):
        messages = {error.validator for error in _leaves(after.iter_errors(value))}
        assert "additionalProperties" in messages, "the only keyword that is added"


def _leaves(errors: Any) -> Any:
    for error in errors:
        yield error
        yield from _leaves(error.context)


async def test_a_schema_that_would_be_too_long_when_closed_stays_open(client, engine) -> None:
    properties = {f"p{number}": POINT for number in range(700)}
    schema = {"type": "object", "properties": properties}
    body = {"messages": [{"role": "user", "content": "hello"}], "guided_json": schema}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert json.loads(engine.requests[0][1].structured_output.json_schema) == schema


async def test_what_is_no_schema_is_left_to_the_engine() -> None:
    assert closed_text("{") == "{"
    assert closed_text("true") == "true"
    assert closed_text('{"const": 0.10000000000000000001}') == '{"const": 0.10000000000000000001}'
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    assert closed(deep) is deep


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}},
        {"guided_json": POINT},
        {"guided_json": json.dumps(POINT)},
        {"structured_outputs": {"json": POINT}},
    ],
    ids=["response_format", "guided_json", "text", "structured_outputs"],
)
async def test_every_field_for_a_schema_closes_it(client, engine, fields) -> None:
    for opened in (False, True):
        text = json.dumps(fields)
        if opened:
            added = json.dumps({**POINT, "additionalProperties": True})
            text = text.replace(json.dumps(json.dumps(POINT)), json.dumps(added))
            text = text.replace(json.dumps(POINT), added)
        body = {"messages": [{"role": "user", "content": "hello"}], **json.loads(text)}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        form = engine.requests[-1][1].structured_output
        assert json.loads(form.json_schema)["additionalProperties"] is opened
