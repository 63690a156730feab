"""Client libraries beside the official ones, and curl."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
import pytest_asyncio
from curl_examples import EMBEDDINGS, EXAMPLES, check_answer, needs_curl, printed_by_curl
from pydantic import BaseModel
from test_tool_calls import QWEN

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]  # some take seconds to import

MESSAGES = [{"role": "user", "content": "hello"}]
ECHO = "[user]hello[assistant]"
"""What the stand-in for an engine answers to them."""


class City(BaseModel):
    """A city."""

    city: str


@pytest_asyncio.fixture
async def tool_url(engine, serving):
    """The URL of a server whose model writes calls as Qwen 3 does."""
    engine.tokenizer.chat_template = QWEN
    engine.max_model_len = 8192
    async with serving() as url:
        yield url


@pytest_asyncio.fixture
async def embedding_url(engine, serving):
    """The URL of a server whose model computes embeddings."""
    engine.embedding_size = 8
    async with serving() as url:
        yield url


def call_of(name: str) -> list[str]:
    """The texts of the tokens of a call."""
    call = json.dumps({"name": name, "arguments": {"city": "Paris"}})
    return ["<tool_call>\n", call[:9], call[9:], "\n</tool_call>"]


# litellm


@pytest.fixture
def litellm_fields(url) -> dict[str, Any]:
    return {
        "model": "openai/stand-in",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "max_retries": 0,
    }


async def test_litellm_reads_whole_answers(litellm_fields):
    litellm = pytest.importorskip("litellm")
    answer = await litellm.acompletion(messages=MESSAGES, n=2, logprobs=True, **litellm_fields)
    assert [choice.message.content for choice in answer.choices] == [ECHO, ECHO]
    assert answer.usage.prompt_tokens == 23
    assert answer.choices[0].finish_reason == "stop"


async def test_litellm_reads_streams(litellm_fields):
    litellm = pytest.importorskip("litellm")
    stream = await litellm.acompletion(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **litellm_fields
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ECHO
    assert chunks[-1].usage.completion_tokens == 22


async def test_litellm_tells_the_errors_apart(litellm_fields, engine):
    litellm = pytest.importorskip("litellm")
    long = [{"role": "user", "content": "a" * 300}]
    for fields in ({"messages": MESSAGES, "max_tokens": 1000}, {"messages": long}):
        with pytest.raises(litellm.ContextWindowExceededError):
            await litellm.acompletion(**fields, **litellm_fields)
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        await litellm.acompletion(
            messages=MESSAGES, **(litellm_fields | {"model": "openai/another"})
        )
    engine.overloaded = True
    with pytest.raises(litellm.exceptions.ServiceUnavailableError, match="waiting"):
        await litellm.acompletion(messages=MESSAGES, **litellm_fields)


async def test_litellm_reads_calls_of_tools(tool_url, engine, litellm_fields):
    litellm = pytest.importorskip("litellm")
    engine.script = call_of("weather")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    fields = litellm_fields | {"api_base": f"{tool_url}/v1", "tools": [tool]}
    answer = await litellm.acompletion(messages=MESSAGES, tool_choice="required", **fields)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_litellm_reads_embeddings(litellm_fields, embedding_url):
    litellm = pytest.importorskip("litellm")
    fields = litellm_fields | {"api_base": f"{embedding_url}/v1"}
    answer = await litellm.aembedding(input=["a", "bc"], **fields)
    assert [len(item["embedding"]) for item in answer.data] == [8, 8]
    assert answer.usage.prompt_tokens == 5


# langchain-openai


def langchain_model(url: str, **fields: Any) -> Any:
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        model="stand-in", base_url=f"{url}/v1", api_key="none", max_retries=0, **fields
    )


@pytest.mark.parametrize("use_responses_api", [False, True])
async def test_langchain_reads_whole_answers_and_streams(url, use_responses_api):
    model = langchain_model(url, use_responses_api=use_responses_api)
    answer = await model.ainvoke("hello")
    assert answer.text == ECHO
    assert answer.usage_metadata["output_tokens"] == 22
    parts = [part.text async for part in model.astream("hello")]
    assert len(parts) > 3
    assert "".join(parts) == ECHO


async def test_langchain_continues_a_stored_response(serving, engine):
    """It sends what is new, and the id of the answer before."""
    engine.script = ["Hi!"]
    async with serving(responses_store=True) as url:
        model = langchain_model(url, use_responses_api=True, use_previous_response_id=True)
        first = await model.ainvoke([("human", "hello")])
        history = [("human", "never sent"), first, ("human", "and now?")]
        second = await model.ainvoke(history)
    assert second.text == "Hi!"
    messages, _ = engine.tokenizer.rendered[-1]
    assert [message["content"] for message in messages] == ["hello", "Hi!", "and now?"]


async def test_langchain_reads_embeddings(embedding_url):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.OpenAIEmbeddings(
        model="stand-in",
        base_url=f"{embedding_url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,  # otherwise it sends tokens of OpenAI's own models
    )
    assert [len(vector) for vector in await model.aembed_documents(["a", "bc"])] == [8, 8]


async def test_langchain_reads_calls_of_tools(tool_url, engine):
    engine.script = call_of("City")
    model = langchain_model(tool_url).bind_tools([City], tool_choice="required")
    answer = await model.ainvoke("Where?")
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("City", {"city": "Paris"})
    merged = None
    async for part in model.astream("Where?"):
        merged = part if merged is None else merged + part
    assert merged.tool_calls[0]["args"] == {"city": "Paris"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_langchain_parses_answers_into_a_model(tool_url, engine, method):
    is_call = method == "function_calling"
    engine.script = call_of("City") if is_call else ['{"city": ', '"Paris"}']
    model = langchain_model(tool_url).with_structured_output(City, method=method)
    assert await model.ainvoke("Where?") == City(city="Paris")


# pydantic-ai


def agent(url: str, **fields: Any) -> Any:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = OpenAIChatModel("stand-in", provider=OpenAIProvider(openai_client=client))
    return pydantic_ai.Agent(model, **fields)


async def test_pydantic_ai_reads_whole_answers_and_streams(url):
    answer = await agent(url).run("hello")
    assert answer.output == ECHO
    async with agent(url).run_stream("hello") as stream:
        assert [text async for text in stream.stream_text(debounce_by=None)][-1] == ECHO


async def test_pydantic_ai_gets_an_output_of_its_type(tool_url, engine):
    engine.script = call_of("final_result")
    answer = await agent(tool_url, output_type=City).run("Where?")
    assert answer.output == City(city="Paris")
    (_, params, _, _), *_ = engine.requests
    assert params.structured_output is not None, "the call is forced"


# curl


@needs_curl
@pytest.mark.parametrize("name", EXAMPLES)
async def test_the_examples_of_the_api_reference_are_answered(tool_url, name):
    example = EXAMPLES[name]
    answer = await asyncio.to_thread(printed_by_curl, tool_url, "stand-in", example)
    check_answer(example, *answer)


@needs_curl
async def test_the_example_of_embeddings_is_answered(embedding_url):
    answer = await asyncio.to_thread(printed_by_curl, embedding_url, "stand-in", EMBEDDINGS)
    check_answer(EMBEDDINGS, *answer)


@pytest.mark.parametrize("stream", [False, True])
async def test_litellm_reads_answers_of_vllm(engine, url, stream):
    """Its provider for servers of vLLM, which sends and reads fields of vLLM."""
    litellm = pytest.importorskip("litellm")
    fields = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0, "stream": stream}
    answer = await litellm.acompletion(
        model="hosted_vllm/stand-in", messages=MESSAGES, reasoning_effort="low", top_k=3, **fields
    )
    if stream:
        chunks = [chunk async for chunk in answer]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = answer.choices[0].message.content
    assert text.startswith("[user]hello")
    assert engine.requests[0][1].top_k == 3
