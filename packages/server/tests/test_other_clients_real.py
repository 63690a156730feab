"""Client libraries of other projects, against a server process with the small real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from server_process import SMALL_MODEL, runs_small_model, serving_small_model

pytestmark = runs_small_model

QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]


class Stay(BaseModel):
    """A stay in a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


# Each client before the server: without the client none is started.


@pytest.fixture(scope="module")
def litellm() -> Any:
    return pytest.importorskip("litellm")


@pytest.fixture(scope="module")
def langchain_openai() -> Any:
    return pytest.importorskip("langchain_openai")


@pytest.fixture(scope="module")
def pydantic_ai() -> Any:
    return pytest.importorskip("pydantic_ai")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_small_model("--tool-call-parser", "hermes") as url:
        yield url


# litellm


@pytest.fixture
def ask_litellm(litellm, url) -> Any:
    """Ask by ``litellm.completion``, for a greedy answer."""

    def ask(**fields: Any) -> Any:
        return litellm.completion(
            **{"messages": MESSAGES, "temperature": 0, "max_tokens": 100, **fields},
            model=f"openai/{SMALL_MODEL}",
            api_base=f"{url}/v1",
            api_key="none",
            max_retries=0,
        )

    return ask


def test_litellm_reads_whole_answers_and_streams(ask_litellm):
    (choice,) = (answer := ask_litellm(logprobs=True, top_logprobs=2)).choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    chunks = list(ask_litellm(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_litellm_passes_sampling_parameters_on(ask_litellm):
    fields = {"temperature": 1, "n": 3, "seed": 7, "top_p": 0.9, "max_tokens": 30}
    texts = [choice.message.content for choice in ask_litellm(**fields).choices]
    assert len(set(texts)) == 3
    assert [choice.message.content for choice in ask_litellm(**fields).choices] == texts
    stopped = ask_litellm(stop=["Paris"]).choices[0].message.content
    assert "Paris" not in stopped


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_reads_forms_and_calls(ask_litellm, litellm, stream):
    def answer(**fields: Any) -> Any:
        answer = ask_litellm(**fields, stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=MESSAGES)
        return answer.choices[0]

    formed = answer(response_format=Stay).message
    assert Stay.model_validate_json(formed.content)
    tools = {"tools": [openai.pydantic_function_tool(Stay)], "tool_choice": "required"}
    called = answer(**tools, parallel_tool_calls=False)
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert call.function.name == "Stay"
    assert Stay.model_validate_json(call.function.arguments)


# langchain-openai


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def langchain_model(request, langchain_openai, url) -> Any:
    return langchain_openai.ChatOpenAI(
        model=SMALL_MODEL,
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        temperature=0,
        max_tokens=100,
        use_responses_api=request.param,
    )


def test_langchain_reads_whole_answers_and_streams(langchain_model):
    answer = langchain_model.invoke(QUESTION)
    assert "Paris" in answer.text
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    parts = [part.text for part in langchain_model.stream(QUESTION)]
    assert "".join(parts) == answer.text
    assert sum(map(bool, parts)) > 3


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_parses_answers_into_a_model(langchain_model, method):
    structured = langchain_model.with_structured_output(Stay, method=method)
    assert isinstance(structured.invoke(QUESTION), Stay)


def test_langchain_reads_calls_of_tools(langchain_model):
    model = langchain_model.bind_tools([Stay], tool_choice="required", parallel_tool_calls=False)
    (call,) = model.invoke(QUESTION).tool_calls
    assert call["name"] == "Stay"
    assert Stay.model_validate(call["args"])
    merged = None
    for part in model.stream(QUESTION):
        merged = part if merged is None else merged + part
    assert merged.tool_calls[0]["args"] == call["args"]


# pydantic-ai


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def new_agent(request, pydantic_ai, url) -> Any:
    """Make an agent of the served model."""
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    model = getattr(models, request.param)(SMALL_MODEL, provider=provider)

    def new(**fields: Any) -> Any:
        settings = {"temperature": 0, "max_tokens": 100, "parallel_tool_calls": False}
        return pydantic_ai.Agent(model, model_settings=settings, **fields)

    return new


@pytest.mark.asyncio
async def test_pydantic_ai_reads_whole_answers_and_streams(new_agent):
    answer = await new_agent().run(QUESTION)
    assert "Paris" in answer.output
    async with new_agent().run_stream(QUESTION) as stream:
        texts = [text async for text in stream.stream_text(debounce_by=None)]
    assert texts[-1] == answer.output
    assert len(texts) > 3


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
async def test_pydantic_ai_gets_an_output_of_its_type(new_agent, pydantic_ai, kind):
    agent = new_agent(output_type=getattr(pydantic_ai, kind)(Stay))
    assert isinstance((await agent.run(QUESTION)).output, Stay)
    async with agent.run_stream(QUESTION) as stream:
        assert isinstance(await stream.get_output(), Stay)
