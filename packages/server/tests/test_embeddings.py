"""``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank``. The stand-in's embeddings count letters."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import attrs
import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
from server_process import ServerProcess, save_tiny_model
from stand_in_engine import BOS
from switching_engine import SwitchingStandIn

from trencadis.engine import EngineConfig, EngineOverloaded, ModelEntry, PoolingRequest
from trencadis.server import ServerSettings, create_app
from trencadis.server.api.pooling import (
    EmbeddingList,
    EmbeddingRequest,
    RerankList,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from trencadis.server.generation import embedding_run

pytestmark = pytest.mark.asyncio

SIZE = 32


@pytest.fixture(autouse=True)
def embeds(engine):
    engine.embedding_size = SIZE


@pytest_asyncio.fixture
async def official(url):
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def vector(text: str, size: int = SIZE) -> np.ndarray:
    """What the stand-in computes for a text."""
    counts = np.bincount([token % SIZE for token in (BOS, *text.encode())], minlength=SIZE)
    return counts[:size] / np.linalg.norm(counts[:size])


async def embed(client, **fields: Any) -> list[Any]:
    response = await client.post("/v1/embeddings", json=fields)
    assert response.status_code == 200, response.text
    body = EmbeddingList.model_validate(response.json())
    assert [each.index for each in body.data] == list(range(len(body.data)))
    return [each.embedding for each in body.data]


async def refusal(client, path: str = "/v1/embeddings", **fields: Any) -> dict[str, Any]:
    response = await client.post(path, json=fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


# Embeddings.


@pytest.mark.parametrize("encoding", [openai.omit, "float", "base64"])
async def test_the_official_client_reads_embeddings_in_the_order_of_its_inputs(official, encoding):
    texts = ["hello", "world", "a"]
    answer = await official.embeddings.create(
        model="stand-in", input=texts, encoding_format=encoding, user="me"
    )
    assert answer.model == "stand-in"
    for item, text in zip(answer.data, texts, strict=True):
        numbers = item.embedding
        if encoding == "base64":
            numbers = np.frombuffer(base64.b64decode(numbers), "<f4")
        assert np.allclose(numbers, vector(text), atol=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 6 + 6 + 2


async def test_inputs_are_texts_and_token_ids(client, engine):
    (alone,) = await embed(client, input="ab")
    tokens = [BOS, *b"ab"]
    assert await embed(client, input=["ab", "ab"]) == [alone, alone]
    assert await embed(client, input=tokens) == [alone]
    assert await embed(client, input=[tokens, tokens[:2]]) == [
        alone,
        *(await embed(client, input="a")),
    ]
    assert await embed(client, input="ab", add_special_tokens=False) != [alone]
    assert all(params == PoolingRequest.params for _, params, _, _ in engine.requests)


async def test_cached_tokens_are_those_of_all_inputs(client, engine, monkeypatch):
    embedded = engine._embedded

    def cached(key: str, prompt: Sequence[int]) -> Any:
        return attrs.evolve(embedded(key, prompt), num_cached_tokens=len(prompt) - 1)

    monkeypatch.setattr(engine, "_embedded", cached)
    for path, fields in (
        ("/v1/embeddings", {"input": ["a", "abc", "ab"]}),
        ("/v1/score", {"text_1": "a", "text_2": ["abc", "ab"]}),
        ("/v1/rerank", {"query": "a", "documents": ["abc", "ab"]}),
    ):
        usage = (await client.post(path, json=fields)).json()["usage"]
        assert usage["prompt_tokens"] == usage["total_tokens"] == 2 + 4 + 3
        assert usage["prompt_tokens_details"]["cached_tokens"] == 1 + 3 + 2


async def test_shorter_embeddings_have_length_1_too(client):
    (numbers,) = await embed(client, input="abc", dimensions=4)
    assert np.allclose(numbers, vector("abc", 4), atol=1e-6)
    (text,) = await embed(client, input="abc", dimensions=4, encoding_format="base64")
    assert np.allclose(np.frombuffer(base64.b64decode(text), "<f4"), numbers)
    error = await refusal(client, input="abc", dimensions=SIZE + 1)
    assert error["param"] == "dimensions"


async def test_an_input_may_take_all_of_the_context_and_no_token_more(client, engine):
    await embed(client, input=["a", "b" * 255])
    error = await refusal(client, input=["a", "b" * 256])
    assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")
    assert "257 tokens: this model's maximum context length is 256" in error["message"]
    assert "Please reduce the length of the input prompt" in error["message"]
    error = await refusal(client, input=["a", "b" * 10_000])
    assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")
    assert len(engine.requests) == 2


async def test_long_inputs_are_cut_at_their_end_where_the_client_wants_it(client, engine):
    for limit, length in ((3, 3), (-1, 256), (256, 256)):
        await embed(client, input="b" * 300, truncate_prompt_tokens=limit)
        assert len(engine.requests[-1][0]) == length
        assert engine.requests[-1][0][0] == BOS
    await embed(client, input=[list(b"abcd")], truncate_prompt_tokens=2)
    assert engine.requests[-1][0] == list(b"ab")
    error = await refusal(client, input="a", truncate_prompt_tokens=257)
    assert error["param"] == "truncate_prompt_tokens"
    assert "Please request a smaller truncation size" in error["message"]


async def test_a_cut_input_keeps_the_special_token_at_its_end(client, engine):
    """Models that pool the last token were trained with it."""
    end = 7

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([BOS] * add_special_tokens), *text.encode(), *([end] * add_special_tokens)]

    engine.tokenizer.encode = encode
    await embed(client, input="abcdef", truncate_prompt_tokens=4)
    assert engine.requests[-1][0] == [BOS, *b"ab", end]
    await embed(client, input="abcdef", truncate_prompt_tokens=2)
    assert engine.requests[-1][0] == [BOS, *b"a"]
    await embed(client, input="abcdef", truncate_prompt_tokens=2, add_special_tokens=False)
    assert engine.requests[-1][0] == [*b"ab"]
    left = {"input": "abcdef", "truncation_side": "left"}
    for limit, kept in ((4, [BOS, *b"ef", end]), (3, [BOS, *b"f", end]), (2, [*b"f", end])):
        await embed(client, **left, truncate_prompt_tokens=limit)
        assert engine.requests[-1][0] == kept
    await embed(client, **left, truncate_prompt_tokens=2, add_special_tokens=False)
    assert engine.requests[-1][0] == [*b"ef"]
    await embed(client, **left, truncate_prompt_tokens=-1)
    assert engine.requests[-1][0] == [BOS, *b"abcdef", end]
    await embed(client, input=[list(b"abcd")], truncate_prompt_tokens=2, truncation_side="left")
    assert engine.requests[-1][0] == list(b"cd")


async def test_of_a_text_that_is_cut_no_more_is_encoded_than_needed(client, engine, monkeypatch):
    encode, lengths = engine.tokenizer.encode, []

    def counted(text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(engine.tokenizer, "encode", counted)
    await embed(client, input="abcdefgh" * 25_000, truncate_prompt_tokens=4)
    assert engine.requests[-1][0] == [BOS, *b"abc"]
    assert sum(lengths) < 200
    await embed(client, input="abcdefgh" * 25_000, truncate_prompt_tokens=4, truncation_side="left")
    assert engine.requests[-1][0] == [BOS, *b"fgh"]
    assert sum(lengths) < 400
    await embed(client, input="abcdefgh" * 25, truncate_prompt_tokens=256)
    assert engine.requests[-1][0] == [BOS, *(b"abcdefgh" * 25)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, None),
        ({"input": [[]]}, "input[0]"),
        ({"input": [1.5]}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"input": [[5, 257]]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "4"}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side"),
        ({"input": "a", "truncation_side": "middle"}, "truncation_side"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"messages": [{"role": "user", "content": "a"}], "input": "a"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "prompt_name": "q"}, "prompt_name"),
        ({"input": "a", "use_activation": "no"}, "use_activation"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name(client, engine, fields, param):
    if param is None:  # a tokenizer without special tokens leaves nothing of it
        fields, param = {**fields, "add_special_tokens": False}, "input[0]"
    response = await client.post(
        "/v1/embeddings",
        content=json.dumps(fields),
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not engine.requests


async def test_a_conversation_is_embedded_as_its_template_writes_it(client, engine):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    for fields, text in (
        ({}, "[user]hello[assistant]hi"),
        ({"add_generation_prompt": True}, "[user]hello[assistant]hi[assistant]"),
    ):
        found = await embed(client, messages=messages, **fields)
        assert engine.requests[-1][0] == [BOS, *text.encode()]
        assert found == await embed(client, input=text)
        await embed(client, messages=messages, add_special_tokens=True, **fields)
        assert engine.requests[-1][0] == [BOS, BOS, *text.encode()]
    cut = await embed(client, messages=messages, truncate_prompt_tokens=3)
    assert cut == await embed(client, input="[u")
    invoked = await client.post("/invocations", json={"messages": messages})
    assert (
        invoked.json() == (await client.post("/v1/embeddings", json={"messages": messages})).json()
    )
    pooled = (await client.post("/pooling", json={"messages": messages})).json()
    assert [pooled["data"][0]["data"]] == await embed(client, messages=messages)


async def test_without_activation_embeddings_keep_their_length(client):
    text = "hello"
    (plain,), (shortened,) = [
        await embed(client, input=text, use_activation=False, **fields)
        for fields in ({}, {"dimensions": 16})
    ]
    counts = np.bincount([token % SIZE for token in (BOS, *text.encode())], minlength=SIZE)
    assert plain == counts.tolist()
    assert shortened == counts[:16].tolist()
    assert await embed(client, input=text, use_activation=True) == await embed(client, input=text)


async def test_the_pooler_of_an_embedding_model_classifies_nothing(client):
    error = await refusal(client, "/pooling", input="a", task="classify")
    assert error["param"] == "task"
    assert "'embed'" in error["message"]


# Scores.


async def test_scores_are_cosines(client):
    for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
        for path in ("/v1/score", "/score"):
            fields = dict(zip(names, ("ab", ["ab", "cd", "a"]), strict=True))
            answer = ScoreList.model_validate((await client.post(path, json=fields)).json())
            expected = [vector("ab") @ vector(text) for text in ("ab", "cd", "a")]
            assert np.allclose([each.score for each in answer.data], expected, atol=1e-6)
            assert answer.usage.total_tokens == 3 + 3 + 3 + 2
    pairs = {"text_1": ["a", "b"], "text_2": ["a", "a"]}
    answer = ScoreList.model_validate((await client.post("/v1/score", json=pairs)).json())
    assert np.allclose([each.score for each in answer.data], [1, vector("b") @ vector("a")])
    assert max(each.score for each in answer.data) <= 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_1"),
        ({"text_1": "a", "documents": ["b"]}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": [5]}, "text_2"),
        ({"text_1": "a", "text_2": ["b", "c" * 256]}, "text_2[1]"),
        ({"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_name(client, engine, fields, param):
    assert (await refusal(client, "/v1/score", **fields))["param"] == param
    assert not engine.requests


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked_by_their_similarity_to_the_query(client, path):
    documents = ["cd", {"text": "ab"}, "a"]
    fields = {"query": "ab", "documents": documents}
    answer = RerankList.model_validate((await client.post(path, json=fields)).json())
    assert [each.index for each in answer.results] == [1, 2, 0]
    assert [each.document.text for each in answer.results] == ["ab", "a", "cd"]
    expected = [vector("ab") @ vector(text) for text in ("ab", "a", "cd")]
    assert np.allclose([each.relevance_score for each in answer.results], expected, atol=1e-6)
    fields |= {"top_n": 1, "return_documents": False}
    (best,) = (await client.post(path, json=fields)).json()["results"]
    assert set(best) == {"index", "relevance_score"}


async def test_documents_that_are_equally_similar_keep_their_order(client):
    fields = {"query": "ab", "documents": ["cd", "ab", "ab", "cd", "ab"]}
    results = (await client.post("/v1/rerank", json=fields)).json()["results"]
    assert [each["index"] for each in results] == [1, 2, 4, 0, 3]
    assert [each["relevance_score"] for each in results][::4] == pytest.approx(
        [1, vector("ab") @ vector("cd")]
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": ["a"], "documents": ["a"]}, "query"),
        ({"query": "a", "documents": [{"image": "a"}]}, "documents"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "a" * 256, "documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
    ],
)
async def test_what_cannot_be_ranked_is_refused_by_name(client, engine, fields, param):
    assert (await refusal(client, "/v1/rerank", **fields))["param"] == param
    assert not engine.requests


GOOD = {
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": ["a", "b"]},
    "/v1/rerank": {"query": "a", "documents": ["a", {"text": "b"}]},
}
ODD = (
    *(None, True, False, 0, 1, -1, 7, 300, 2**31, 2**64, 10**400, 0.5, 1e300, float("nan")),
    *("", "a", "\ud800", "\0", "x" * 999, [], [1], [1.5], [None], ["a"], [[1, 2], [3]], [[]], {}),
    *({"text": "a"}, {"text": [1]}, [{"text": None}], [{"text": "a"}, "b"], "base64", "stand-in"),
)
NAMES = {
    "/v1/embeddings": EmbeddingRequest.model_fields,
    "/v1/score": ScoreRequest.model_fields,
    "/v1/rerank": RerankRequest.model_fields,
}


async def test_odd_values_are_answered_or_refused(client, engine):
    """``rng``'s seed is the path and the number of the request, which a failure shows."""
    statuses = Counter()
    for path, good in GOOD.items():
        for number in range(150):
            rng = random.Random(f"{path} {number}")
            odd = {rng.choice([*NAMES[path]]): rng.choice(ODD) for _ in range(rng.randrange(3))}
            content = json.dumps(good | odd)
            response = await client.post(
                path, content=content, headers={"Content-Type": "application/json"}
            )
            statuses[response.status_code] += 1
            assert response.status_code in (200, 400, 404), (content, response.text)
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert not engine.running
    assert min(statuses[200], statuses[400]) > 50


# On the way.


async def test_a_server_that_generates_names_the_remedy_and_the_other_way_round(client, engine):
    chat = {"messages": [{"role": "user", "content": "a"}]}
    paths = {
        "/v1/chat/completions": chat,
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
    }
    for path, fields in paths.items():
        error = await refusal(client, path, **fields)
        assert error["param"] == "model"
        assert "--runner generate" in error["message"]
    engine.embedding_size = 0
    engine.tokenizer = type(engine.tokenizer)()  # as after a switch to another model
    for path, fields in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        error = await refusal(client, path, **fields)
        assert error["param"] == "model"
        assert "--runner pooling" in error["message"]
    assert not engine.requests


async def test_every_path_needs_the_key(engine):
    app = create_app(engine, ServerSettings(api_keys=["secret"]))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for path in (
            "/v1/embeddings",
            "/v1/score",
            "/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
        ):
            response = await client.post(path, json={"input": "a"})
            assert response.status_code == 401, path
    assert not engine.requests


async def test_one_request_does_not_fill_the_queue_of_the_engine(client, engine, soon):
    engine.delay = 0.02
    task = asyncio.create_task(embed(client, input=["a"] * 1000))
    await soon(lambda: len(engine.requests) > 200)
    assert len(engine.running) <= embedding_run._AT_ONCE
    assert len(await task) == 1000


async def test_refusals_speak_of_inputs_and_documents(client):
    error = await refusal(client, input=["a"] * 2049)
    assert "holds 2049 inputs, at most 2048" in error["message"]
    for document in ({"content": "a"}, {}, {"image": "a"}):
        error = await refusal(client, "/v1/rerank", query="a", documents=["a", document])
        assert error["param"] == "documents"
        assert "must be texts, or objects with a text" in error["message"]


async def test_others_are_served_while_a_large_answer_is_written(engine):
    turns = 0
    at_pieces = []
    app = create_app(engine)

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def watched_send(message: Any) -> None:
            if message.get("more_body"):
                at_pieces.append(turns)
            await send(message)

        await app(scope, receive, watched_send)

    task = asyncio.create_task(turn())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(watched), base_url="http://server"
    ) as client:
        await embed(client, input=["a"] * 20)
    task.cancel()
    _, *embeddings, _ = at_pieces
    assert len(embeddings) == len(set(embeddings)) == 20


async def test_a_request_larger_than_the_queue_is_answered_all_the_same(client, engine):
    """Each input that ends makes room for one; the attempts that find none are few."""
    engine.delay = 0.001
    most, attempts, generate = 3, 0, engine.generate

    async def bounded(*args: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if len(engine.running) >= most:
            raise EngineOverloaded(f"{most} requests are waiting")
        async with aclosing(generate(*args)) as deltas:
            async for delta in deltas:
                yield delta

    engine.generate = bounded
    texts = ["a" * (number % 50) for number in range(300)]
    found = await asyncio.wait_for(embed(client, input=texts), 120)
    assert np.allclose(found, [vector(text) for text in texts], atol=1e-6)
    assert attempts <= 2 * len(texts) + embedding_run._AT_ONCE
    engine.running |= {"1", "2", "3"}  # others fill the queue
    response = await asyncio.wait_for(client.post("/v1/embeddings", json={"input": texts}), 60)
    assert response.json()["error"]["code"] == "engine_overloaded"


async def test_a_client_that_leaves_aborts_all_of_its_inputs(url, engine, soon):
    engine.delay = 300
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        left = asyncio.create_task(client.post("/v1/embeddings", json={"input": ["a"] * 300}))
        await soon(lambda: len(engine.running) == embedding_run._AT_ONCE)
        left.cancel()
        await asyncio.wait([left])
    await soon(lambda: not engine.running)
    assert len(engine.requests) == embedding_run._AT_ONCE


async def test_an_error_of_one_input_is_that_of_the_request(client, engine):
    engine.fails_with = EngineOverloaded("2048 requests are waiting")
    response = await client.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_overloaded"
    engine.fails_with, engine.aborts = None, True
    response = await client.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert response.json()["error"]["code"] == "request_aborted"
    assert not engine.running


async def test_metrics_count_the_tokens_of_inputs_and_none_that_were_generated(client, engine):
    engine.queue_s = 0.25
    await embed(client, input=["abc", "d"])
    lines = (await client.get("/metrics")).text.splitlines()
    values = {
        line.rpartition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "{" in line
    }
    assert values["vllm:request_prompt_tokens_sum"] == 6
    assert values["vllm:request_generation_tokens_sum"] == 0
    assert values["vllm:request_queue_time_seconds_sum"] == 0.5
    assert values["vllm:e2e_request_latency_seconds_count"] == 2
    (finished,) = (line for line in lines if 'finished_reason="stop"' in line and "_total" in line)
    assert finished.endswith(" 2.0")


async def test_a_request_waits_for_its_model_of_embeddings():
    engine = SwitchingStandIn()
    engine.entries["b"] = ModelEntry("b", EngineConfig(model="b", runner="pooling"))
    app = create_app(engine, ServerSettings(auto_switch=True, min_model_stay=0.01))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://server") as client,
    ):
        error = await refusal(client, model="c", input="a")
        assert "'c' generates" in error["message"]
        error = await refusal(client, "/v1/completions", model="b", prompt="a")
        assert "'b' computes embeddings" in error["message"]
        assert not engine.switches, "a request that the model cannot answer switches nothing"
        assert len(await embed(client, model="b", input="a")) == 1
        error = await refusal(client, "/v1/completions", prompt="a")
        assert "'b' computes embeddings" in error["message"]
    assert engine.active == "b"


# A server process.


@pytest.mark.slow
async def test_a_server_process_embeds_scores_and_refuses_to_generate(tmp_path):
    model = save_tiny_model(tmp_path / "tiny")
    server = ServerProcess(
        *(str(model), "--runner", "pooling", "--served-model-name", "tiny", "--dtype", "float32"),
        *("--max-num-seqs", "4", "--num-gpu-blocks-override", "200", "--block-size", "8"),
    )
    try:
        url = server.wait_for(r" at (http://\S+) ", 600)[1]
        server.wait_for(re.escape(f"curl {url}/v1/embeddings"), 60)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            texts = ["hello", "a longer text " * 30, "hello"]
            whole = await client.embeddings.create(model="tiny", input=texts)
            first, second, third = (np.array(item.embedding) for item in whole.data)
            assert np.allclose(first, third, atol=1e-5)
            assert abs(first @ second) < 0.99
            assert np.allclose([np.linalg.norm(each) for each in (first, second)], 1, atol=1e-5)
            with pytest.raises(openai.BadRequestError, match="--runner generate"):
                await client.completions.create(model="tiny", prompt="a")
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            fields = {"query": texts[0], "documents": texts[1:]}
            results = (await client.post("/v1/rerank", json=fields)).json()["results"]
            assert [each["index"] for each in results] == [1, 0]
            assert np.isclose(results[1]["relevance_score"], first @ second, atol=1e-5)
        assert server.end() == 0
    finally:
        server.kill()
