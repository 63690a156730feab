"""``POST /v1/messages``, through the official client and as plain HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import pytest_asyncio
from test_tool_calls import ANSWER, QWEN

from trencadis.server import ServerSettings, create_app

anthropic = pytest.importorskip("anthropic")

pytestmark = pytest.mark.asyncio

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "input_schema": CITY}
TIME = {"name": "time", "description": "Now.", "input_schema": {"type": "object"}}
HELLO = [{"role": "user", "content": "hello"}]
PATH = "/v1/messages"


@pytest_asyncio.fixture
async def official(engine, serving):
    """A client of a server whose model writes calls and reasoning as Qwen 3 does."""
    engine.tokenizer.chat_template = QWEN
    engine.max_model_len = 4096
    async with (
        serving(api_keys=["secret"]) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="secret", max_retries=0) as client,
    ):
        yield client


async def ask(client, *, stream: bool, **fields: Any):
    """The message, whole or as the client accumulates it from the events."""
    request: dict[str, Any] = {
        "model": "stand-in",
        "messages": HELLO,
        "max_tokens": 2000,
        **fields,
    }
    if not stream:
        return await client.messages.create(**request)
    async with client.messages.stream(**request) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_is_answered(official, engine, stream):
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    sampling = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "stop_sequences": ["end"]}
    message = await ask(official, stream=stream, system=system, extra_body=sampling)
    (block,) = message.content
    assert (block.type, block.text) == ("text", "[system]be brief[user]hello[assistant]")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.role, message.type, message.model) == ("assistant", "message", "stand-in")
    assert message.id.startswith("msg_")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (38, 1)
    assert usage.output_tokens == 38
    _, params, *_ = engine.requests[0]
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 7)
    assert (params.stop, params.max_tokens) == (("end",), 2000)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("thinking", "is_shown"),
    [
        (None, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive", "display": "omitted"}, False),
    ],
)
async def test_thinking_text_and_calls_are_blocks_in_their_order(
    official, engine, stream, thinking, is_shown
):
    engine.script = list(ANSWER)
    fields = {} if thinking is None else {"thinking": thinking}
    message = await ask(official, stream=stream, tools=[WEATHER, TIME], **fields)
    *thoughts, text, weather, time = message.content
    assert [thought.thinking for thought in thoughts] == ["Paris?"] * is_shown
    assert text.text == "I look."
    assert (weather.type, weather.name, weather.input) == ("tool_use", "weather", {"city": "Paris"})
    assert (time.name, time.input) == ("time", {})
    assert weather.id != time.id
    assert message.stop_reason == "tool_use"
    thinking_tokens = message.usage.output_tokens_details.thinking_tokens
    assert len("<think>\nParis?") <= thinking_tokens <= ANSWER.index("I look.")


@pytest.mark.parametrize(("kind", "is_forced"), [("none", False), ("any", True)])
async def test_a_choice_of_tools_is_that_of_chat(client, engine, kind, is_forced):
    body = {"messages": HELLO, "max_tokens": 5, "tools": [WEATHER], "tool_choice": {"type": kind}}
    assert (await client.post(PATH, json=body)).status_code == 200
    _, params, *_ = engine.requests[0]
    assert (params.structured_output is not None) == is_forced


async def test_texts_before_and_after_a_result_stay_in_their_order(client, engine):
    blocks = [
        {"type": "text", "text": "one"},
        {"type": "text", "text": "two"},
        {"type": "tool_result", "tool_use_id": "c", "content": "rain", "is_error": True},
        {"type": "text", "text": "three"},
    ]
    turns = [{"role": "user", "content": blocks}]
    assert (await client.post(PATH, json={"messages": turns, "max_tokens": 5})).status_code == 200
    prompt = engine.tokenizer.decode(engine.requests[0][0])
    assert prompt == "[user]one\ntwo[tool]Error: rain[user]three[assistant]"


async def test_a_system_message_may_be_anywhere(client, engine):
    turns = [*HELLO, {"role": "system", "content": "be brief"}]
    await client.post(PATH, json={"messages": turns, "max_tokens": 5})
    prompt = engine.tokenizer.decode(engine.requests[0][0])
    assert prompt == "[user]hello[system]be brief[assistant]"


async def test_the_events_of_a_stream_come_in_the_documented_order(official, engine):
    engine.script = ["a", "b", '<tool_call>{"name": "time", "arguments": {', '"c": 1}}</tool_call>']
    events = await official.messages.create(
        model="stand-in", messages=HELLO, max_tokens=50, tools=[TIME], stream=True
    )
    seen = [event async for event in events]
    kinds = [event.type for event in seen if event.type != "ping"]
    assert kinds == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta"),
        "content_block_stop",
        "content_block_start",
        *["content_block_delta"] * (len(kinds) - 9),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert seen[0].message.usage.input_tokens == 22
    blocks = [event for event in seen if event.type == "content_block_start"]
    assert [(event.index, event.content_block.type) for event in blocks] == [
        (0, "text"),
        (1, "tool_use"),
    ]
    deltas = [e.delta for e in seen if e.type == "content_block_delta"]
    assert "".join(d.partial_json for d in deltas if d.type == "input_json_delta") == '{"c": 1}'


async def test_a_ping_follows_the_start_of_a_stream(url):
    body = {"messages": HELLO, "max_tokens": 3, "stream": True}
    async with httpx.AsyncClient(base_url=url) as client:
        lines = (await client.post(PATH, json=body)).text.split("\n\n")
    assert lines[1] == 'event: ping\ndata: {"type":"ping"}'
    assert lines[-2] == 'event: message_stop\ndata: {"type":"message_stop"}'


async def test_results_of_tools_are_sent_back(official, engine):
    engine.script = list(ANSWER)
    tools = {"tools": [WEATHER, TIME], "thinking": {"type": "adaptive"}}
    message = await ask(official, stream=False, **tools)
    weather, time = message.content[-2:]
    results = [
        {"type": "tool_result", "tool_use_id": weather.id, "content": "sunny"},
        {
            "type": "tool_result",
            "tool_use_id": time.id,
            "is_error": True,
            "content": [{"type": "text", "text": "no clock"}],
        },
        {"type": "text", "text": "go on"},
    ]
    turns = [*HELLO, {"role": "assistant", "content": message.content}]
    await ask(
        official, stream=False, messages=[*turns, {"role": "user", "content": results}], **tools
    )
    messages, sent_tools = engine.tokenizer.rendered[-1]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert [m["content"] for m in messages[1:]] == ["I look.", "sunny", "Error: no clock", "go on"]
    assert messages[1]["reasoning_content"] == "Paris?"
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert [m["name"] for m in messages[2:4]] == ["weather", "time"]
    assert [tool["function"]["name"] for tool in sent_tools] == ["weather", "time"]


async def test_a_last_turn_of_the_assistant_is_continued(client, engine):
    turns = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    await client.post(PATH, json={"messages": turns, "max_tokens": 5})
    prompt = engine.tokenizer.decode(engine.requests[0][0])
    assert prompt == "[user]hello[assistant]The answer is"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limit", "stop", "reason", "sequence"),
    [(4, None, "max_tokens", None), (2000, "]", "stop_sequence", "]"), (2000, 7, "end_turn", None)],
)
async def test_the_reason_of_the_end_is_told(
    official, engine, stream, limit, stop, reason, sequence
):
    engine.stop_reason = stop
    message = await ask(official, stream=stream, max_tokens=limit)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


async def test_a_choice_of_tools_and_a_schema_reach_the_engine(official, engine):
    choice = {"type": "tool", "name": "time"}
    await ask(official, stream=False, tools=[WEATHER, TIME], tool_choice=choice)
    form = str(engine.requests[0][1].structured_output)
    assert "time" in form
    assert "weather" not in form
    choice = {"type": "any", "disable_parallel_tool_use": True}
    await ask(official, stream=False, tools=[WEATHER, TIME], tool_choice=choice)
    assert "weather" in str(engine.requests[1][1].structured_output)
    body = {"output_config": {"format": {"type": "json_schema", "schema": CITY}}}
    await ask(official, stream=False, extra_body=body)
    assert "city" in str(engine.requests[2][1].structured_output)


async def test_disabled_thinking_is_told_to_the_template(client, engine):
    fields = {"messages": HELLO, "max_tokens": 5, "thinking": {"type": "disabled"}}
    await client.post(PATH, json=fields)
    assert "<enable_thinking=False>" in engine.tokenizer.decode(engine.requests[0][0])


async def test_the_effort_reaches_the_template(client, engine):
    fields = {"messages": HELLO, "max_tokens": 5, "output_config": {"effort": "low"}}
    await client.post(PATH, json=fields)
    assert "<reasoning_effort=low>" in engine.tokenizer.decode(engine.requests[0][0])


async def test_the_tokens_of_a_prompt_are_counted_without_an_answer(official, engine):
    count = await official.messages.count_tokens(
        model="stand-in", messages=HELLO, system="be brief", tools=[WEATHER]
    )
    assert count.input_tokens == 39
    assert not engine.requests


async def test_a_prompt_that_is_too_long_is_counted_too(client, engine):
    long = [{"role": "user", "content": "x" * 500}]
    counted = await client.post(f"{PATH}/count_tokens", json={"messages": long})
    assert counted.json() == {"input_tokens": 518}
    refused = await client.post(PATH, json={"messages": long, "max_tokens": 1})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


RESULT = {"type": "tool_result", "tool_use_id": "a"}
BLOCKS = "messages[0].content[0]"
FORM = {"type": "json_schema", "schema": {"type": "object"}}
BAD = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "system", "content": [RESULT]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, f"{BLOCKS}.type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, BLOCKS),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}]}, BLOCKS),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
        "messages[0]",
    ),
    ({"messages": [{"role": "user", "content": "REJECT"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, f"{BLOCKS}.text"),
    ({"messages": HELLO * 8193}, "messages"),
    ({"messages": [{"role": "user", "content": [RESULT] * 8193}]}, "messages"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10_000}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": [1]}, "stop_sequences[0]"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"mcp_servers": [{"url": "a"}]}, "mcp_servers"),
    ({"container": "a"}, "container"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"speed": "fast"}, "speed"),
    ({"output_config": {"format": {**FORM, "made_up": 1}}}, "output_config.format"),
    ({"tools": [WEATHER], "tool_choice": {"type": "auto", "made_up": 1}}, "tool_choice"),
    ({"made_up": 1}, "made_up"),
    ({"output_config": {"effort": "endless"}}, "output_config.effort"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
]


async def test_what_is_not_supported_is_refused_in_anthropics_form(client, engine):
    for fields, param in BAD:
        content = json.dumps({"messages": HELLO, "max_tokens": 5, **fields})
        response = await client.post(
            PATH, content=content, headers={"Content-Type": "application/json"}
        )
        body = response.json()
        assert response.status_code == 400, body
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["param"] == param, body
    assert not engine.requests


async def test_fields_without_effect_are_accepted(client):
    fields = {"metadata": {"user_id": "a"}, "service_tier": "auto", "mcp_servers": []}
    fields["speed"] = "standard"
    response = await client.post(PATH, json={"messages": HELLO, "max_tokens": 5, **fields})
    assert response.status_code == 200, response.text


async def test_errors_are_the_clients_own(official, engine):
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await ask(official, stream=False, model="other")
    stranger = official.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        await ask(stranger, stream=False)
    engine.overloaded = True
    with pytest.raises(anthropic.InternalServerError) as caught:
        await ask(official, stream=True)
    assert caught.value.body["error"]["type"] == "overloaded_error"


async def test_an_engine_that_dies_ends_the_stream_with_an_error_event(official, engine):
    engine.dies_after = 2
    with pytest.raises(anthropic.APIStatusError, match="restart the server"):
        await ask(official, stream=True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "secret"}, 200),
        ({"Authorization": "Bearer secret"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "secret", "Authorization": "Bearer wrong"}, 401),
        ({}, 401),
    ],
)
async def test_the_key_may_be_in_either_header(engine, headers, status):
    transport = httpx.ASGITransport(create_app(engine, ServerSettings(api_keys=["secret"])))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        body = {"messages": HELLO, "max_tokens": 5}
        response = await client.post(PATH, json=body, headers=headers)
        assert response.status_code == status
        if status == 401:
            assert response.json()["error"]["type"] == "authentication_error"


async def test_an_api_key_header_is_no_admin_key(engine):
    app = create_app(engine, ServerSettings(admin_keys=["boss"]))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        response = await client.get("/v1/admin/state", headers={"x-api-key": "boss"})
    assert response.status_code == 401


async def test_keys_of_both_headers_separate_cached_prefixes(engine):
    app = create_app(engine, ServerSettings(api_keys=["a", "b"], prefix_cache_per_key=True))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for headers in ({"x-api-key": "a"}, {"Authorization": "Bearer a"}, {"x-api-key": "b"}):
            await client.post(PATH, json={"messages": HELLO, "max_tokens": 5}, headers=headers)
    first, same, other = engine.salts
    assert first == same != other
