"""The request fields and `SamplingParams`: the same names, ranges and values."""

from __future__ import annotations

import json

import attrs
import pytest
from pydantic import ValidationError

from trencadis.engine import InvalidRequest, SamplingParams, StructuredOutput
from trencadis.server.api.pooling import CohereEmbedRequest, EmbeddingRequest, RerankRequest
from trencadis.server.api.protocol import ChatCompletionRequest, CompletionRequest

FIELDS = attrs.fields_dict(SamplingParams)
BOUNDED = [
    name for name, field in FIELDS.items() if getattr(field.validator, "low", None) is not None
]
BODIES = {
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"prompt": "a"},
}
NOT_IN_CHAT = {"best_of"}
"""Sampling parameters that the OpenAI API defines for completions alone."""

VALUES = {
    "early_stopping": "never",
    "logit_bias": {"5": 2.5},
    "stop": ["x"],
    "stop_token_ids": [7],
    "allowed_token_ids": [7, 8],
    "bad_words": ["no"],
    "logprob_token_ids": [7, 8],
}
"""JSON values other than the default, of parameters without bounds that are not flags."""

WITH_BEAMS = {"length_penalty", "early_stopping"}
"""Parameters that need use_beam_search."""


def parse(model, **fields):
    return model.model_validate_json(json.dumps({**BODIES[model], **fields}))


def fields_of(model):
    names = [name for name in FIELDS if name != "structured_output"]  # it has several fields
    return [name for name in names if model is CompletionRequest or name not in NOT_IN_CHAT]


def sent_value(name):
    """A JSON value of a parameter that is accepted and is not its default."""
    field = FIELDS[name]
    if name in VALUES:
        return VALUES[name]
    if name in BOUNDED:
        steps = (3, 2, 1, 0.7, 0.5)
        return next(step for step in steps if is_accepted(field, step) and step != field.default)
    assert isinstance(field.default, bool), f"a value of {name} in VALUES"
    return not field.default


def is_accepted(field, value):
    try:
        field.validator(None, field, value)
    except InvalidRequest:
        return False
    return True


CASES = [(model, name) for model in BODIES for name in fields_of(model)]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_every_sampling_parameter_that_is_sent_arrives(model, name):
    value = sent_value(name)
    chat_logprobs = name == "logprobs" and model is ChatCompletionRequest
    fields = {"logprobs": True, "top_logprobs": value} if chat_logprobs else {name: value}
    others = {"use_beam_search": True} if name in WITH_BEAMS else {}
    if name == "logprob_token_ids":
        others = {"logprobs": True if model is ChatCompletionRequest else 0}
    request = parse(model, **fields, **others)
    params = request.sampling_params(request.requested_tokens)
    expected = {int(k): v for k, v in value.items()} if isinstance(value, dict) else value
    arrived = getattr(params, name)
    assert (list(arrived) if isinstance(arrived, tuple) else arrived) == expected


@pytest.mark.parametrize("model", BODIES)
def test_a_request_without_sampling_fields_has_the_defaults(model):
    assert parse(model).sampling_params(SamplingParams().max_tokens) == SamplingParams()


def bound_cases():
    for model in BODIES:
        for name in fields_of(model):
            if name in BOUNDED:
                field = name
                if model is ChatCompletionRequest and name == "logprobs":
                    field = "top_logprobs"
                yield model, name, field
    yield ChatCompletionRequest, "max_tokens", "max_completion_tokens"


@pytest.mark.parametrize(("model", "name", "field"), list(bound_cases()))
def test_the_ranges_are_those_of_the_sampling_parameters(model, name, field):
    check = FIELDS[name].validator
    outside = [bound for bound in (check.low, check.high) if bound is not None]
    if check.low is not None:
        outside[0] -= 0 if getattr(check, "exclusive_low", False) else 1
    if check.high is not None:
        outside[-1] += 1
    if (model, field) == (CompletionRequest, "max_tokens"):
        outside[0] = -1  # with echo, 0 asks for the prompt alone
    assert outside
    for value in outside:
        with pytest.raises(InvalidRequest):
            SamplingParams(**{name: value})
        with pytest.raises(ValidationError) as caught:
            parse(model, **{field: value})
        assert {error["loc"] for error in caught.value.errors()} == {(field,)}


def test_every_sampling_parameter_is_described():
    for name in fields_of(CompletionRequest):
        help_text = FIELDS[name].metadata["help"]
        assert CompletionRequest.model_fields[name].description == help_text
        if name not in {*NOT_IN_CHAT, "logprobs"}:
            assert ChatCompletionRequest.model_fields[name].description == help_text


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**SCHEMA, "additionalProperties": False}
FORMS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
            }
        },
        {"json_schema": CLOSED},
    ),
    ({"guided_json": SCHEMA}, {"json_schema": CLOSED}),
    ({"guided_json": True}, {"json_schema": {}}),
    ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": CLOSED}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": CLOSED}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"structured_outputs": {"regex": "a+", "structural_tag": None}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a"], "disable_fallback": False}}, {"choice": ["a"]}),
    ({"structured_outputs": {"grammar": "root ::= 'a'"}}, {"grammar": "root ::= 'a'"}),
]


@pytest.mark.parametrize("model", BODIES)
@pytest.mark.parametrize(("fields", "form"), FORMS)
def test_every_field_that_asks_for_a_form_arrives(model, fields, form):
    request = parse(model, **fields)
    expected = None if form is None else StructuredOutput(**form)
    first, second = (request.sampling_params(number).structured_output for number in (5, 6))
    assert first == expected
    assert first is second, "the prompts of a request share one schema in memory"
    assert request.structured_output_field == (next(iter(fields)) if form else "")


PAIRS = {"query": "a", "documents": ["b"]}
MOST = 2**31 - 1
RANGES = [
    *(
        (model, body, "priority", -(2**63), 2**63 - 1)
        for model, body in (
            (CompletionRequest, {"prompt": "a"}),
            (EmbeddingRequest, {"input": "a"}),
            (RerankRequest, PAIRS),
        )
    ),
    *(
        (model, body, "truncate_prompt_tokens", -1, MOST)
        for model, body in (
            (CompletionRequest, {"prompt": "a"}),
            (EmbeddingRequest, {"input": "a"}),
            (RerankRequest, PAIRS),
        )
    ),
    (EmbeddingRequest, {"input": "a"}, "dimensions", 1, MOST),
    (CohereEmbedRequest, {"texts": ["a"]}, "output_dimension", 1, MOST),
    (CohereEmbedRequest, {"texts": ["a"]}, "max_tokens", 1, MOST),
    (RerankRequest, PAIRS, "top_n", 0, MOST),
    (RerankRequest, PAIRS, "max_tokens_per_doc", 0, MOST),
]
"""Numbers that are no parameters of sampling: a body, a field, its lowest value and its highest."""


@pytest.mark.parametrize(("model", "body", "field", "low", "high"), RANGES)
def test_a_number_is_taken_up_to_its_bounds(model, body, field, low, high):
    for value in (low, high):
        request = model.model_validate({**body, field: value})
        assert getattr(request, field) == value
    for value in (low - 1, high + 1):
        with pytest.raises((ValidationError, InvalidRequest)) as caught:
            model.model_validate({**body, field: value})
        assert field in str(caught.value)
