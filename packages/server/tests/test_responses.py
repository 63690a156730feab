"""``POST /v1/responses``, through the official client and as plain HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from stand_in_engine import BOS
from test_bad_input import assert_error
from test_tool_calls import ANSWER, QWEN

pytestmark = pytest.mark.asyncio

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY, "strict": False}
TIME = {"type": "function", "name": "time", "parameters": None, "strict": None}
CITIES = {
    "type": "namespace",
    "name": "mcp__cities",
    "description": "Of cities.",
    "tools": [WEATHER, {**TIME, "description": "The time."}],
}
PATH = "/v1/responses"


@pytest_asyncio.fixture
async def official(engine, serving):
    """A client of a server whose model writes calls and reasoning as Qwen 3 does."""
    engine.tokenizer.chat_template = QWEN
    engine.max_model_len = 4096
    async with (
        serving() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def respond(client, *, stream: bool, **fields: Any):
    """The response, whole or as the client accumulates it from the events."""
    request: dict[str, Any] = {"model": "stand-in", "input": "hello", **fields}
    if not stream:
        return await client.responses.create(**request)
    async with client.responses.stream(**request) as events:
        return await events.get_final_response()


async def event_types(client, **fields: Any) -> list[str]:
    stream = await client.responses.create(model="stand-in", stream=True, **fields)
    return [event.type async for event in stream]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_of_a_namespace_is_called_by_both_names(official, engine, stream):
    engine.script = [ANSWER.replace('"weather"', '"mcp__cities__weather"')]
    response = await respond(official, stream=stream, tools=[CITIES, TIME])
    first, second = (item for item in response.output if item.type == "function_call")
    assert (first.namespace, first.name) == ("mcp__cities", "weather")
    assert (second.namespace, second.name) == (None, "time")
    _, shown = engine.tokenizer.rendered[-1]
    functions = [tool["function"] for tool in shown]
    names = ["mcp__cities__weather", "mcp__cities__time", "time"]
    assert [function["name"] for function in functions] == names
    assert [function.get("description") for function in functions] == [
        "Of cities.", "The time.", None
    ]  # fmt: skip
    assert response.tools[0].tools[0].name == "weather"
    result = {"type": "function_call_output", "call_id": first.call_id, "output": "21"}
    await respond(official, stream=False, input=[first.to_dict(), result], tools=[CITIES])
    rendered, _ = engine.tokenizer.rendered[-1]
    assert rendered[0]["tool_calls"][0]["function"]["name"] == "mcp__cities__weather"


@pytest.mark.parametrize("name", ["weather", "mcp__cities__weather"])
async def test_a_tool_of_a_namespace_is_chosen_by_either_name(official, engine, name):
    engine.script = ['<tool_call>\n{"name": "mcp__cities__weather", "arguments": {}}\n</tool_call>']
    choice = {"type": "function", "name": name}
    response = await respond(official, stream=False, tools=[CITIES], tool_choice=choice)
    assert [(item.namespace, item.name) for item in response.output] == [("mcp__cities", "weather")]
    assert response.tool_choice.name == "weather"
    _, params, *_ = engine.requests[0]
    assert "mcp__cities__time" not in params.structured_output.grammar


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_what_the_model_read_and_wrote(official, engine, stream):
    engine.script = ["<think>so</think>It is."]
    wants = {"extra_body": {"enable_response_messages": True}}
    request: dict[str, Any] = {"model": "stand-in", "input": "hello", **wants}
    response = await official.responses.create(stream=stream, **request)
    if stream:
        *_, completed = [event async for event in response]
        response = completed.response
    prompt, tokens = "<bos>[user]hello[assistant]", [BOS, *b"[user]hello[assistant]"]
    read = {"type": "raw_message_tokens", "message": prompt, "tokens": tokens}
    assert response.input_messages == [read]
    (written,) = response.output_messages
    assert (written["message"], written["tokens"]) == ("<think>so</think>It is.", [97])
    plain = await respond(official, stream=stream)
    assert plain.input_messages is plain.output_messages is None
    hidden = await respond(official, stream=False, extra_body={
        "enable_response_messages": True, "include_reasoning": False
    })  # fmt: skip
    assert hidden.input_messages == [read]
    assert hidden.output_messages is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_is_answered(official, engine, stream):
    response = await respond(official, stream=stream, instructions="be brief", temperature=0.5)
    assert response.output_text == "[system]be brief[user]hello[assistant]"
    assert (response.status, response.error, response.store) == ("completed", None, False)
    assert response.id.startswith("resp_")
    assert response.temperature == 0.5
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (39, 38, 77)
    assert usage.input_tokens_details.cached_tokens == 1
    assert usage.output_tokens_details.reasoning_tokens == 0
    _, params, *_ = engine.requests[0]
    assert params.temperature == 0.5


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_text_and_calls_are_items_in_their_order(official, engine, stream):
    engine.script = list(ANSWER)
    response = await respond(official, stream=stream, tools=[WEATHER, TIME])
    reasoning, message, weather, time = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content[0].text == "Paris?"
    assert message.content[0].text == "I look."
    assert (weather.name, weather.arguments) == ("weather", '{"city": "Paris"}')
    assert (time.name, time.arguments) == ("time", "{}")
    assert weather.call_id.startswith("call_")
    assert weather.call_id != time.call_id
    assert len({item.id for item in response.output}) == 4
    # the markers, the text between them, and the line feeds around it
    assert response.usage.output_tokens_details.reasoning_tokens in range(
        len("<think>\nParis?"), ANSWER.index("I look.") + 1
    )


async def test_the_form_of_the_text_is_that_of_chat(client, engine):
    for kind in ("text", "json_object"):
        body = {"input": "a", "text": {"format": {"type": kind}}}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
    plain, as_json = (params.structured_output for _, params, *_ in engine.requests)
    assert plain is None
    assert as_json.json_object


async def test_the_events_of_a_stream_come_in_the_documented_order(official, engine):
    engine.script = ["<think>a", "</think>", "b", "c", '<tool_call>{"name": "time", ']
    engine.script = [*engine.script, '"arguments": {}}</tool_call>']
    assert await event_types(official, input="hello", tools=[TIME]) == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
        *("response.reasoning_text.delta", "response.reasoning_text.done"),
        *("response.content_part.done", "response.output_item.done"),
        *("response.output_item.added", "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.delta"),
        *("response.output_text.done", "response.content_part.done"),
        "response.output_item.done",
        *("response.output_item.added", "response.function_call_arguments.delta"),
        *("response.function_call_arguments.done", "response.output_item.done"),
        "response.completed",
    ]


async def test_each_event_has_its_number_and_refers_to_its_item(official, engine):
    engine.script = list(ANSWER)
    stream = await official.responses.create(
        model="stand-in", input="hello", tools=[WEATHER, TIME], stream=True
    )
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    items = {e.item.id: e.output_index for e in events if e.type == "response.output_item.added"}
    assert list(items.values()) == [0, 1, 2, 3]
    texts = [event for event in events if hasattr(event, "item_id")]
    assert texts
    assert all(items[event.item_id] == event.output_index for event in texts)
    begun = next(
        e.item for e in events if getattr(getattr(e, "item", None), "name", 0) == "weather"
    )
    assert begun.arguments == ""
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"city": "Paris"}{}'


async def test_the_output_of_a_response_is_the_input_of_the_next(official, engine):
    engine.script = list(ANSWER)
    response = await respond(official, stream=False, tools=[WEATHER, TIME])
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"{item.name}!"}
        for item in response.output
        if item.type == "function_call"
    ]
    items = [{"role": "user", "content": "hello"}, *response.output, *results]
    await respond(official, stream=False, input=items, tools=[WEATHER, TIME])
    messages, tools = engine.tokenizer.rendered[-1]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    answer = messages[1]
    assert (answer["content"], answer["reasoning_content"]) == ("I look.", "Paris?")
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["weather", "time"]
    assert answer["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert [(m["name"], m["content"]) for m in messages[2:]] == [
        ("weather", "weather!"),
        ("time", "time!"),
    ]
    assert [tool["function"]["name"] for tool in tools] == ["weather", "time"]


async def test_answers_in_a_row_stay_messages_of_their_own(client, engine):
    said = [{"role": "assistant", "content": [{"type": "output_text", "text": t}]} for t in "ab"]
    items = [{"role": "developer", "content": "c"}, *said, {"type": "reasoning", "summary": []}]
    response = await client.post(PATH, json={"input": items})
    assert response.status_code == 200, response.text
    messages, _ = engine.tokenizer.rendered[-1]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "c"),
        *(("assistant", text) for text in ("a", "b", "")),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_max_output_tokens_cuts_is_incomplete(official, engine, stream):
    fields = {"input": "hello", "max_output_tokens": 4}
    if stream:
        events = await official.responses.create(model="stand-in", stream=True, **fields)
        last = [event async for event in events][-1]
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = await official.responses.create(model="stand-in", **fields)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "[use"
    assert response.output[0].status == "incomplete"
    assert engine.requests[0][1].max_tokens == 4


async def test_effort_and_template_options_reach_the_template(official, engine):
    response = await official.responses.create(
        model="stand-in",
        input="hello",
        reasoning={"effort": "low", "summary": "auto"},
        extra_body={"chat_template_kwargs": {"mood": "calm"}},
    )
    assert "<reasoning_effort=low>" in engine.tokenizer.decode(engine.requests[0][0])
    assert "<mood=calm>" in engine.tokenizer.decode(engine.requests[0][0])
    assert response.reasoning.effort == "low"


async def test_a_required_call_and_a_schema_reach_the_engine(official, engine):
    schema = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    response = await respond(official, stream=False, text={"format": schema})
    assert json.loads(engine.requests[0][1].structured_output.json_schema or "null") == CITY or (
        "city" in str(engine.requests[0][1].structured_output)  # behind the reasoning
    )
    assert response.text.format.type == "json_schema"
    named = {"type": "function", "name": "time"}
    response = await respond(official, stream=False, tools=[WEATHER, TIME], tool_choice=named)
    form = str(engine.requests[1][1].structured_output)
    assert "time" in form
    assert "weather" not in form
    assert response.tool_choice.name == "time"
    assert [tool.name for tool in response.tools] == ["weather", "time"]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


NAMED = {"type": "function", "name": "weather"}
DEEP = {"type": "json_schema", "name": "a", "schema": nested(64)}
BAD = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"background": True, "store": False}, "background"),
    ({"background": True, "stream": True}, "stream"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"reasoning": {"effort": "endless"}}, "reasoning.effort"),
    ({"reasoning": {"mode": "pro"}}, "reasoning"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"text": {"verbosity": "low"}}, "text"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"text": {"format": {"type": "text", "made_up": 1}}}, "text.format"),
    ({"tool_choice": {**NAMED, "mode": "auto"}, "tools": [WEATHER]}, "tool_choice"),
    ({"made_up": 1}, "made_up"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
    ({"input": [{"role": "user"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "input[0]"),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "["}]},
        "input[0]",
    ),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0]"),
    ({"input": "REJECT"}, "input"),
    ({"input": "x" * 300}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10_000}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": "1"}, "top_p"),
    ({"metadata": {"a": "\ud800"}}, "metadata.a"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0]"),
    ({"tools": [{**CITIES, "tools": []}]}, "tools[0]"),
    ({"tools": [{**CITIES, "tools": [CITIES]}]}, "tools[0]"),
    ({"tools": [{**CITIES, "parameters": CITY}]}, "tools[0]"),
    ({"tools": [{**WEATHER, "tools": [TIME]}]}, "tools[0]"),
    ({"tools": [CITIES, {**CITIES, "name": "n"}], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [WEATHER]}, "tool_choice"),  # no tool parser
    ({"tools": [{**WEATHER, "parameters": nested(64)}]}, "tools[0].parameters"),
    ({"text": {"format": DEEP}}, "text.format.schema"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"input": [{"role": "user", "content": ""}] * 8193}, "input"),
    ({"text": {"format": {"type": "text", "schema": {"type": "object"}}}}, "text.format"),
]


async def test_what_is_not_supported_is_refused_by_the_name_that_was_sent(client, engine):
    for fields, param in BAD:
        content = json.dumps({"input": "hello", **fields})
        response = await client.post(
            PATH, content=content, headers={"Content-Type": "application/json"}
        )
        assert_error(response, 400, param)
    assert not engine.requests


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"format": {"type": "json_object", "grammar": "a"}}},
        {"tools": [WEATHER], "tool_choice": {**NAMED, "grammar": "a"}},
    ],
)
async def test_an_unknown_key_inside_of_a_field_is_refused_by_its_name(client, fields):
    response = await client.post(PATH, json={"input": "hello", **fields})
    assert response.status_code == 400
    assert "grammar is not supported by this server" in response.json()["error"]["message"]


async def test_a_deep_schema_is_repeated(client):
    tool = {**WEATHER, "parameters": nested(63)}
    body = {"input": "hello", "tools": [tool], "tool_choice": "none"}
    response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["tools"][0]["parameters"] == nested(63)


async def test_fields_without_effect_are_accepted(client):
    fields = {
        "store": False,
        "background": False,
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": None, "summary": None},
        "text": {"verbosity": "medium"},
        "previous_response_id": None,
        "service_tier": "auto",
        "top_logprobs": 0,
        "user": "me",
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit"},
        "stream_options": {"include_obfuscation": False},
        "metadata": {"a": "b"},
    }
    response = await client.post(PATH, json={"input": "hello", **fields})
    assert response.status_code == 200, response.text
    assert response.json()["metadata"] == {"a": "b"}
    assert response.json()["service_tier"] == "default"


async def test_an_engine_that_dies_ends_the_stream_with_the_failed_response(url, engine):
    engine.dies_after = 3
    async with httpx.AsyncClient(base_url=url) as client:
        text = (await client.post(PATH, json={"input": "hello", "stream": True})).text
    *_, error, failed, end = text.split("\n\n")
    assert end == ""
    assert error.startswith("event: error\n")
    assert json.loads(error.partition("data: ")[2])["code"] == "engine_dead"
    response = json.loads(failed.partition("data: ")[2])["response"]
    assert response["status"] == "failed"
    assert response["error"]["code"] == "engine_dead"
    assert response["output"][0]["content"][0]["text"] == "[us"
    assert response["output"][0]["status"] == "incomplete"


async def test_errors_are_the_clients_own(official, engine):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await respond(official, stream=False, model="other")
    engine.overloaded = True
    with pytest.raises(openai.InternalServerError) as caught:
        await respond(official, stream=True)
    assert caught.value.code == "engine_overloaded"


async def test_a_salt_reaches_the_engine(client, engine):
    await client.post(PATH, json={"input": "hello", "cache_salt": "s"})
    assert engine.salts == ["s"]
