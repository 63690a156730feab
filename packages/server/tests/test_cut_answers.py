"""What the server answers, it takes as the next turn of the conversation, wherever it was cut."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from test_tool_calls import ANSWER, QWEN, TOOLS

from trencadis.engine import InvalidRequest
from trencadis.server.api.tools import parsed_arguments

pytestmark = pytest.mark.asyncio

MALFORMED = (
    "<think>a</think>\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": Paris, "b": "line\nline"}}\n'
    "</tool_call>"
)
HELLO = {"role": "user", "content": "hello"}
AGAIN = {"role": "user", "content": "go on"}


@pytest_asyncio.fixture
async def url(engine, serving):
    """A server whose model writes calls and reasoning as Qwen 3 does."""
    engine.tokenizer.chat_template = QWEN
    engine.max_model_len = 8192
    async with serving() as url:
        yield url


def cuts(engine, answer: str):
    """Serves beginnings of an answer, for ``max_tokens`` of their length."""
    for length in {*range(1, len(answer), 6), len(answer)}:
        engine.script = list(answer)
        yield length


@pytest.mark.parametrize("answer", [ANSWER, MALFORMED], ids=["well-formed", "malformed"])
@pytest.mark.parametrize("dumped", [True, False], ids=["as dumped", "without nulls"])
async def test_chat_takes_each_of_its_answers(url, engine, answer, dumped):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def ask(messages: list[Any], length: int) -> Any:
            response = await client.chat.completions.create(
                model="stand-in", messages=messages, tools=TOOLS, max_tokens=length
            )
            return response.choices[0].message

        for length in cuts(engine, answer):
            message = await ask([HELLO], length)
            turn = message.model_dump(exclude_none=not dumped)
            await ask([HELLO, turn, AGAIN], 1)
            (_, rendered, _), _ = engine.tokenizer.rendered[-1]
            assert rendered["content"] == (message.content or "")
            for call, sent in zip(
                rendered.get("tool_calls", ()), message.tool_calls or (), strict=True
            ):
                assert isinstance(call["function"]["arguments"], dict), sent


@pytest.mark.parametrize("answer", [ANSWER, MALFORMED], ids=["well-formed", "malformed"])
async def test_responses_take_each_of_their_outputs(url, engine, answer):
    tools: list[Any] = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
    tools[1]["parameters"] = None
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for length in cuts(engine, answer):
            given: Any = {"model": "stand-in", "tools": tools, "max_output_tokens": length}
            response = await client.responses.create(input="hello", **given)
            turn = [item.model_dump() for item in response.output]
            await client.responses.create(input=[HELLO, *turn, AGAIN], **given)


@pytest.mark.parametrize("answer", [ANSWER, MALFORMED], ids=["well-formed", "malformed"])
async def test_messages_take_each_of_their_contents(url, engine, answer):
    tools: Any = [{"name": "weather", "input_schema": {"type": "object"}}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        for length in cuts(engine, answer):
            given: Any = {"model": "stand-in", "tools": tools, "max_tokens": length}
            message = await client.messages.create(messages=[HELLO], **given)
            turn = {"role": "assistant", "content": [part.model_dump() for part in message.content]}
            await client.messages.create(messages=[HELLO, turn, AGAIN], **given)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans(), st.data())
async def test_arguments_count_as_far_as_they_are_written(
    arguments: dict[str, Any], ascii_only: bool, data: st.DataObject
) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_only)
    length = data.draw(st.integers(1, len(text)))
    read = parsed_arguments(text[:length])
    complete = list(arguments)[: max(0, len(read) - 1)]
    assert list(read) == list(arguments)[: len(read)]
    assert all(read[name] == arguments[name] for name in complete)
    assert length < len(text) or read == arguments


@pytest.mark.parametrize("text", ["[1]", '"{"', "hello", "1", "null", '{"a":' * 100_000])
async def test_arguments_that_are_no_object_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object as text"):
        parsed_arguments(text)
