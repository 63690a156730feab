"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import httpx
import pytest
from stand_in_engine import BOS
from test_bad_input import assert_error

pytestmark = pytest.mark.asyncio

HELLO = [{"role": "user", "content": "hello"}]
HELLO_TEXT = "[user]hello[assistant]"


@pytest.mark.parametrize(
    ("body", "num_special", "text"),
    [
        ({"prompt": "a<b"}, 1, "a<b"),
        ({"prompt": "a<b", "add_special_tokens": False}, 0, "a<b"),
        ({"prompt": ""}, 1, ""),
        ({"messages": HELLO}, 1, HELLO_TEXT),  # that of the template
        ({"messages": HELLO, "add_special_tokens": True}, 2, HELLO_TEXT),
        ({"messages": HELLO, "add_generation_prompt": False}, 1, "[user]hello"),
        ({"messages": HELLO, "continue_final_message": True}, 1, "[user]hello"),
        (
            {"messages": HELLO, "chat_template_kwargs": {"mood": "calm"}},
            1,
            "[user]hello<mood=calm>[assistant]",
        ),
    ],
)
async def test_the_tokens_of_a_text_or_a_conversation(client, engine, body, num_special, text):
    answer = await client.post("/tokenize", json={"model": "stand-in", **body})
    tokens = [BOS] * num_special + list(text.encode())
    assert answer.json() == {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": 256,
        "token_strs": None,
    }
    strings = await client.post("/tokenize", json={**body, "return_token_strs": True})
    pieces = ["<bos>"] * num_special + [f"<{token}>" for token in text.encode()]
    assert strings.json()["token_strs"] == pieces
    back = await client.post("/detokenize", json={"tokens": tokens})
    assert back.json() == {"prompt": text}
    assert not engine.requests


async def test_a_text_that_is_longer_than_the_context_has_tokens_too(client):
    text = "é" * 50_000
    answer = (await client.post("/tokenize", json={"prompt": text})).json()
    assert answer["count"] == 100_001
    back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "made_up": 1}, "made_up"),
        ("/tokenize", {"messages": [{"role": "user", "content": "REJECT"}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_bad_fields_are_named(client, path, body, param):
    assert_error(await client.post(path, json=body), 400, param)


async def test_another_model_is_not_found(client):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        response = await client.post(path, json={"model": "other", **body})
        assert_error(response, 404, "model", "model_not_found")


async def test_the_tokenizer_describes_itself_if_a_flag_allows_it(client, serving, engine):
    assert (await client.get("/tokenizer_info")).status_code == 404
    async with (
        serving(enable_tokenizer_info_endpoint=True, api_keys=["key"]) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        assert (await http.get("/tokenizer_info")).status_code == 401
        http.headers["Authorization"] = "Bearer key"
        answer = await http.get("/tokenizer_info")
        assert answer.json() == {"tokenizer_class": "ByteTokenizer"}
        engine.tokenizer.chat_template = "{{ messages }}"
        engine.tokenizer.configuration = {"tokenizer_class": "Bytes", "bos_token": "<bos>"}
        answer = await http.get("/tokenizer_info")
    assert answer.json() == {
        "tokenizer_class": "Bytes",
        "bos_token": "<bos>",
        "chat_template": "{{ messages }}",
    }
