"""Fields of vLLM's server that its clients send and read, with the official client."""

from __future__ import annotations

import httpx
import openai
import pytest
import pytest_asyncio
from stand_in_engine import BOS

from trencadis.server.http.request_id_header import RequestIdHeader

pytestmark = pytest.mark.asyncio

MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT = [BOS, *b"[user]hello[assistant]"]


@pytest_asyncio.fixture
async def official(url):
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


async def chat(official, messages=MESSAGES, **extra):
    return await official.chat.completions.create(
        model="stand-in", messages=messages, extra_body=extra
    )


async def test_fields_without_a_value_are_null(official):
    answer = await chat(official)
    assert answer.prompt_logprobs is answer.prompt_token_ids is answer.system_fingerprint is None
    (choice,) = answer.choices
    assert choice.message.reasoning is choice.message.annotations is choice.token_ids is None
    answer = await official.completions.create(model="stand-in", prompt="a")
    assert answer.system_fingerprint is answer.choices[0].prompt_logprobs is None
    assert answer.choices[0].token_ids is answer.choices[0].prompt_token_ids is None


async def test_a_client_lists_the_tokens_that_are_allowed(official, engine):
    await chat(official, allowed_token_ids=[65, 66])
    await official.completions.create(
        model="stand-in", prompt="a", extra_body={"allowed_token_ids": [65]}
    )
    asked = [params.allowed_token_ids for _, params, _, _ in engine.requests]
    assert asked == [(65, 66), (65,)]


async def test_a_client_lists_the_tokens_whose_log_probabilities_it_wants(official):
    """As many as it lists, whatever top_logprobs says, with the chosen token first."""
    fields = {"logprob_token_ids": [70, 104, 80, 70], "return_tokens_as_token_ids": True}
    answer = await official.chat.completions.create(
        model="stand-in", messages=MESSAGES, max_tokens=1, logprobs=True, extra_body=fields
    )
    (position,) = answer.choices[0].logprobs.content
    chosen = position.token
    others = [f"token_id:{token}" for token in (70, 104, 80)]
    assert chosen not in others
    assert [one.token for one in position.top_logprobs] == [chosen, *others]
    answer = await official.completions.create(
        model="stand-in", prompt="a", max_tokens=1, logprobs=1, extra_body=fields
    )
    (top,) = answer.choices[0].logprobs.top_logprobs
    assert (
        list(top) == [answer.choices[0].logprobs.tokens[0], *others] and top["token_id:80"] == -3.0
    )
    with pytest.raises(openai.BadRequestError, match="logprob_token_ids are reported for gen"):
        await official.completions.create(
            model="stand-in", prompt="a", max_tokens=0, echo=True, logprobs=1, extra_body=fields
        )


async def test_a_token_out_of_vocabulary_is_named(official):
    with pytest.raises(openai.BadRequestError, match="999999, which is out of vocabulary"):
        await official.completions.create(model="stand-in", prompt=[1, 999999])


async def test_all_wrong_biases_are_named(official):
    with pytest.raises(openai.BadRequestError, match=r"'a': 1.0, 'b': 2.0") as refused:
        await chat(official, logit_bias={"a": 1.0, "1000": 0.5, "b": 2.0})
    assert refused.value.param == "logit_bias"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_names_its_request(client, engine, stream):
    prompts = {
        "chat/completions": ("chatcmpl-", {"messages": MESSAGES}),
        "completions": ("cmpl-", {"prompt": "a"}),
        "messages": ("msg_", {"messages": MESSAGES, "max_tokens": 5}),
        "responses": ("resp_", {"input": "a"}),
    }
    for path, (prefix, prompt) in prompts.items():
        answer = await client.post(
            f"/v1/{path}", json={**prompt, "stream": stream}, headers={"X-Request-Id": "my-1"}
        )
        assert answer.headers["x-request-id"] == "my-1", answer.text
        assert f'"{prefix}my-1"' in answer.text
    answer = await client.post("/v1/completions", json={"prompt": "a", "request_id": "my-2"})
    assert answer.headers["x-request-id"] == "cmpl-my-2"
    names = [request_id for _, _, request_id, _ in engine.requests]
    assert len(set(names)) == 5, "the engine tells requests of one name apart"
    longest = "x" * 128
    answer = await client.post(
        "/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": longest}
    )
    assert answer.headers["x-request-id"] == longest
    refused = await client.post("/v1/completions", json={}, headers={"X-Request-Id": "my-3"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "my-3")


@pytest.mark.parametrize("name", ["a b", "x" * 129, ""])
async def test_a_name_that_is_unfit_for_logs_is_replaced(client, name):
    answer = await client.post(
        "/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": name}
    )
    assert answer.headers["x-request-id"] == answer.json()["id"]
    refused = await client.post("/v1/completions", json={"prompt": "a", "request_id": name})
    assert refused.json()["error"]["param"] == "request_id"


async def test_token_ids_are_returned(official):
    answer = await chat(official, return_token_ids=True)
    assert answer.prompt_token_ids == PROMPT
    assert answer.choices[0].token_ids == PROMPT[1:]
    fields = {"model": "stand-in", "prompt": ["ab", "c"], "n": 2}
    extra = {"return_token_ids": True}
    answer = await official.completions.create(**fields, extra_body=extra)
    assert [choice.prompt_token_ids for choice in answer.choices] == [[BOS, 97, 98]] * 2 + [
        [BOS, 99]
    ] * 2
    assert [choice.token_ids for choice in answer.choices] == [[97, 98]] * 2 + [[99]] * 2


async def test_token_ids_are_streamed(official):
    extra = {"return_token_ids": True}
    stream = await official.chat.completions.create(
        model="stand-in", messages=MESSAGES, stream=True, extra_body=extra
    )
    first, *others = [chunk async for chunk in stream]
    assert first.prompt_token_ids == PROMPT
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in others)
    assert [token for chunk in others for token in chunk.choices[0].token_ids] == PROMPT[1:]
    stream = await official.completions.create(
        model="stand-in", prompt="ab", stream=True, extra_body=extra
    )
    (choice, *others) = [chunk.choices[0] async for chunk in stream]
    assert choice.prompt_token_ids == [BOS, 97, 98]
    assert choice.token_ids + [token for each in others for token in each.token_ids] == [97, 98]


async def test_tokens_of_a_reasoning_that_is_left_out_are_not_told(engine, served, serving):
    engine.tokenizer.chat_template = "{{ '<think>' }}{{ '</think>' }}"
    engine.script = list("<think>Hm</think>Yes")
    async with serving(reasoning_parser="qwen3") as url:
        official = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with official:
            for hidden in (True, False):
                answer = await chat(
                    official, include_reasoning=not hidden, return_token_ids=True, logprobs=True
                )
                (choice,) = answer.choices
                assert (choice.token_ids is None) == (choice.logprobs is None) == hidden


async def test_tokens_are_written_as_token_ids(official):
    extra = {"return_tokens_as_token_ids": True}
    answer = await official.completions.create(
        model="stand-in", prompt="ab", logprobs=1, extra_body=extra
    )
    assert answer.choices[0].logprobs.tokens == ["token_id:97", "token_id:98"]
    assert set(answer.choices[0].logprobs.top_logprobs[0]) == {"token_id:97", "token_id:65"}
    answer = await chat(official, logprobs=True, top_logprobs=1, **extra)
    position = answer.choices[0].logprobs.content[0]
    assert position.token == f"token_id:{ord('[')}"
    assert position.bytes == list(b"[")
    assert position.top_logprobs[0].token == "token_id:65"  # noqa: S105


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_the_text_of_its_prompt(official, stream):
    text = "<bos>[user]hello[assistant]"
    answer = await official.chat.completions.create(
        model="stand-in",
        messages=MESSAGES,
        stream=stream,
        extra_body={"return_prompt_text": True},
    )
    if stream:
        chunks = [chunk async for chunk in answer]
        assert [getattr(chunk, "prompt_text", None) for chunk in chunks[:2]] == [text, None]
    else:
        assert answer.prompt_text == text
    assert (await chat(official)).prompt_text is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_another_server_made_is_not_rendered(official, engine, stream):
    tokens = list(b"[user]bye[assistant]")
    answer = await official.chat.completions.create(
        model="stand-in",
        messages=MESSAGES,
        stream=stream,
        extra_body={"kv_transfer_params": {"prompt_token_ids": tokens}, "return_token_ids": True},
    )
    first = await anext(aiter(answer)) if stream else answer
    assert first.prompt_token_ids == tokens == list(engine.requests[0][0])
    assert not engine.tokenizer.rendered


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"prompt_token_ids": []}, "kv_transfer_params.prompt_token_ids"),
        ({"prompt_token_ids": [5, 257]}, "kv_transfer_params.prompt_token_ids"),
        ({"prompt_token_ids": [5] * 256}, "kv_transfer_params.prompt_token_ids"),
        ({"prompt_token_ids": ["a"]}, "kv_transfer_params.prompt_token_ids"),
        ({"prompt_token_ids": 5}, "kv_transfer_params.prompt_token_ids"),
        ({"do_remote_prefill": True}, "kv_transfer_params"),
    ],
)
async def test_a_prompt_that_the_model_cannot_take_is_refused(official, engine, params, field):
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(official, kv_transfer_params=params)
    assert caught.value.param == field
    assert not engine.requests


async def test_parameters_that_concern_no_prompt_have_no_effect(official):
    answer = await chat(official, kv_transfer_params={"do_remote_decode": False})
    assert answer.choices[0].message.content == "[user]hello[assistant]"


@pytest.mark.parametrize("field", ["watermarking", "stream_interval"])
async def test_what_is_not_supported_is_an_error(official, field):
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(official, **{field: 2})
    assert caught.value.param == field


async def test_a_client_names_its_request_for_embeddings(client, engine):
    engine.embedding_size = 8
    answer = await client.post(
        "/v1/embeddings", json={"input": "a"}, headers={"X-Request-Id": "my-1"}
    )
    assert answer.headers["x-request-id"] == "my-1"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_repeats_the_message_that_it_continues(official, stream):
    messages = [*MESSAGES, {"role": "assistant", "content": "I say"}]
    extra = {"echo": True, "continue_final_message": True}
    if not stream:
        answer = await chat(official, messages, **extra)
        text = answer.choices[0].message.content
    else:
        chunks = await official.chat.completions.create(
            model="stand-in", messages=messages, stream=True, extra_body=extra
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    assert text == "I say[user]hello[assistant]I say"
    answer = await chat(official, echo=True)
    assert answer.choices[0].message.content == "[user]hello[assistant]", "not that of the user"


async def test_the_template_gets_documents_and_roles_of_its_own(official, engine):
    documents = [{"title": "A", "text": "B"}]
    answer = await chat(official, [{"role": "robot", "content": "hi"}], documents=documents)
    assert answer.choices[0].message.content == f"[robot]hi<documents={documents}>[assistant]"


async def test_special_tokens_are_added_to_a_conversation(official, engine):
    await chat(official, add_special_tokens=True)
    assert engine.requests[0][0] == [BOS, *PROMPT]


async def test_a_long_prompt_is_cut(official, engine):
    async def complete(prompt, **extra):
        await official.completions.create(
            model="stand-in", prompt=prompt, max_tokens=6, extra_body=extra
        )
        return bytes(token for token in engine.requests[-1][0] if token != BOS)

    long = "a" * 300 + "b" * 300
    assert await complete(long, truncate_prompt_tokens=-1) == b"b" * 250
    assert await complete(long, truncate_prompt_tokens=7) == b"b" * 7
    kept = await complete(long, truncate_prompt_tokens=7, truncation_side="right")
    assert kept == b"a" * 6, "after the token that begins a text"
    assert await complete(list(b"abc"), truncate_prompt_tokens=2) == b"bc"
    assert await complete("abc", truncate_prompt_tokens=50) == b"abc"
    messages = [{"role": "user", "content": long}]
    await chat(official, messages, truncate_prompt_tokens=-1, max_tokens=6)
    assert bytes(engine.requests[-1][0]) == b"b" * 239 + b"[assistant]"


async def test_a_response_takes_the_sampling_parameters_of_chat(official, engine):
    fields = {
        **{"top_k": 3, "min_p": 0.25, "seed": 42, "repetition_penalty": 1.5, "stop": ["zz"]},
        **{"presence_penalty": 0.5, "frequency_penalty": -0.5, "stop_token_ids": [7]},
        **{"ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False},
    }
    extra = {**fields, "logit_bias": {"65": -100}}
    await official.responses.create(model="stand-in", input="a", extra_body=extra)
    params = engine.requests[0][1]
    for name, value in fields.items():
        arrived = getattr(params, name)
        assert (list(arrived) if isinstance(arrived, tuple) else arrived) == value, name
    assert params.logit_bias == {65: -100.0}
    await official.responses.create(
        model="stand-in", input="a", extra_body={"structured_outputs": {"regex": "a+"}}
    )
    assert engine.requests[1][1].structured_output.regex == "a+"
    with pytest.raises(openai.BadRequestError) as wrong:
        await official.responses.create(
            model="stand-in", input="a", extra_body={"repetition_penalty": 0}
        )
    assert wrong.value.param == "repetition_penalty"


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_the_text_of_a_response(engine, serving, stream):
    engine.tokenizer.chat_template = "{{ '<think>' }}{{ '</think>' }}"
    engine.script = ["<think>", "Hm", "</th", "ink>", "Y", "es"]
    engine.script_tokens = range(6)
    texts = dict(enumerate(engine.script)) | {65: "A"}
    engine.tokenizer.token_text = lambda token: texts.get(token, "?")
    engine.tokenizer.token_bytes = lambda token, *_: texts[token].encode()
    async with serving(reasoning_parser="qwen3") as url:
        official = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with official:
            fields = {
                "model": "stand-in",
                "input": "a",
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 1,
            }
            if not stream:
                answer = await official.responses.create(**fields)
            else:
                events = [e async for e in await official.responses.create(**fields, stream=True)]
                deltas = [e for e in events if e.type == "response.output_text.delta"]
                assert [[each.token for each in e.logprobs] for e in deltas] == [["Y"], ["es"]]
                answer = events[-1].response
            (reasoning, message) = answer.output
            assert reasoning.type == "reasoning"
            tokens = message.content[0].logprobs
            assert [each.token for each in tokens] == ["Y", "es"]
            assert tokens[0].top_logprobs[0].logprob == -1.0
            assert tokens[0].bytes == [ord("Y")]
    with pytest.raises(openai.BadRequestError) as caught:
        async with serving() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="n") as plain:
            await plain.responses.create(model="stand-in", input="a", top_logprobs=1)
    assert caught.value.param == "top_logprobs"


async def test_a_flag_writes_tokens_as_ids_where_a_request_does_not_say(serving):
    async with (
        serving(return_tokens_as_token_ids=True) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as official,
    ):
        tokens = {}
        for wanted in (None, False, True):
            answer = await official.completions.create(
                model="stand-in",
                prompt="a",
                max_tokens=1,
                logprobs=0,
                extra_body={"return_tokens_as_token_ids": wanted},
            )
            tokens[wanted] = answer.choices[0].logprobs.tokens
        spoken = await official.responses.create(
            model="stand-in", input="a", include=["message.output_text.logprobs"]
        )
    assert tokens == {None: ["token_id:97"], False: ["a"], True: ["token_id:97"]}
    assert spoken.output[0].content[0].logprobs[0].token == f"token_id:{ord('[')}"


async def test_a_flag_gives_the_chat_template_arguments(serving, engine):
    async with serving(default_chat_template_kwargs={"mood": "calm", "tone": 1}) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as official:
            plain = await chat(official)
            other = await chat(official, chat_template_kwargs={"tone": 2})
        async with httpx.AsyncClient(base_url=url) as http:
            answer = await http.post("/tokenize", json={"messages": MESSAGES})
            counted = answer.json()["tokens"]
    assert plain.choices[0].message.content == "[user]hello<mood=calm><tone=1>[assistant]"
    assert other.choices[0].message.content == "[user]hello<mood=calm><tone=2>[assistant]"
    assert counted == [BOS, *b"[user]hello<mood=calm><tone=1>[assistant]"]


async def test_a_flag_names_every_response(serving, client):
    assert "x-request-id" not in (await client.get("/health")).headers
    async with (
        serving(enable_request_id_headers=True, api_keys=["key"]) as url,
        httpx.AsyncClient(base_url=url) as named,
    ):
        random = (await named.get("/health")).headers["x-request-id"]
        assert len(random) == 32 and int(random, 16)
        given = await named.get("/metrics", headers={"X-Request-Id": "mine"})
        assert given.headers.get_list("x-request-id") == ["mine"]
        refused = await named.get("/v1/models", headers={"X-Request-Id": "a b"})
        assert refused.status_code == 401
        assert refused.headers["x-request-id"] not in ("a b", random)
        body = {"prompt": "a", "stream": True}
        answer = await named.post(
            "/v1/completions", json=body, headers={"Authorization": "Bearer key"}
        )
        (name,) = answer.headers.get_list("x-request-id")
        assert f'"id":"{name}"' in answer.text, "that of the answer stays"


@pytest.mark.parametrize("fields", [{}, {"headers": ()}, {"headers": ((b"a", b"b"),)}])
async def test_a_response_is_named_whatever_form_its_headers_have(fields):
    """ASGI asks for an iterable, which may be absent."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, **fields})

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "headers": [(b"x-request-id", b"mine")]}
    await RequestIdHeader(app)(scope, None, send)
    assert sent[0]["headers"] == [*fields.get("headers", ()), (b"x-request-id", b"mine")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_proxy_asks_for_the_load_in_a_header(client, stream):
    """5 of 20 blocks are used, and 2 requests wait: see the stand-in."""
    reports = {
        "TEXT": "TEXT named_metrics.kv_cache_usage_perc=0.25, "
        "named_metrics.num_requests_waiting=2.0",
        "json": 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, '
        '"num_requests_waiting": 2.0}}',
        "BIN": None,
        None: None,
    }
    for path, prompt in (("chat/completions", {"messages": MESSAGES}), ("completions", PROMPTED)):
        for form, report in reports.items():
            headers = {} if form is None else {"endpoint-load-metrics-format": form}
            body = {**prompt, "stream": stream}
            answer = await client.post(f"/v1/{path}", json=body, headers=headers)
            assert answer.status_code == 200
            assert answer.headers.get("endpoint-load-metrics") == report


PROMPTED = {"prompt": "a", "max_tokens": 1}
