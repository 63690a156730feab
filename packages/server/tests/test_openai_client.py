"""The official client understands every answer."""

from __future__ import annotations

import openai
import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture
async def official(url):
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


async def test_models(official):
    assert [model.id async for model in official.models.list()] == ["stand-in"]
    assert (await official.models.retrieve("stand-in")).id == "stand-in"


async def test_a_whole_answer(official):
    answer = await official.chat.completions.create(
        model="stand-in", messages=MESSAGES, logprobs=True, top_logprobs=1, n=2
    )
    assert answer.choices[1].message.content == "[user]hello[assistant]"
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "A"  # noqa: S105
    assert answer.usage.prompt_tokens == 23
    assert answer._request_id == answer.id


async def test_a_streamed_answer(official):
    stream = await official.chat.completions.create(
        model="stand-in",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reason, usage = "", None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    assert text == "[user]hello[assistant]"
    assert reason == "stop"
    assert usage.completion_tokens == 22


async def test_the_clients_own_accumulation_of_a_stream(official):
    async with official.chat.completions.stream(model="stand-in", messages=MESSAGES) as stream:
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "[user]hello[assistant]"


@pytest.mark.parametrize("stream", [False, True])
async def test_text_completions(official, stream):
    answer = await official.completions.create(
        model="stand-in", prompt=["ab", "cd"], logprobs=1, stream=stream
    )
    texts = {0: "", 1: ""}
    if stream:
        async for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        texts = {choice.index: choice.text for choice in answer.choices}
    assert texts == {0: "ab", 1: "cd"}


async def test_the_best_of_several(official, engine):
    answer = await official.completions.create(model="stand-in", prompt="ab", n=2, best_of=4)
    assert [choice.index for choice in answer.choices] == [0, 1]
    _, params, _, _ = engine.requests[0]
    assert (params.n, params.best_of) == (2, 4)
    with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
        await official.completions.create(model="stand-in", prompt="ab", best_of=4, stream=True)


async def test_beams_of_a_conversation(official, engine):
    await official.chat.completions.create(
        model="stand-in", messages=MESSAGES, n=2, extra_body={"use_beam_search": True}
    )
    _, params, _, _ = engine.requests[0]
    assert params.use_beam_search


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": -1}, openai.BadRequestError, "invalid_value"),
        ({"max_tokens": 1000}, openai.BadRequestError, "context_length_exceeded"),
    ],
)
async def test_errors_are_the_clients_own(official, fields, kind, code):
    request = {"model": "stand-in", "messages": MESSAGES} | fields
    with pytest.raises(kind) as caught:
        await official.chat.completions.create(**request)
    assert caught.value.code == code
    assert caught.value.param == next(iter(fields))


async def test_overload_is_retried_after_the_time_it_was_told(official, engine):
    engine.overloaded = True
    with pytest.raises(openai.InternalServerError) as caught:
        await official.chat.completions.create(model="stand-in", messages=MESSAGES)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"


async def test_an_error_in_a_stream_is_raised(official, engine):
    engine.dies_after = 2
    stream = await official.chat.completions.create(
        model="stand-in", messages=MESSAGES, stream=True
    )
    with pytest.raises(openai.APIError, match="restart the server"):
        async for _ in stream:
            pass
