"""Chat completions: the arguments of the engine, and the response."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.asyncio

HELLO = [{"role": "user", "content": "hello"}]


def events(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def chat(client, **fields):
    response = await client.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    return response


async def test_an_answer_has_the_shape_of_openai(client, engine):
    response = await chat(client, model="stand-in")
    answer = response.json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "stand-in"
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "[user]hello[assistant]",
        **dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning")),
    }
    assert choice["token_ids"] is None
    assert {answer[name] for name in ("prompt_logprobs", "prompt_token_ids")} == {None}
    assert choice["finish_reason"] == "stop"
    assert choice["index"] == 0
    assert choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": 23,
        "completion_tokens": 22,
        "total_tokens": 45,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert response.headers["x-request-id"] == answer["id"]


async def test_the_default_limit_is_the_rest_of_the_context(client, engine):
    await chat(client)
    prompt, params, _, _ = engine.requests[0]
    assert params.max_tokens == engine.max_model_len - len(prompt)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
    ],
)
async def test_both_names_of_the_limit_are_accepted(client, engine, fields, expected):
    answer = (await chat(client, **fields)).json()
    assert engine.requests[0][1].max_tokens == expected
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_every_sampling_field_reaches_the_engine(client, engine):
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 42,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "min_tokens": 3,
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    await chat(client, **given, stop="end", logit_bias={"65": -100}, priority=0)
    _, params, *_ = engine.requests[0]
    for name, value in given.items():
        sent = getattr(params, name)
        assert (list(sent) if isinstance(sent, tuple) else sent) == value, name
    assert params.stop == ("end",)
    assert params.logit_bias == {65: -100.0}


async def test_several_samples_are_several_choices(client):
    answer = (await chat(client, n=3, max_tokens=4)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 12


async def test_text_parts_are_joined_and_developer_becomes_system(client, engine):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": None, "refusal": None},
    ]
    await chat(client, messages=messages)
    assert engine.tokenizer.decode(engine.requests[0][0]) == (
        "[system]be brief[user]a\nb[assistant]c[assistant]"
    )


async def test_template_options_reach_the_template(client, engine):
    await chat(client, continue_final_message=True, chat_template_kwargs={"mood": "calm"})
    assert engine.tokenizer.decode(engine.requests[0][0]) == "[user]hello<mood=calm>"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"reasoning_effort": "low"}, "<reasoning_effort=low><enable_thinking=True>"),
        ({"reasoning_effort": "none"}, "<reasoning_effort=none><enable_thinking=False>"),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            "<reasoning_effort=high><enable_thinking=False>",
        ),
        ({"reasoning_effort": None}, ""),
    ],
)
async def test_the_effort_of_reasoning_reaches_the_template(client, engine, fields, text):
    assert (await chat(client, **fields)).status_code == 200
    assert engine.tokenizer.decode(engine.requests[0][0]) == f"[user]hello{text}[assistant]"


async def test_a_stream_has_the_role_then_text_then_the_finish_reason(client):
    response = await chat(client, stream=True, max_tokens=3)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "["},
        {"content": "u"},
        {"content": "s"},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "length"]
    assert not any("usage" in chunk for chunk in chunks)


async def test_a_stream_ends_with_token_counts_under_include_usage(client):
    options = {"include_usage": True}
    response = await chat(client, stream=True, stream_options=options, max_tokens=3)
    *chunks, last = events(response.text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 3


async def test_every_event_has_token_counts_under_continuous_usage_stats(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await chat(client, stream=True, stream_options=options, max_tokens=3)
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(response.text)]
    assert counts == [0, 1, 2, 3, 3], "the first has the role and no token"


async def test_streamed_choices_have_their_index(client):
    chunks = events((await chat(client, stream=True, n=2, max_tokens=2)).text)
    texts = {0: "", 1: ""}
    roles = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if "role" in choice["delta"]:
            roles.append(choice["index"])
    assert texts == {0: "[u", 1: "[u"}
    assert sorted(roles) == [0, 1]


async def test_streamed_and_complete_answers_are_equal(client):
    whole = (await chat(client, max_tokens=20)).json()["choices"][0]["message"]["content"]
    chunks = events((await chat(client, stream=True, max_tokens=20)).text)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_report_the_chosen_and_the_most_probable_tokens(client, stream):
    response = await chat(client, logprobs=True, top_logprobs=2, max_tokens=1, stream=stream)
    if stream:
        logprobs = events(response.text)[1]["choices"][0]["logprobs"]
    else:
        logprobs = response.json()["choices"][0]["logprobs"]
    (position,) = logprobs["content"]
    assert logprobs["refusal"] is None, "OpenAI's description requires it"
    assert position["token"] == "["  # noqa: S105
    assert position["bytes"] == [91]
    assert position["logprob"] == -9999.0  # minus infinity, in JSON
    assert [top["token"] for top in position["top_logprobs"]] == ["A", "B"]
    assert position["top_logprobs"][0]["logprob"] == -1.0


async def test_the_bytes_of_parts_of_a_character_make_the_character(client):
    messages = [{"role": "user", "content": "\u00e9"}]
    answer = (await chat(client, messages=messages, logprobs=True, max_tokens=8)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [position["bytes"] for position in content[-2:]] == [[0xC3], [0xA9]]
    assert (
        bytes(byte for position in content for byte in position["bytes"]).decode() == "[user]\u00e9"
    )


async def test_logprobs_without_top_logprobs_report_the_chosen_token(client, engine):
    answer = (await chat(client, logprobs=True, max_tokens=1)).json()
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert engine.requests[0][1].logprobs == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "someone", "metadata": {"a": "b"}, "store": True},
        {"verbosity": "medium", "prompt_cache_options": {"mode": "explicit"}},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"},
        {"tools": None, "temperature": None, "n": None, "stop": None, "stream": None},
        {"something_new": 1},
    ],
)
async def test_unsupported_fields_without_effect_are_accepted(client, fields):
    await chat(client, **fields)


WITHOUT_EFFECT = {
    **dict.fromkeys(("audio", "prediction", "web_search_options", "moderation"), None),
    **dict.fromkeys(("chat_template", "guided_whitespace_pattern"), None),
    **dict.fromkeys(("mm_processor_kwargs", "prompt_embeds"), None),
    **dict.fromkeys(("repetition_detection", "vllm_xargs"), None),
    **{name: [] for name in ("functions", "logits_processors")},
    "watermarking": False,
    "function_call": "none",
    "modalities": ["text"],
    "verbosity": "medium",
    "spaces_between_special_tokens": True,
    "stream_interval": 1,
    "thinking_token_budget": -1,
}
"""Fields that are not supported, each with the value that asks for nothing."""


async def test_a_field_that_is_not_supported_may_ask_for_nothing(client, engine):
    await chat(client, **WITHOUT_EFFECT)
    await chat(client, **dict.fromkeys(WITHOUT_EFFECT))
    for name, nothing in WITHOUT_EFFECT.items():
        something = {bool: not nothing, int: 7, str: "high", list: ["x"]}.get(type(nothing), "x")
        body = {"messages": HELLO, name: something}
        response = await client.post("/v1/chat/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, name)
        assert error["message"] == f"{name} is not supported by this server: leave it out"
    assert len(engine.requests) == 2


@pytest.mark.parametrize("tier", ["auto", "default"])
async def test_an_answer_names_the_service_tier_if_the_request_does(client, tier):
    assert (await chat(client, service_tier=tier)).json()["service_tier"] == "default"
    chunks = events((await chat(client, service_tier=tier, stream=True)).text)
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}
    assert (await chat(client)).json()["service_tier"] is None


async def test_unknown_fields_are_logged(client, caplog):
    caplog.set_level("DEBUG", "trencadis.server")
    await chat(client, something_new=1, user="someone")
    assert "something_new" in caplog.text
    assert "user" not in caplog.text.replace("trencadis.server", "")
