"""Invalid requests: the response is an OpenAI error that names the field."""

from __future__ import annotations

import itertools
import json

import httpx
import pytest

from trencadis.engine import BucketMiss, InvalidRequest
from trencadis.server import ServerSettings, create_app
from trencadis.server.api.protocol import ChatCompletionRequest, CompletionRequest
from trencadis.server.routes.admin import BatchControlRequest, DrainRequest

pytestmark = pytest.mark.asyncio

HELLO = [{"role": "user", "content": "hello"}]


def assert_error(response, status, param, code=...):
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.status_code == status, error
    assert error["param"] == param, error
    assert error["message"]
    expected = "invalid_request_error" if status < 500 else "server_error"
    assert error["type"] == expected
    if code is not ...:
        assert error["code"] == code
    return error["message"]


CALL = {"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}
BAD_CALL = {**CALL, "function": {"name": "a", "arguments": "[1"}}
CALLS = "messages[0].tool_calls[0]"
TOOL_CALL_ID = "messages[0].tool_call_id"
BEAMS = "use_beam_search"
LONG = {"type": "object", "properties": {"p": {"enum": ["a" * 70_000]}}}


def tool(name, **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def named(name):
    return {"type": "function", "function": {"name": name}}


CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": ""}] * 8193}, "messages"),
    (
        {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1025)]},
        "tools",
    ),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "a robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "a", "tool_call_id": 1}]}, TOOL_CALL_ID),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]}, f"{CALLS}.function"),
    ({"messages": [{"role": "assistant", "tool_calls": [BAD_CALL]}]}, f"{CALLS}.function"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, CALLS),
    ({"messages": [*HELLO, {"role": "user", "content": "\ud800"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": "REJECT"}]}, "messages"),
    ({"model": 5}, "model"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"seed": 2**70}, "seed"),
    ({"presence_penalty": 5}, "presence_penalty"),
    ({"frequency_penalty": "x"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": 1}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [257]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [1], "guided_regex": "a"}, "allowed_token_ids"),
    ({"logprob_token_ids": [65]}, "logprob_token_ids"),
    ({"logprob_token_ids": [257], "logprobs": True}, "logprob_token_ids"),
    ({"logprob_token_ids": [1] * 129, "logprobs": True}, "logprob_token_ids"),
    ({"logprob_token_ids": ["a"], "logprobs": True}, "logprob_token_ids[0]"),
    ({"logit_bias": {"65": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"65": "1"}}, "logit_bias"),
    ({"logit_bias": {"257": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(map(str, range(4097)), 1)}, "logit_bias"),
    ({"messages": [{**HELLO[0], "audio": {"id": "a"}}]}, "messages[0]"),
    ({"messages": [{**HELLO[0], "function_call": {"name": "a"}}]}, "messages[0]"),
    ({"tools": [tool("a")], "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs"),
    ({"stop": "\ud800"}, "stop[0]"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ({"priority": "high"}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "s" * 1025}, "cache_salt"),
    ({"cache_salt": "\ud800"}, "cache_salt"),
    ({"priority": 2**63}, "priority"),
    ({"best_of": 2}, "best_of"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools[0].type"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool('a"b')]}, "tools[0].function.name"),
    ({"tools": [tool("a"), tool("a")]}, "tools"),
    ({"tools": [tool("a", parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool("a", parameters={"type": "array"})]}, "tools[0].function.parameters"),
    ({"tools": [tool("a", parameters={"title": "\ud800"})]}, "tools[0].function.parameters"),
    ({"tools": [tool("a")]}, "tool_choice"),
    ({"tools": [tool("a")], "tool_choice": "auto"}, "tool_choice"),
    ({"tools": [tool("a")], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [tool("a")], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [tool("a")], "tool_choice": "\ud800"}, "tool_choice"),
    ({"tools": [tool("a")], "tool_choice": named("b")}, "tool_choice"),
    ({"tools": [tool("a")], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ({"tools": [tool("a", parameters=LONG)], "tool_choice": "required"}, "tools"),
    ({"tools": [tool("a")], "tool_choice": "required", "use_beam_search": True}, BEAMS),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"include_reasoning": 1}, "include_reasoning"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "tags"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {"type": "json_object"}, "use_beam_search": True}, "use_beam_search"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
    ({"guided_regex": "a" * 70_000}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "\ud800"}, "guided_grammar"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"verbosity": "low"}, "verbosity"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"reasoning_effort": "endless"}, "reasoning_effort"),
    ({"guided_json": 7}, "guided_json"),
    ({"guided_json": False}, "guided_json"),
    ({"use_beam_search": "yes"}, "use_beam_search"),
    ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
    ({"use_beam_search": True, "stop": "a"}, "stop"),
    ({"use_beam_search": True, "logprobs": True}, "logprobs"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"use_beam_search": True, "length_penalty": "long"}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    ({"use_beam_search": True, "early_stopping": 1}, "early_stopping"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"echo": 1}, "echo"),
    ({"documents": [{"title": 1}]}, "documents[0].title"),
    ({"documents": [{}] * 1025}, "documents"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncation_side": "left"}, "truncation_side"),
    ({"truncate_prompt_tokens": 1, "truncation_side": "both"}, "truncation_side"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT, ids=lambda value: str(value)[:50])
async def test_a_bad_chat_field_is_named(client, engine, fields, param):
    body = json.dumps({"messages": HELLO, **fields}).encode()
    response = await client.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    message = assert_error(response, 400, param)
    assert param.partition("[")[0].partition(".")[0] in message
    assert not engine.requests


COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], [True]]}, "prompt"),
    ({"prompt": [257]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30], "echo": True}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "", "add_special_tokens": False}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
    ({"prompt": "a", "best_of": 0}, "best_of"),
    ({"prompt": "a", "best_of": 129}, "best_of"),
    ({"prompt": ["a"] * 1000, "best_of": 2}, "best_of"),
    ({"prompt": "a", "best_of": 2, "stream": True}, "stream"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens"),
    ({"prompt": "a", "echo": "yes"}, "echo"),
    ({"prompt": "a", "max_tokens": 1000}, "max_tokens"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": "a", "prompt_logprobs": 1, "use_beam_search": True}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), COMPLETIONS, ids=lambda value: str(value)[:50])
async def test_a_bad_completion_field_is_named(client, engine, fields, param):
    response = await client.post(
        "/v1/completions",
        content=json.dumps(fields).encode(),
        headers={"Content-Type": "application/json"},
    )
    message = assert_error(response, 400, param)
    assert param in message
    assert not engine.requests


HUGE = ("1" + "0" * 400, "-1e400", str(2**64), str(-(2**64)), "1e308", "NaN")
NUMBERS = [
    *(("/v1/chat/completions", name) for name in ChatCompletionRequest.model_fields),
    *(("/v1/completions", name) for name in CompletionRequest.model_fields),
    *(("/v1/admin/batch", name) for name in BatchControlRequest.model_fields),
    *(("/v1/admin/drain", name) for name in DrainRequest.model_fields),
]
IN_LISTS = {
    "logit_bias": '{"65": %s}',
    "prompt": "[[%s]]",
    "stop_token_ids": "[%s]",
    "chat_template_kwargs": '{"a": %s}',
}


@pytest.mark.parametrize(("path", "name"), NUMBERS)
async def test_no_number_is_an_internal_error(engine, path, name):
    app = create_app(engine, ServerSettings(admin_keys=["boss"], admin_rate_limit=1e6))
    headers = {"Content-Type": "application/json", "Authorization": "Bearer boss"}
    usual = {
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
        "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    }.get(path, {})
    fields = {key: json.dumps(value) for key, value in usual.items()}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://server", headers=headers
    ) as client:
        for number in HUGE:
            for form in {"%s", IN_LISTS.get(name, "%s")}:
                spoiled = {**fields, name: form % number}
                body = ", ".join(f'"{key}": {value}' for key, value in spoiled.items())
                response = await client.post(path, content=f"{{{body}}}")
                assert response.status_code in (200, 400), (number, response.text)


async def test_an_unknown_model_is_not_found(client):
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO, "model": "other"}),
        ("/v1/completions", {"prompt": "a", "model": "other"}),
    ):
        response = await client.post(path, json=body)
        message = assert_error(response, 404, "model", "model_not_found")
        assert "'other'" in message
        assert "'stand-in'" in message


@pytest.mark.parametrize("size", [255, 256, 2000])
async def test_a_prompt_that_fills_the_context_is_refused_with_openais_code(client, engine, size):
    response = await client.post("/v1/completions", json={"prompt": "x" * size})
    message = assert_error(response, 400, "prompt", "context_length_exceeded")
    assert str(size + 1) in message
    assert "256" in message
    messages = [{"role": "user", "content": "x" * size}]
    response = await client.post("/v1/chat/completions", json={"messages": messages})
    assert_error(response, 400, "messages", "context_length_exceeded")
    assert not engine.requests


@pytest.mark.parametrize("max_tokens", [1, 2, 256])
async def test_an_answer_has_at_most_the_tokens_that_its_prompt_leaves(client, engine, max_tokens):
    body = {"prompt": "x" * 254, "max_tokens": max_tokens}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    assert engine.requests[0][1].max_tokens == 1


async def test_more_tokens_than_the_context_has_are_refused(client, engine):
    body = {"prompt": "x" * 254, "max_tokens": 257}
    response = await client.post("/v1/completions", json=body)
    assert "at most 1 " in assert_error(response, 400, "max_tokens", "context_length_exceeded")
    assert not engine.requests


@pytest.mark.parametrize(
    "body",
    [b"{", b'{"messages": [}', b"nonsense", b"\xff\xfe", b'{"a": 1}}', b"[" * 100_000, b"1" * 5000],
    ids=lambda body: repr(body[:20]),
)
async def test_malformed_json_is_an_error_that_says_so(client, body):
    response = await client.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert "JSON" in assert_error(response, 400, None)


@pytest.mark.parametrize("body", ["[]", "5", "null", '"text"'])
async def test_a_body_that_is_no_object_is_refused(client, body):
    response = await client.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert_error(response, 400, None)


async def test_an_empty_body_is_refused(client):
    headers = {"Content-Type": "application/json"}
    assert_error(await client.post("/v1/completions", headers=headers), 400, None)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_a_body_that_is_not_declared_as_json_is_refused(client, kind):
    # a page in a browser can send such bodies to a local server without being asked
    headers = {} if kind is None else {"Content-Type": kind}
    response = await client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert "application/json" in assert_error(response, 415, None)


async def test_an_unknown_path_is_not_found(client):
    message = assert_error(await client.get("/v2/nothing"), 404, None)
    assert "GET /v2/nothing" in message


async def test_a_wrong_method_is_not_allowed(client):
    response = await client.get("/v1/chat/completions")
    assert_error(response, 405, None)
    assert response.headers["allow"] == "POST"


async def test_a_long_offending_value_is_not_sent_back(client):
    response = await client.post(
        "/v1/chat/completions", json={"messages": HELLO, "stop": ["x" * 100_000, ""]}
    )
    assert len(assert_error(response, 400, "stop")) <= 600


async def test_an_overloaded_engine_says_when_to_come_back(client, engine):
    engine.overloaded = True
    bodies = {
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/completions": {"prompt": ["a", "b"]},
    }
    for (path, body), stream in itertools.product(bodies.items(), (False, True)):
        response = await client.post(path, json={**body, "stream": stream})
        assert_error(response, 503, None, "engine_overloaded")
        assert response.headers["retry-after"] == "1"


async def test_a_dead_engine_is_an_error_that_says_so(client, engine):
    engine.is_alive = False
    response = await client.post("/v1/completions", json={"prompt": "a"})
    assert "restart" in assert_error(response, 503, None, "engine_dead")
    assert "retry-after" not in response.headers


async def test_a_refused_bucket_miss_is_an_error_that_names_shape_and_setting(client, engine):
    engine.fails_with = BucketMiss("no bucket holds batch 1, blocks 61 (--on-bucket-miss refuse)")
    response = await client.post("/v1/completions", json={"prompt": "a"})
    message = assert_error(response, 503, None, "bucket_miss")
    assert "blocks 61" in message
    assert "--on-bucket-miss" in message


async def test_an_unexpected_engine_error_is_not_shown_to_the_client(client, engine):
    engine.fails_with = RuntimeError("secret path /home/x")
    response = await client.post("/v1/completions", json={"prompt": "a"})
    assert "secret" not in assert_error(response, 500, None, "internal_error")


async def test_an_engine_error_about_the_prompt_names_the_messages(client, engine):
    engine.fails_with = InvalidRequest("prompt needs 9 blocks, there are 4", "prompt")
    response = await client.post("/v1/chat/completions", json={"messages": HELLO})
    assert "9 blocks" in assert_error(response, 400, "messages", "invalid_value")
    response = await client.post("/v1/completions", json={"prompt": "a"})
    assert_error(response, 400, "prompt", "invalid_value")


async def test_an_aborted_answer_is_an_error(client, engine):
    engine.aborts = True
    response = await client.post("/v1/completions", json={"prompt": "a"})
    assert_error(response, 503, None, "request_aborted")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": ["a", "x" * 5000]}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 5000}]},
            "messages",
        ),
    ],
)
async def test_a_text_that_no_context_holds_is_refused_before_it_is_encoded(
    client, engine, monkeypatch, path, body, field
):
    def encode(*_: object) -> list[int]:
        raise AssertionError("encoded")

    monkeypatch.setattr(engine.tokenizer, "encode", encode)
    response = await client.post(path, json=body)
    message = assert_error(response, 400, field, "context_length_exceeded")
    assert "5000 characters" in message


async def test_a_form_that_the_engine_refuses_is_named_as_the_request_names_it(client, engine):
    engine.fails_with = InvalidRequest("it needs too much memory", "structured_output")
    for fields, param in (
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ):
        response = await client.post("/v1/chat/completions", json={"messages": HELLO, **fields})
        assert assert_error(response, 400, param) == f"{param}: it needs too much memory"
