"""Text completions: the four forms of a prompt, echo, log-probabilities, streams."""

from __future__ import annotations

import json

import pytest
from stand_in_engine import BOS

pytestmark = pytest.mark.asyncio


async def complete(client, **fields):
    response = await client.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abc"]),
        (["abc", "de"], ["abc", "de"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
        (["ab", [99]], ["ab", "c"]),
    ],
)
async def test_every_form_of_a_prompt_is_answered_in_order(client, prompt, texts):
    answer = (await complete(client, prompt=prompt)).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


async def test_the_default_limit_is_sixteen_tokens(client, engine):
    await complete(client, prompt="x" * 50)
    await complete(client, prompt="x" * 50, max_tokens=None)
    assert engine.requests[0][1].max_tokens == 16
    assert engine.requests[1][1].max_tokens == engine.max_model_len - 51


async def test_special_tokens_are_added_unless_refused(client, engine):
    await complete(client, prompt="a")
    await complete(client, prompt="a", add_special_tokens=False)
    assert [request[0] for request in engine.requests] == [[256, 97], [97]]


@pytest.mark.parametrize("stream", [False, True])
async def test_samples_of_several_prompts_are_numbered_prompt_by_prompt(client, stream):
    response = await complete(client, prompt=["ab", "cd"], n=2, stream=stream)
    texts = dict.fromkeys(range(4), "")
    for answer in chunks(response.text) if stream else [response.json()]:
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "ab", 1: "ab", 2: "cd", 3: "cd"}


def chunks(text):
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
async def test_echo_repeats_the_prompt(client, prompt, stream):
    response = await complete(client, prompt=prompt, echo=True, max_tokens=2, stream=stream)
    answers = chunks(response.text) if stream else [response.json()]
    assert "".join(answer["choices"][0]["text"] for answer in answers) == "abcab"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_has_log_probabilities(client, stream):
    fields = {"prompt": ["abc", [98]], "echo": True, "logprobs": 1, "n": 2, "max_tokens": 2}
    response = await complete(client, **fields, stream=stream)
    found = {}
    for answer in chunks(response.text) if stream else [response.json()]:
        for choice in answer["choices"]:
            if choice["logprobs"] is not None:
                lists = found.setdefault(choice["index"], {})
                for name, values in choice["logprobs"].items():
                    lists.setdefault(name, []).extend(values)
    assert found[0] == found[1]
    assert found[1]["tokens"] == ["", "a", "b", "c", "a", "b"]
    assert found[1]["token_logprobs"] == [None, -7.0, -7.0, -7.0, -9999.0, -9999.0]
    assert found[1]["top_logprobs"][:2] == [None, {"a": -7.0, "A": -1.0}]
    assert found[1]["text_offset"] == [0, 0, 1, 2, 3, 4]
    assert found[2] == found[3]
    assert found[3]["token_logprobs"] == [None, -9999.0]


@pytest.mark.parametrize("more", [{}, {"logprob_token_ids": [65, 66, 67]}])
async def test_an_echo_has_as_many_log_probabilities_as_were_asked_for(client, more):
    """Also where `prompt_logprobs` asks for more in its own field."""
    fields = {"prompt": "ab", "echo": True, "logprobs": 1, "prompt_logprobs": 20, "max_tokens": 1}
    (choice,) = (await complete(client, **fields, **more)).json()["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [2, 2]
    assert len(choice["prompt_logprobs"][1]) == 21


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_of_token_ids_has_the_special_ones(client, stream):
    """The client sent them; the one that is added to a text is not part of that text."""
    fields = {"prompt": [BOS, 97], "echo": True, "logprobs": 0, "max_tokens": 1}
    response = await complete(client, **fields, stream=stream)
    choices = [a["choices"][0] for a in (chunks(response.text) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == "<bos>aa"
    offsets = [n for c in choices if c["logprobs"] for n in c["logprobs"]["text_offset"]]
    assert offsets == [0, 5, 6]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_after_an_echo(client, engine, stream):
    fields = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    response = await complete(client, **fields, stream=stream, **usage)
    answers = chunks(response.text) if stream else [response.json()]
    (choice,) = answers[0]["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -7.0, -7.0, -7.0]
    assert choice["logprobs"]["top_logprobs"][1:] == [{"a": -7.0}, {"b": -7.0}, {"c": -7.0}]
    assert answers[-1]["usage"]["completion_tokens"] == 0
    assert engine.requests[0][1].max_tokens == 1


async def test_prompt_logprobs_are_those_of_vllm(client):
    answer = (await complete(client, prompt="a", prompt_logprobs=2, max_tokens=1, n=2)).json()
    first, second = (choice["prompt_logprobs"] for choice in answer["choices"])
    assert first == second
    assert first[0] is None
    assert first[1] == {
        "97": {"logprob": -7.0, "rank": 9, "decoded_token": "a"},
        "65": {"logprob": -1.0, "rank": 1, "decoded_token": "A"},
        "66": {"logprob": -2.0, "rank": 2, "decoded_token": "B"},
    }
    messages = [{"role": "user", "content": "a"}]
    chat = await client.post(
        "/v1/chat/completions", json={"messages": messages, "prompt_logprobs": 0}
    )
    positions = chat.json()["prompt_logprobs"]
    assert positions[0] is None
    assert {"97": {"logprob": -7.0, "rank": 9, "decoded_token": "a"}} in positions


async def test_a_stream_ends_with_the_finish_reason_and_the_token_counts(client):
    response = await complete(
        client, prompt="abcd", max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    first, second, last = chunks(response.text)
    assert first["choices"][0]["text"] == "a"
    assert first["choices"][0]["finish_reason"] is None
    assert first["usage"] is None
    assert second["choices"][0]["finish_reason"] == "length"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_parallel_lists(client, stream):
    response = await complete(client, prompt="abc", logprobs=1, max_tokens=2, stream=stream)
    answers = chunks(response.text) if stream else [response.json()]
    parts = [answer["choices"][0]["logprobs"] for answer in answers]
    joined = {name: [entry for part in parts for entry in part[name]] for name in parts[0]}
    assert joined["tokens"] == ["a", "b"]
    assert joined["text_offset"] == [0, 1]
    assert joined["token_logprobs"] == [-9999.0, -9999.0]
    assert joined["top_logprobs"] == [{"a": -9999.0, "A": -1.0}, {"b": -9999.0, "A": -1.0}]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_parts_of_a_character_have_its_offset(client, stream):
    response = await complete(client, prompt="a\u00e9b", logprobs=1, max_tokens=4, stream=stream)
    answers = chunks(response.text) if stream else [response.json()]
    parts = [answer["choices"][0]["logprobs"] for answer in answers]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 1, 1, 2]


async def test_a_number_of_answers_past_the_limit_is_refused(client, engine):
    response = await client.post("/v1/completions", json={"prompt": ["a"] * 1024, "n": 2})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert not engine.requests


async def test_many_prompts_are_answered_together(client, engine):
    prompts = [f"{number:03}" for number in range(200)]
    answer = (await complete(client, prompt=prompts)).json()
    assert [choice["text"] for choice in answer["choices"]] == prompts
    assert not engine.running


async def test_beam_search_and_priority_reach_the_engine(client, engine):
    fields = {"n": 2, "best_of": 3, "use_beam_search": True, "length_penalty": 0.5}
    await complete(client, prompt="ab", early_stopping="never", priority=-4, **fields)
    _, params, _, priority = engine.requests[0]
    assert params.use_beam_search
    assert (params.n, params.best_of, params.length_penalty) == (2, 3, 0.5)
    assert params.early_stopping == "never"
    assert priority == -4


@pytest.mark.parametrize("fields", [{"best_of": 2, "n": 2}, {"use_beam_search": True}])
async def test_samples_without_best_of_and_beams_can_be_streamed(client, fields):
    response = await complete(client, prompt="ab", stream=True, **fields)
    assert chunks(response.text)
