"""Bodies of megabytes are checked beside the event loop, and lengths before elements."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter

import httpx
import pytest

from trencadis.server.api.messages import CountTokensRequest, MessagesRequest
from trencadis.server.api.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from trencadis.server.api.protocol import ChatCompletionRequest, CompletionRequest
from trencadis.server.api.responses import ResponsesRequest
from trencadis.server.http import json_body

JSON = {"Content-Type": "application/json"}
SIZE = 4_000_000
KEYS = ",".join(f'"{number:06d}":1' for number in range(SIZE // 11))

HOSTILE = {
    "prompts": ('{"prompt":[' + ",".join(["[1]"] * (SIZE // 4)) + "]}", None, "values"),
    "stop tokens": (
        '{"prompt":"a","stop_token_ids":[' + ",".join("1" * (SIZE // 2 - 20)) + "]}",
        "stop_token_ids",
        "4096",
    ),
    "unknown keys": (f'{{"prompt":"a",{KEYS}}}', None, "values"),
    "biases": (f'{{"prompt":"a","logit_bias":{{{KEYS}}}}}', None, "values"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_body_is_work_of_another_thread_than_the_event_loop(client, engine, name):
    body, param, reason = HOSTILE[name]
    await client.post("/v1/completions", json={"prompt": "a"})  # imports what the first one needs
    in_loop_s, in_all_s = time.thread_time(), time.process_time()
    response = await client.post("/v1/completions", content=body, headers=JSON)
    in_loop_s, in_all_s = time.thread_time() - in_loop_s, time.process_time() - in_all_s
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert reason in error["message"]
    assert len(engine.requests) == 1
    assert in_loop_s < in_all_s / 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[65, 66]], "metadata": ["x" * 20_000], "max_tokens": 2}),
        ("/v1/completions", {"prompt": [[7] * 200] * 100, "max_tokens": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "user": "x" * 300_000},
        ),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 2,
                "metadata": {"user_id": "x" * 20_000},
            },
        ),
        ("/v1/responses", {"input": "hi", "user": "x" * 20_000}),
    ],
)
async def test_a_long_body_is_answered_as_a_short_one(client, path, body):
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.asyncio
async def test_a_long_body_is_checked_in_another_thread_and_a_short_one_is_not(client, monkeypatch):
    threads = []
    validate = CompletionRequest.model_validate
    monkeypatch.setattr(
        CompletionRequest,
        "model_validate",
        lambda value: (threads.append(threading.current_thread()), validate(value))[1],
    )
    for length in (10, 20_000, 300_000):
        body = {"prompt": "a", "user": "x" * length}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False]


@pytest.mark.asyncio
async def test_malformed_long_bodies_are_errors_of_the_client(client):
    for broken in ('{"prompt": "a", ' + " " * 20_000, "[" * 20_000, '"' + "x" * 20_000 + '"'):
        response = await client.post("/v1/completions", content=broken, headers=JSON)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.asyncio
async def test_long_bodies_that_wait_for_their_check_have_a_bound(serving, monkeypatch):
    may_go_on = threading.Event()
    decoded = json_body.decoded
    monkeypatch.setattr(
        json_body, "decoded", lambda *given: (may_go_on.wait(60), decoded(*given))[1]
    )
    body = json.dumps({"prompt": "a", "user": "x" * 30_000}).encode()
    async with (
        serving(max_body_size=32_768) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers=JSON) as client,
    ):
        requests = [
            asyncio.create_task(client.post("/v1/completions", content=body)) for _ in range(40)
        ]
        done, _ = await asyncio.wait(requests, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert {(await each).status_code for each in done} == {503}
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        may_go_on.set()
        statuses = [(await each).status_code for each in requests]
    assert statuses.count(200) >= 16
    assert set(statuses) == {200, 503}


def unbounded_lists(schema, where):
    """Lists in a schema of pydantic that check each item of a list of any length."""
    if isinstance(schema, dict):
        if schema.get("type") == "model":
            where = schema["cls"].__name__
        items = schema.get("items_schema", {})
        is_bounded = "max_length" in schema or (
            schema.get("fail_fast") and items.get("type") not in ("int", "float")
        )
        if schema.get("type") == "list" and not is_bounded:
            yield f"{where}: {items.get('type')}"
        for name, part in schema.items():
            if name not in ("serialization", "json_schema_input_schema"):
                yield from unbounded_lists(part, where)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            yield from unbounded_lists(part, where)


@pytest.mark.parametrize(
    "model",
    [
        ChatCompletionRequest,
        CompletionRequest,
        CountTokensRequest,
        EmbeddingRequest,
        MessagesRequest,
        RerankRequest,
        ResponsesRequest,
        ScoreRequest,
    ],
)
def test_no_list_of_a_request_makes_an_error_for_each_of_its_items(model):
    assert list(unbounded_lists(model.__pydantic_core_schema__, model.__name__)) == []


@pytest.mark.asyncio
async def test_a_thousand_prompts_are_sent_in_many_turns_of_the_event_loop(client, engine):
    """And what they share, such as thousands of token ids, is checked once."""
    turns, turn = [], 0
    generate = engine.generate

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def counted(request):
        turns.append(turn)
        return generate(request)

    engine.generate = counted
    counting = asyncio.create_task(count())
    body = {"prompt": [f"{n:04}" for n in range(1024)], "max_tokens": 1}
    body |= {"stop_token_ids": list(range(256)), "logit_bias": {str(n): 0.5 for n in range(256)}}
    try:
        response = await client.post("/v1/completions", json=body)
    finally:
        counting.cancel()
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(1024))
    assert len(turns) == 1024
    assert max(Counter(turns).values()) <= 128
    assert len({id(params.logit_bias) for _, params, _, _ in engine.requests}) == 1
