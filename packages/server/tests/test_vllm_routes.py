"""Routes of vLLM's server that OpenAI has not: batches, Cohere's embeddings, SageMaker's path."""

from __future__ import annotations

import base64
import json

import httpx
import numpy as np
import pytest
from test_bad_input import assert_error

from trencadis.engine import TextPrompts
from trencadis.server import ServerSettings, create_app

pytestmark = pytest.mark.asyncio

HELLO = [{"role": "user", "content": "hello"}]
BYE = [{"role": "user", "content": "bye"}]
BATCH = "/v1/chat/completions/batch"


async def test_several_conversations_are_answered(client, engine):
    answer = await client.post(
        BATCH, json={"model": "stand-in", "messages": [HELLO, BYE], "temperature": 0.5}
    )
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [choice["message"]["content"] for choice in choices] == [
        "[user]hello[assistant]",
        "[user]bye[assistant]",
    ]
    assert answer.json()["usage"]["prompt_tokens"] == 44
    assert {params.temperature for _, params, *_ in engine.requests} == {0.5}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HELLO}, "messages[0]"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": [HELLO * 5000, BYE * 5000]}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{}]}, "tools"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"temperature": 9}, "temperature"),
        ({"messages": [HELLO, [{"role": "user", "content": "a" * 300}]]}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_bad_batch_is_named(client, engine, fields, param):
    response = await client.post(BATCH, json={"messages": [HELLO, BYE], **fields})
    assert_error(response, 400, param)
    assert not engine.requests


async def test_the_load(client, engine):
    assert (await client.get("/load")).json() == {"server_load": 0}


@pytest.fixture
def embedding(engine):
    engine.embedding_size = 8
    engine.text_prompts = TextPrompts({"search_query": "Q: "})
    return engine


async def openai_vectors(client, **fields):
    answer = (await client.post("/v1/embeddings", json=fields)).json()
    return [each["embedding"] for each in answer["data"]]


async def test_pooling_gives_the_embeddings(embedding, client):
    expected = await openai_vectors(client, input=["ab", "c"], dimensions=4)
    body = {"input": ["ab", "c"], "dimensions": 4, "task": "embed"}
    answer = (await client.post("/pooling", json=body)).json()
    assert answer["object"] == "list"
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["data"] == [
        {"object": "pooling", "index": index, "data": vector}
        for index, vector in enumerate(expected)
    ]
    answer = (await client.post("/pooling", json={**body, "encoding_format": "base64"})).json()
    sent = base64.b64decode(answer["data"][1]["data"])
    assert np.frombuffer(sent, "<f4").tolist() == pytest.approx(expected[1])


async def test_cohere_embeddings(embedding, client):
    texts = ["ab", "c"]
    expected = await openai_vectors(client, input=texts)
    forms = ["float", "base64", "binary", "ubinary"]
    answer = await client.post("/v2/embed", json={"texts": texts, "embedding_types": forms})
    answer = answer.json()
    found = answer["embeddings"]
    assert found["float"] == expected
    assert np.frombuffer(base64.b64decode(found["base64"][0]), "<f4").tolist() == pytest.approx(
        expected[0]
    )
    assert found["ubinary"] == [[255], [255]], "no number is negative"
    assert found["binary"] == [[127], [127]]
    assert answer["texts"] == texts
    assert answer["meta"]["billed_units"] == {"input_tokens": 5, "image_tokens": 0}
    assert answer["response_type"] == "embeddings_by_type"
    shorter = (await client.post("/v2/embed", json={"texts": ["c"], "output_dimension": 2})).json()
    assert shorter["embeddings"] == {"float": await openai_vectors(client, input="c", dimensions=2)}


async def test_cohere_texts_are_cut_and_have_their_prompt(embedding, client):
    body = {"texts": ["a" * 300], "input_type": "search_query", "max_tokens": 6}
    await client.post("/v2/embed", json=body)
    assert bytes(embedding.requests[0][0][1:]) == b"Q: aa"
    await client.post("/v2/embed", json={"texts": ["a" * 300]})
    assert len(embedding.requests[1][0]) == embedding.max_model_len
    body = {"texts": ["abcdef"], "max_tokens": 3, "truncate": "START"}
    await client.post("/v2/embed", json=body)
    assert bytes(embedding.requests[2][0][1:]) == b"ef"
    for fields, param in (
        ({"truncate": "NONE"}, "texts[0]"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"input_type": "other"}, "input_type"),
        ({"output_dimension": 9}, "output_dimension"),
        ({"output_dimension": 4, "embedding_types": ["binary"]}, "embedding_types"),
        ({"embedding_types": ["int8"]}, "embedding_types[0]"),
        ({"images": ["data:"]}, "images"),
    ):
        response = await client.post("/v2/embed", json={"texts": ["a" * 300], **fields})
        assert_error(response, 400, param)
        if param == "input_type":
            assert "Unsupported input_type 'other'" in response.text


async def assert_invoked(client, path, body):
    """The answer of /invocations is that of the path."""
    answers = [await client.post(each, json=body) for each in (path, "/invocations")]
    own, invoked = ({**each.json(), "id": "", "created": 0} for each in answers)
    assert answers[0].status_code == 200
    assert invoked == own


async def test_an_invocation_is_a_request_to_generate(client):
    await assert_invoked(client, "/v1/chat/completions", {"messages": HELLO})
    await assert_invoked(client, "/v1/completions", {"prompt": "a", "max_tokens": 3})


async def test_an_invocation_is_a_request_for_embeddings_or_scores(embedding, client):
    await assert_invoked(client, "/v1/embeddings", {"input": "a"})
    await assert_invoked(client, "/v1/score", {"text_1": "a", "text_2": ["a", "b"]})
    await assert_invoked(client, "/v1/score", {"queries": "a", "documents": ["a", "b"]})
    await assert_invoked(client, "/v1/rerank", {"query": "a", "documents": ["a", "b"]})


async def test_an_invocation_of_no_kind_is_an_error(client):
    assert_error(await client.post("/invocations", json={"model": "stand-in"}), 400, None)
    assert_error(await client.post("/invocations", json=[]), 400, None)
    bad = await client.post("/invocations", json={"prompt": "a", "top_p": 2})
    assert bad.json()["error"]["param"] == "top_p"


@pytest.mark.parametrize("path", ["/pooling", "/v2/embed", "/invocations", BATCH])
async def test_the_routes_need_a_key(serving, engine, path):
    async with serving(api_keys=["secret"]) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.post(path, json={})).status_code == 401
        assert (await client.get("/load")).status_code == 200


@pytest.mark.parametrize("root", ["/llm", "/v", "/v1"])
async def test_a_proxy_may_add_a_prefix_or_leave_it_on(engine, root):
    settings = ServerSettings(root_path=root, api_keys=["secret"])
    transport = httpx.ASGITransport(create_app(engine, settings))
    key = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        description = (await client.get("/openapi.json")).json()
        assert description["servers"] == [{"url": root}]
        # /v1/models below /v1 is the path /models, which there is not.
        paths = {f"{root}/v1/models", "/v1/models"} - ({"/v1/models"} if root == "/v1" else set())
        for path in paths:
            assert (await client.get(path)).status_code == 401, path
            assert (await client.get(path, headers=key)).status_code == 200, path


async def test_token_counts_that_an_operator_wants_in_every_event(engine, serving):
    async with (
        serving(enable_force_include_usage=True) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        for path, prompt in (
            ("chat/completions", {"messages": HELLO}),
            ("completions", {"prompt": "a"}),
        ):
            body = {**prompt, "stream": True, "max_tokens": 2, "stream_options": None}
            answer = await client.post(f"/v1/{path}", json=body)
            events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
            assert len(events) > 1
            assert all(json.loads(each)["usage"]["prompt_tokens"] for each in events)
            whole = await client.post(f"/v1/{path}", json={**body, "stream": False})
            assert whole.status_code == 200
        answer = await client.post("/v1/responses", json={"input": "a", "stream": True})
        assert "response.completed" in answer.text
