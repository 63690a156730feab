"""``/v1/score`` and ``/v1/rerank`` of a model that reads both texts.

The stand-in's logits count the letter a in a prompt.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from server_process import ServerProcess, save_tiny_model
from stand_in_engine import BOS, ByteTokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from trencadis.engine import PairPrompt, PoolingRequest, Scoring, TextPrompts
from trencadis.server.api.pooling import RerankList, ScoreList

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def scores(engine):
    engine.scoring = Scoring(PairPrompt("template"), (7, 8))


def become(engine, **attributes: Any) -> None:
    """Let the engine serve another model, as after a switch."""
    for name, value in attributes.items():
        setattr(engine, name, value)
    engine.tokenizer = type(engine.tokenizer)()


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


async def refusal(client, path: str, **fields: Any) -> dict[str, Any]:
    response = await client.post(path, json=fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def prompts(engine) -> list[str]:
    return [engine.tokenizer.decode(tokens) for tokens, *_ in engine.requests]


async def test_the_pooler_of_a_reranker_scores_each_input(client, engine):
    for fields, scores in (
        ({"task": "classify"}, [sigmoid(1), sigmoid(2)]),
        ({"use_activation": False}, [1, 2]),
    ):
        answer = (await client.post("/pooling", json={"input": ["a", "aa"], **fields})).json()
        assert [len(each["data"]) for each in answer["data"]] == [1, 1]
        assert [each["data"][0] for each in answer["data"]] == pytest.approx(scores)
    assert prompts(engine)[-2:] == ["a", "aa"]
    for fields, param in (({"task": "embed"}, "task"), ({"dimensions": 2}, "dimensions")):
        assert (await refusal(client, "/pooling", input="a", **fields))["param"] == param


async def test_a_score_is_that_of_both_texts_in_one_prompt(client, engine):
    for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
        engine.requests.clear()
        fields = dict(zip(names, ("a", ["b", "aa"]), strict=True))
        answer = ScoreList.model_validate((await client.post("/v1/score", json=fields)).json())
        assert prompts(engine) == ["a?b!", "a?aa!"]
        assert all(params == PoolingRequest.params for _, params, _, _ in engine.requests)
        assert [each.index for each in answer.data] == [0, 1]
        assert [each.score for each in answer.data] == pytest.approx([sigmoid(1), sigmoid(3)])
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 5 + 6
        assert answer.usage.prompt_tokens_details.cached_tokens == 2
    pairs = {"text_1": ["a", "b"], "text_2": ["b", "b"]}
    answer = ScoreList.model_validate((await client.post("/score", json=pairs)).json())
    assert [each.score for each in answer.data] == pytest.approx([sigmoid(1), sigmoid(0)])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked_by_their_scores(client, path):
    fields = {"query": "q", "documents": ["b", {"text": "aa"}, "a"]}
    answer = RerankList.model_validate((await client.post(path, json=fields)).json())
    assert [each.index for each in answer.results] == [1, 2, 0]
    assert [each.document.text for each in answer.results] == ["aa", "a", "b"]
    found = [each.relevance_score for each in answer.results]
    assert found == pytest.approx([sigmoid(2), sigmoid(1), 0.5])
    fields |= {"top_n": 1, "return_documents": False}
    (best,) = (await client.post(path, json=fields)).json()["results"]
    assert set(best) == {"index", "relevance_score"}
    fields["top_n"] = 0
    assert len((await client.post(path, json=fields)).json()["results"]) == 3


async def test_items_are_documents_by_another_name(client):
    answer = await client.post("/v1/score", json={"queries": "q", "items": ["aa", "b"]})
    assert [each["score"] for each in answer.json()["data"]] == pytest.approx([sigmoid(2), 0.5])
    for fields in ({"items": ["a"]}, {"queries": "q", "items": ["a"], "documents": ["a"]}):
        await refusal(client, "/v1/score", **fields)


@pytest.mark.parametrize("reads_both", [True, False])
async def test_the_beginnings_of_documents_are_read_where_the_client_wants_it(
    client, engine, reads_both
):
    """The answer has the whole documents."""
    if not reads_both:
        become(engine, scoring=None, embedding_size=32)
    fields = {"query": "q", "documents": ["abcdef", "né"], "max_tokens_per_doc": 2}
    answer = (await client.post("/v1/rerank", json=fields)).json()
    assert {each["document"]["text"] for each in answer["results"]} == {"abcdef", "né"}
    read = ["q?ab!", "q?n!"] if reads_both else ["q", "ab", "n"]
    assert prompts(engine) == read
    await client.post("/v1/rerank", json=fields | {"max_tokens_per_doc": 0})
    assert prompts(engine)[len(read)] == ("q?abcdef!" if reads_both else "q")
    error = await refusal(client, "/v1/rerank", **fields | {"max_tokens_per_doc": -5})
    assert error["message"].startswith("max_tokens_per_doc must be a non-negative integer")


async def test_without_activation_scores_are_logits(client, engine):
    fields = {"text_1": "q", "text_2": ["aaa", "b"]}
    for activation, wanted in ((None, sigmoid(3)), (True, sigmoid(3)), (False, 3)):
        answer = await client.post("/v1/score", json={**fields, "use_activation": activation})
        assert answer.json()["data"][0]["score"] == pytest.approx(wanted)
    become(engine, scoring=Scoring(PairPrompt("template"), (), "identity"))
    answer = await client.post("/v1/score", json=fields)
    assert answer.json()["data"][0]["score"] == 3


async def test_the_prompt_has_the_instruction_and_the_arguments_of_the_client(client, engine):
    fields = {"query": "q", "documents": ["d"], "instruction": "find: "}
    await client.post("/v1/rerank", json=fields)
    await client.post("/v1/rerank", json={**fields, "chat_template_kwargs": {"x": 1}})
    await client.post("/v1/rerank", json={**fields, "add_special_tokens": False})
    assert prompts(engine) == ["find: q?d!", "<x=1>find: q?d!", "find: q?d!"]
    assert [tokens[0] == BOS for tokens, *_ in engine.requests] == [True, True, False]


async def test_of_a_long_pair_the_document_is_cut_and_the_end_of_the_prompt_stays(client, engine):
    for document, limit, prompt in (
        ("abcdef", 7, "qq?ab!"),
        ("abcdef", 50, "qq?abcdef!"),
        ("é" * 9, 8, "qq?é!"),
        ("b" * 10_000, -1, "qq?" + "b" * 251 + "!"),
    ):
        fields = {"query": "qq", "documents": [document], "truncate_prompt_tokens": limit}
        response = await client.post("/v1/rerank", json=fields)
        assert response.status_code == 200, response.text
        assert prompts(engine)[-1] == prompt
        (result,) = response.json()["results"]
        assert result["document"]["text"] == document
    fields = {"text_1": "qq", "text_2": "abc", "truncate_prompt_tokens": 5}
    error = await refusal(client, "/v1/score", **fields)
    assert error["param"] == "truncate_prompt_tokens"
    assert error["message"].startswith("text_2[0]: without its document the prompt fills")


class SpecialTokenizer(ByteTokenizer):
    """Texts that spell its special token have it, except those of pairs, as in the engine."""

    num_renderings = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        parts = [list(part.encode()) for part in text.split("<bos>")]
        joined = [token for part in parts for token in (*part, BOS)][:-1]
        return [BOS] * add_special_tokens + joined

    def render_pair(self, *texts: Any, **arguments: Any) -> list[int]:
        self.num_renderings += 1
        return ByteTokenizer().render_pair(*texts, **arguments)


async def test_a_document_that_spells_special_tokens_is_cut_as_the_text_that_it_is(client, engine):
    engine.tokenizer = SpecialTokenizer()
    for document, limit, prompt in (
        ("<bos>" * 9 + "abc", 40, "qq?" + ("<bos>" * 9)[:35] + "!"),
        ("<bos>" * 40, 9, "qq?<bos!"),
        ("ab<bos>cd" + "é" * 20, 16, "qq?ab<bos>cdé!"),
        ("é" * 30 + "a" * 30, 40, "qq?" + "é" * 17 + "!"),
        ("a" * 60 + "é" * 60, 90, "qq?" + "a" * 60 + "é" * 12 + "!"),
    ):
        engine.tokenizer.num_renderings = 0
        fields = {"query": "qq", "documents": [document], "truncate_prompt_tokens": limit}
        response = await client.post("/v1/rerank", json=fields)
        assert response.status_code == 200, response.text
        assert prompts(engine)[-1] == prompt
        assert engine.tokenizer.num_renderings < 12


async def test_pairs_that_take_long_to_render_are_answered(client, engine):
    engine.tokenizer.is_slow = True
    for count in (1, 100):
        fields = {"query": "q", "documents": ["a"] * count}
        answer = (await client.post("/v1/rerank", json=fields)).json()
        assert len(answer["results"]) == count


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": "q", "documents": ["a", "b" * 300]}, "documents[1]"),
        ({"query": "q", "documents": ["a", "b" * 10_000]}, "documents[1]"),
        ({"query": "q", "documents": ["a", "REJECT"]}, "documents[1]"),
        ({"query": "q", "documents": ["a"], "instruction": "REJECT"}, "instruction"),
        ({"query": "q", "documents": ["a"], "instruction": "\ud800"}, "instruction"),
        ({"query": "q", "documents": ["a"], "instruction": 5}, "instruction"),
        (
            {"query": "q", "documents": ["a"], "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
        ),
        ({"query": "q", "documents": ["a"], "use_activation": "no"}, "use_activation"),
        ({"query": "q", "documents": ["a"], "max_tokens_per_doc": -5}, "max_tokens_per_doc"),
    ],
)
async def test_what_cannot_be_ranked_is_refused_by_name(client, engine, fields, param):
    response = await client.post(
        "/v1/rerank",
        content=json.dumps(fields),
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not engine.requests


async def test_other_requests_are_told_where_a_reranker_is_asked(client, engine):
    error = await refusal(client, "/v1/embeddings", input="a")
    assert error["param"] == "model"
    assert "/v1/score or /v1/rerank" in error["message"]
    error = await refusal(client, "/v1/completions", prompt="a")
    assert "--runner generate" in error["message"]
    assert not engine.requests


# Models of embeddings.


async def test_a_model_of_embeddings_has_no_instruction_and_no_activation(client, engine):
    become(engine, scoring=None, embedding_size=32)
    pair = {"text_1": "a", "text_2": "b"}
    for name, value in (
        ("instruction", "find"),
        ("chat_template_kwargs", {"x": 1}),
        ("use_activation", False),
    ):
        assert (await refusal(client, "/v1/score", **pair, **{name: value}))["param"] == name
    assert not engine.requests


async def test_a_prompt_of_the_checkpoint_is_put_before_each_text(client, engine):
    prompts_by_name = TextPrompts({"query": "q: ", "other": "o: "}, "other")
    become(engine, scoring=None, embedding_size=32, text_prompts=prompts_by_name)
    await client.post("/v1/embeddings", json={"input": ["a", "b"], "prompt_name": "query"})
    await client.post("/v1/embeddings", json={"input": "a"})
    await client.post("/v1/embeddings", json={"input": [[97]]})
    await client.post("/v1/score", json={"text_1": "a", "text_2": "b"})
    assert prompts(engine) == ["q: a", "q: b", "o: a", "a", "o: a", "o: b"]
    error = await refusal(client, "/v1/embeddings", input="a", prompt_name="code")
    assert error["param"] == "prompt_name"
    assert "'query', 'other'" in error["message"]
    for tokens in ([97], [[97], [98]]):
        error = await refusal(client, "/v1/embeddings", input=tokens, prompt_name="query")
        assert error["param"] == "prompt_name"
        assert "token ids stay unchanged" in error["message"]
    assert len(engine.requests) == 6


# Models that generate.


@pytest.mark.parametrize("path", ["/v1/score", "/rerank"])
async def test_a_model_that_generates_says_that_it_computes_no_scores(client, engine, path):
    become(engine, scoring=None)
    pair = {"text_1": "a", "text_2": "b"}
    fields = pair if path == "/v1/score" else {"query": "a", "documents": ["b"]}
    error = await refusal(client, path, **fields)
    assert error["param"] == "model"
    assert "computes no embeddings or scores" in error["message"]


# A server process.


def save_reranker(directory: Path) -> Path:
    save_tiny_model(directory)  # for its tokenizer
    torch.manual_seed(5)
    config = LlamaConfig.from_pretrained(directory, num_labels=1, pad_token_id=257)
    LlamaForSequenceClassification(config).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ {'query': 'q:', 'document': ' d:', 'system': 'i:'}[m.role] "
        "+ m.content }}{% endfor %}."
    )
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.slow
async def test_a_server_process_scores_as_transformers_does(tmp_path):
    checkpoint = save_reranker(tmp_path / "tiny")
    server = ServerProcess(
        *(str(checkpoint), "--runner", "pooling", "--served-model-name", "tiny"),
        *("--dtype", "float32", "--max-num-seqs", "4", "--num-gpu-blocks-override", "200"),
        *("--block-size", "8"),
    )
    documents = ["Paris is in France.", "a longer text " * 20, "é"]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    with torch.inference_mode():
        wanted = [
            float(model(torch.tensor([tokenizer.encode(f"i:fq:Paris? d:{text}.")])).logits)
            for text in documents
        ]
    try:
        url = server.wait_for(r" at (http://\S+) ", 120)[1]
        server.wait_for(re.escape(f"curl {url}/v1/rerank"), 10)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            fields = {"query": "Paris?", "documents": documents, "instruction": "f"}
            answer = (await client.post("/v1/rerank", json=fields)).json()
            found = {each["index"]: each["relevance_score"] for each in answer["results"]}
            assert [found[i] for i in range(3)] == pytest.approx(
                [sigmoid(logit) for logit in wanted], abs=1e-5
            )
            assert list(found) == sorted(found, key=lambda index: -found[index])
            pairs = {"text_1": "Paris?", "text_2": documents, "instruction": "f"}
            answer = await client.post("/v1/score", json={**pairs, "use_activation": False})
            assert [each["score"] for each in answer.json()["data"]] == pytest.approx(
                wanted, abs=1e-4
            )
            response = await client.post("/v1/embeddings", json={"input": "a"})
            assert response.status_code == 400
        assert server.end() == 0
    finally:
        server.kill()
