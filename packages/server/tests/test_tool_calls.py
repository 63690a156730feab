"""Tools and reasoning in chat completions, through the official client."""

from __future__ import annotations

import json
import logging
from typing import Any

import openai
import pytest
import pytest_asyncio
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trencadis.engine import ConfigError, SamplingParams
from trencadis.engine.front.tokenizer import Tokenizer
from trencadis.server import ServerSettings, create_app
from trencadis.server.api.protocol import ChatCompletionRequest
from trencadis.server.generation.answer_plan import AnswerPlan, AnswerPlanner
from trencadis.server.parsers.chat_template import template_traits
from trencadis.server.parsers.harmony import MARKERS
from trencadis.server.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from trencadis.server.parsers.selection import select_parsers
from trencadis.server.parsers.tool_parsers import HermesToolParser

pytestmark = pytest.mark.asyncio

MESSAGES = [{"role": "user", "content": "hello"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time", "description": "Now."}}
TOOLS = [WEATHER, TIME]

ANSWER = (
    "<think>\nParis?\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
QWEN = "{% if tools %}<tool_call>{% endif %}<think>"


@pytest_asyncio.fixture
async def official(engine, serving):
    """A client of a server whose model writes calls as Qwen 3 does."""
    engine.tokenizer.chat_template = QWEN
    engine.max_model_len = 4096
    async with (
        serving() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def complete(client, stream=False, **fields):
    """The choices of a conversation, whole or as the client accumulates them from a stream."""
    request: dict[str, Any] = {"model": "stand-in", "messages": MESSAGES, **fields}
    if not stream:
        return (await client.chat.completions.create(**request)).choices
    async with client.chat.completions.stream(**request) as events:
        return (await events.get_final_completion()).choices


def calls_of(choice):
    return [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_calls_tools_by_itself(official, engine, stream):
    engine.script = list(ANSWER)
    (choice,) = await complete(official, stream, tools=TOOLS)
    assert calls_of(choice) == [("weather", '{"city": "Paris"}'), ("time", "{}")]
    assert choice.message.content == "I look."
    assert choice.message.reasoning == choice.message.reasoning_content == "Paris?"
    assert choice.finish_reason == "tool_calls"
    ids = [call.id for call in choice.message.tool_calls]
    assert all(name.startswith("call_") for name in ids)
    assert len(set(ids)) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_several_answers_has_its_own_calls(official, engine, stream):
    engine.script = [ANSWER[:40], ANSWER[40:90], ANSWER[90:]]
    choices = await complete(official, stream, tools=TOOLS, n=2)
    for choice in choices:
        assert [name for name, _ in calls_of(choice)] == ["weather", "time"]
    ids = {call.id for choice in choices for call in choice.message.tool_calls}
    assert len(ids) == 4


async def test_arguments_are_streamed_as_they_are_generated(official, engine):
    engine.script = list(ANSWER)
    stream = await official.chat.completions.create(
        model="stand-in", messages=MESSAGES, tools=TOOLS, stream=True
    )
    arguments, ids = [], []
    async for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or ():
            arguments.append((call.index, call.function.arguments))
            ids += [call.id] if call.id else []
    assert [text for index, text in arguments if index == 0] == list('{"city": "Paris"}')
    assert len(ids) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_plain_answer_beside_tools_is_content(official, engine, stream):
    engine.script = ["It is ", "a < b", " <tool"]
    (choice,) = await complete(official, stream, tools=TOOLS)
    assert choice.message.content == "It is a < b <tool"
    assert choice.finish_reason == "stop"
    assert not choice.message.tool_calls


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_max_tokens_cuts_says_so(official, engine, stream):
    engine.script = list(ANSWER)
    length = ANSWER.index('Paris"')
    create = official.chat.completions.create(
        model="stand-in", messages=MESSAGES, tools=TOOLS, max_tokens=length, stream=stream
    )
    if stream:
        reasons = [chunk.choices[0].finish_reason async for chunk in await create]
        assert reasons[-1] == "length"
        return
    (choice,) = (await create).choices
    assert choice.finish_reason == "length"
    assert calls_of(choice) == [("weather", '{"city": "')]


async def test_one_call_at_most_without_parallel_calls(official, engine):
    engine.script = [ANSWER]
    (choice,) = await complete(official, tools=TOOLS, parallel_tool_calls=False)
    assert [name for name, _ in calls_of(choice)] == ["weather"]


async def test_reasoning_can_be_left_out_and_is_counted(official, engine):
    engine.script = list("<think>Hm</think>Yes")
    answer = await official.chat.completions.create(
        model="stand-in", messages=MESSAGES, extra_body={"include_reasoning": False}
    )
    message = answer.choices[0].message
    assert message.content == "Yes"
    assert message.reasoning is None
    assert answer.usage.completion_tokens == len(engine.script)
    # without the marker that ends it, which no more reasoning follows
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("<think>Hm")


async def test_the_reasoning_of_each_answer_of_a_stream_is_counted(official, engine):
    engine.script = ["<think>", "Hm", "</think>", "Yes"]
    stream = await official.chat.completions.create(
        model="stand-in",
        messages=MESSAGES,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = [chunk.usage async for chunk in stream][-1]
    assert usage.completion_tokens_details.reasoning_tokens == 2 * 2


async def test_log_probabilities_cover_the_tokens_of_calls(official, engine):
    engine.script = list(ANSWER)
    (choice,) = await complete(official, tools=TOOLS, logprobs=True)
    assert len(choice.logprobs.content) == len(ANSWER)
    stream = await official.chat.completions.create(
        model="stand-in", messages=MESSAGES, tools=TOOLS, logprobs=True, stream=True
    )
    chunks = [chunk.choices[0] async for chunk in stream]
    assert sum(len(c.logprobs.content) for c in chunks if c.logprobs) == len(ANSWER)


async def test_tools_and_earlier_calls_reach_the_chat_template(official, engine):
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
    ]
    tools = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, TIME]
    await complete(official, messages=messages, tools=tools)
    (rendered, shown) = engine.tokenizer.rendered[-1]
    assert rendered[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm",
        "tool_calls": [{**call, "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
    }
    assert rendered[2] == {
        "role": "tool", "tool_call_id": "c1", "content": "21", "name": "weather"
    }  # fmt: skip
    assert shown[0] == WEATHER
    assert shown[1]["function"]["parameters"] == {"type": "object", "properties": {}}


async def test_the_clients_own_message_can_be_sent_back(official, engine):
    engine.script = [ANSWER]
    (choice,) = await complete(official, tools=TOOLS)
    engine.script = ["21 degrees."]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "21"}
        for call in choice.message.tool_calls
    ]
    (choice,) = await complete(
        official, messages=[*MESSAGES, choice.message, *results], tools=TOOLS
    )
    assert choice.message.content == "21 degrees."
    rendered, _ = engine.tokenizer.rendered[-1]
    assert [message.get("name") for message in rendered[2:]] == ["weather", "time"]


async def test_a_template_that_joins_arguments_gets_them_as_text(engine, serving):
    engine.tokenizer.chat_template = (
        "{% if message['tool_calls'] %}<｜tool▁calls▁begin｜>{{ tool['function']['name'] + "
        "tool['function']['arguments'] + '\\n' }}{% endif %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
    async with serving() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="n") as client:
        await complete(client, messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}])
    rendered, _ = engine.tokenizer.rendered[-1]
    assert rendered[1]["tool_calls"] == [call]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tool_is_called_nor_shown_where_none_may_be(official, engine, stream):
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    engine.script = [call]
    (choice,) = await complete(official, stream, tools=TOOLS, tool_choice="none")
    assert choice.message.content == call
    assert choice.finish_reason == "stop"
    _, shown = engine.tokenizer.rendered[-1]
    assert shown is None


@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        ("required", ["weather", "time"], "tool_calls"),
        ({"type": "function", "function": {"name": "time"}}, ["time"], "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_demanded_call_is_a_grammar_for_the_engine(
    engine, serving, choice, names, reason, stream
):
    """Without any parser, too: the format is then the server's choice."""
    engine.script = ['<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>']
    async with serving() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="n") as client:
        (answer,) = await complete(client, stream, tools=TOOLS, tool_choice=choice)
    assert calls_of(answer) == [("time", "{}")]
    assert answer.finish_reason == reason
    _, params, *_ = engine.requests[0]
    grammar = params.structured_output.grammar
    assert [name for name in ("weather", "time") if f'\\"{name}\\"' in grammar] == names


async def test_reasoning_that_the_prompt_opens_is_no_content(engine, serving):
    engine.tokenizer.chat_template = QWEN
    engine.script = ["Hm.\n", "</think>", "\n\nYes"]
    messages = [{"role": "user", "content": "hello<think>\n"}]
    async with serving() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="n") as client:
        fields = {"messages": messages, "extra_body": {"add_generation_prompt": False}}
        (choice,) = await complete(client, **fields)
        assert (choice.message.reasoning, choice.message.content) == ("Hm.", "Yes")
        messages[0]["content"] = "<think></think>"
        (choice,) = await complete(client, **fields)
        assert choice.message.content == "Hm.\n</think>\n\nYes"


async def test_a_form_in_json_comes_after_the_reasoning(official, engine):
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    engine.script = ['<think>Hm.</think>{"city": "Paris"}']
    (choice,) = await complete(official, response_format=form)
    assert (choice.message.reasoning, choice.message.content) == ("Hm.", '{"city": "Paris"}')
    _, params, *_ = engine.requests[0]
    assert "</think>" in params.structured_output.grammar.replace("\\/", "/")
    assert '"city"' in params.structured_output.grammar


async def test_before_a_form_that_is_no_json_there_is_no_reasoning(official, engine):
    engine.script = ["<think>"]
    (choice,) = await complete(official, extra_body={"guided_choice": ["<think>", "b"]})
    assert choice.message.content == "<think>"
    _, params, *_ = engine.requests[0]
    assert params.structured_output.choice == ("<think>", "b")


async def test_a_message_that_is_continued_says_whether_it_reasons(official, engine):
    engine.script = ["Hm.</think>Yes"]
    for content, expected in (("<think>", ("Hm.", "Yes")), ("I say", ("", "Hm.</think>Yes"))):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        extra = {"continue_final_message": True}
        (choice,) = await complete(official, messages=messages, extra_body=extra)
        message = choice.message
        assert (message.reasoning or "", message.content) == expected


async def test_auto_without_a_parser_names_the_flag(engine, serving):
    async with (
        serving(tool_call_parser="none") as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as refusal:
            await complete(client, tools=TOOLS)
    assert refusal.value.param == "tool_choice"
    assert not engine.requests


async def test_a_form_that_is_no_json_is_refused_beside_auto(official):
    with pytest.raises(openai.BadRequestError, match="must be JSON") as refusal:
        await complete(official, tools=TOOLS, extra_body={"guided_regex": "a+"})
    assert refusal.value.param == "guided_regex"


async def test_a_form_in_json_beside_auto_is_for_answers_that_are_no_calls(official, engine):
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    engine.script = [ANSWER]
    (choice,) = await complete(official, tools=TOOLS, response_format=form)
    assert len(calls_of(choice)) == 2
    engine.script = ['{"city": "Paris"}']
    (choice,) = await complete(official, tools=TOOLS, response_format=form)
    assert choice.message.content == '{"city": "Paris"}'


@pytest.mark.parametrize("stream", [False, True])
async def test_a_form_beside_a_forced_call_is_for_answers_that_are_no_calls(
    official, engine, stream
):
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    engine.script = [ANSWER]
    both = {"tools": TOOLS, "response_format": form}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        await complete(official, stream, tool_choice=choice, **both)
        await complete(official, stream, tool_choice=choice, tools=TOOLS)
        with_form, alone = [params.structured_output for _, params, _, _ in engine.requests[-2:]]
        assert with_form == alone


async def test_calls_in_plain_json_are_refused_beside_a_form_in_json(serving):
    form = {"type": "json_object"}
    async with (
        serving(tool_call_parser="llama3_json") as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        with pytest.raises(openai.BadRequestError, match="plain JSON too") as refusal:
            await complete(client, tools=TOOLS, response_format=form)
    assert refusal.value.param == "response_format"


def byte_tokenizer(*special):
    """A tokenizer of bytes, with special tokens from 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    return fast


async def test_markers_that_are_special_tokens_are_demanded_as_tokens():
    """No text has a special token, so a grammar of texts alone would forbid the model's own way."""
    fast = byte_tokenizer("<tool_call>", "</think>")
    fast.add_tokens(["</tool_call>"])
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    parsers = select_parsers("hermes", "qwen3", "", needs_tools=False)
    planner = AnswerPlanner(parsers, Tokenizer(fast))
    plan = planner.plan(ChatCompletionRequest.model_validate(body), [0])
    assert plan.has_special_markers
    assert "<[256]>" in plan.form.grammar
    assert "<[257]>" in plan.form.grammar
    assert '"<tool_call>' not in plan.form.grammar
    assert "</tool_call>" in plan.form.grammar


def gpt_oss_plan(prompt, **fields):
    """The plan for an answer of gpt-oss after a prompt, and the tokenizer."""
    tokenizer = Tokenizer(byte_tokenizer(*MARKERS))
    parsers = select_parsers("openai", "openai_gptoss", "", needs_tools=False)
    request = ChatCompletionRequest.model_validate({"messages": MESSAGES, **fields})
    plan = AnswerPlanner(parsers, tokenizer).plan(request, tokenizer.encode(prompt))
    return plan, tokenizer


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}])
async def test_the_stop_tokens_of_gpt_oss_need_no_file_of_the_model(fields):
    """A copy without generation_config.json would otherwise write calls and answers for ever."""
    plan, tokenizer = gpt_oss_plan("<|start|>user<|message|>hi<|end|><|start|>assistant", **fields)
    stops = [tokenizer.encode(stop)[0] for stop in ("<|return|>", "<|call|>")]
    params = plan.apply_to(SamplingParams(stop_token_ids=(stops[0], 7)))
    assert params.stop_token_ids == (stops[0], 7, stops[1])
    assert not params.skip_special_tokens
    assert plan.apply_to(SamplingParams(ignore_eos=True)).stop_token_ids == ()


@pytest.mark.parametrize(
    ("end", "is_open"),
    [
        ("hi<|end|><|start|>assistant", None),
        ("<|end|><|start|>assistant<|channel|>analysis<|message|>", True),
        ("<|end|><|start|>assistant<|channel|>final<|message|>", False),
    ],
)
async def test_the_prompt_tells_in_which_message_an_answer_of_gpt_oss_begins(end, is_open):
    plan, _ = gpt_oss_plan(f"<|start|>user<|message|>{end}")
    assert plan.is_open is is_open


GPT_OSS = (
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}"
    "{{ 'functions.' + tool_call.name + '<|channel|>commentary ' }}{{ tools }}"
    "{{ tool_call.arguments | tojson }}"
)


THINKING = "{{ '<think>' + message.thinking + '</think>' + message.content }}{{ tools }}"


@pytest.mark.parametrize("stream", [False, True])
async def test_gpt_oss_reasons_and_calls(engine, serving, stream):
    engine.tokenizer.chat_template = GPT_OSS
    engine.script = [
        *("<|channel|>", "analysis", "<|message|>", "Paris?", "<|end|>", "<|start|>", "assistant"),
        *("<|channel|>", "comment", "ary to=", "functions", ".weather ", "<|constrain|>", "json"),
        *("<|message|>", '{"city": ', '"Paris"}'),
    ]
    async with serving() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="n") as client:
        (choice,) = await complete(client, stream, tools=TOOLS)
        assert calls_of(choice) == [("weather", '{"city": "Paris"}')]
        assert choice.message.reasoning == "Paris?"
        assert not choice.message.content
        assert choice.finish_reason == "tool_calls"
        results = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "21"}
        engine.script = ["<|channel|>", "final", "<|message|>", "21", " degrees."]
        messages = [*MESSAGES, choice.message.model_dump(), results]
        (choice,) = await complete(client, stream, messages=messages, tools=TOOLS)
    assert choice.message.content == "21 degrees."
    rendered, _ = engine.tokenizer.rendered[-1]
    assert rendered[1]["thinking"] == "Paris?"
    assert rendered[1]["content"] == ""


@pytest.mark.parametrize(("template", "content"), [(GPT_OSS, ""), (THINKING, "I look it up.")])
async def test_content_before_calls_is_left_out_only_where_the_template_refuses_it(
    engine, serving, template, content
):
    engine.tokenizer.chat_template = template
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "I look it up.", "reasoning_content": "Paris?"}
    result = {"role": "tool", "tool_call_id": "a", "content": "21"}
    messages = [*MESSAGES, answer | {"tool_calls": [call]}, result]
    async with serving() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="n") as client:
        await complete(client, messages=messages)
    rendered, _ = engine.tokenizer.rendered[-1]
    assert rendered[1]["thinking"] == "Paris?"
    assert rendered[1]["content"] == content


async def test_special_tokens_are_in_the_text_if_they_are_markers(official, engine):
    await complete(official, tools=TOOLS)
    _, params, *_ = engine.requests[0]
    assert params.skip_special_tokens
    assert AnswerPlan(has_special_markers=True).apply_to(params).skip_special_tokens
    plan = AnswerPlan(tools=HermesToolParser, has_special_markers=True)
    assert not plan.apply_to(params).skip_special_tokens


TEMPLATES = [
    ("{{ '<tool_call>' }}", "hermes", None),
    ("{{ '<tool_call>\\n<function=' }}", None, None),
    ("{{ '[TOOL_CALLS] [' }}", "mistral", None),
    ("{{ '<|tool_call|>' }}", "granite", None),
    ("{{ '<|action_start|><|plugin|>' }}", "internlm", None),
    ("the format of [func_name1(params_name1=params_value1...", "pythonic", None),
    ("{{ '<｜tool▁calls▁begin｜>' }}{{ '<think>\\n' }}", "deepseek_v3", "qwen3"),
    ('{"name": function name, "parameters": dictionary of argument name', "llama3_json", None),
    ("Here is my thought process:", None, "granite"),
    (GPT_OSS, "openai", "openai_gptoss"),
    ("{{ messages }}", None, None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
async def test_a_template_tells_the_parsers(template, tools, reasoning):
    traits = template_traits(template)
    assert (traits.tool_parser and traits.tool_parser.name) == tools
    assert (traits.reasoning_parser and traits.reasoning_parser.name) == reasoning


async def test_every_parser_is_told_by_a_template_or_named():
    assert {tools for _, tools, _ in TEMPLATES} - {None} == set(TOOL_PARSERS)
    told = {reasoning for *_, reasoning in TEMPLATES} - {None}
    assert told == set(REASONING_PARSERS) - {"deepseek_r1"}  # qwen3 reads where the prompt opens it


async def test_the_log_says_once_that_a_template_leaves_tools_out(engine, serving, caplog):
    engine.tokenizer.chat_template = "{{ messages }}"
    async with (
        serving(tool_call_parser="hermes") as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        await complete(client)
        await complete(client, tools=TOOLS, tool_choice="none")
        assert "shows no tools" not in caplog.text
        for _ in range(2):
            await complete(client, tools=TOOLS)
    assert caplog.text.count("The chat template of stand-in shows no tools") == 1


@pytest.mark.parametrize("template", [QWEN, None], ids=["shows tools", "unknown"])
async def test_the_log_says_nothing_of_a_template_that_may_show_tools(
    engine, serving, caplog, template
):
    engine.tokenizer.chat_template = template
    async with (
        serving(tool_call_parser="hermes") as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        await complete(client, tools=TOOLS)
    assert "shows no tools" not in caplog.text


async def test_the_log_says_which_parser_was_chosen_and_why(engine, caplog):
    engine.tokenizer.chat_template = QWEN
    with caplog.at_level(logging.INFO, "trencadis.server"):
        create_app(engine)
    assert "tool call parser is hermes, because the chat template has <tool_call>" in caplog.text
    assert "--reasoning-parser none" in caplog.text


async def test_a_server_that_needs_a_parser_does_not_start_without(engine):
    with pytest.raises(ConfigError, match="--tool-call-parser"):
        create_app(engine, ServerSettings(enable_auto_tool_choice=True))
    create_app(engine, ServerSettings(enable_auto_tool_choice=True, tool_call_parser="hermes"))
    with pytest.raises(ConfigError, match="'nope' is unknown: use one of deepseek_v3"):
        create_app(engine, ServerSettings(tool_call_parser="nope"))


async def test_tool_calls_of_the_wire_have_the_apis_form(official, engine):
    engine.script = [ANSWER]
    answer = await official.chat.completions.create(
        model="stand-in", messages=MESSAGES, tools=TOOLS
    )
    message = json.loads(answer.model_dump_json(exclude_unset=True))["choices"][0]["message"]
    call = message["tool_calls"][0]
    assert set(call) == {"id", "type", "function"}
    assert call["type"] == "function"
    assert message["role"] == "assistant"
