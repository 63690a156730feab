"""Every parameter of the official clients, against a server process with the small real model.

Each parameter has an effect that is checked, is accepted without one, or is rejected by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from openai.resources.embeddings import Embeddings
from openai.resources.responses import Responses
from parameter_table import Method, ParameterTable, parameters_of
from server_process import SMALL_MODEL, runs_small_model, serving_small_model

anthropic = pytest.importorskip("anthropic")
from anthropic.resources.messages import Messages

pytestmark = runs_small_model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SYSTEM = {"role": "system", "content": "You answer in one word."}
STORY = {"temperature": 1.5, "max_tokens": 12}
"""Arguments with which drawn tokens differ."""

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"name": "stay", "schema": SCHEMA, "strict": True}

Check = Callable[[Method], None]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_small_model("--tool-call-parser", "hermes") as url:
        yield url


@pytest.fixture
def client(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client


def assert_stay(text: str) -> None:
    """The text is JSON of the form of `SCHEMA`."""
    stay = json.loads(text)
    assert set(stay) == {"city", "days"}
    assert stay["city"] in ("Paris", "Rome")
    assert stay["days"] in range(1, 10)


# What chat completions, completions and responses share


def names_the_model(ask: Method) -> None:
    assert ask(model=SMALL_MODEL).model == SMALL_MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        ask(model="gpt-5.4")
    assert caught.value.param == "model"


def limits_tokens(field: str) -> Check:
    def check(ask: Method) -> None:
        answer = ask(**{field: 3})
        assert answer.usage.completion_tokens == 3
        assert answer.choices[0].finish_reason == "length"

    return check


def makes_several_choices(ask: Method) -> None:
    answer = ask(n=3, seed=1, **STORY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(ask.texts_of(answer))) == 3


def repeats_samples(ask: Method) -> None:
    first, again, other = (ask.text(seed=seed, **STORY) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def sharpens_or_flattens(ask: Method) -> None:
    assert len(set(ask.texts(temperature=0, n=3, max_tokens=12))) == 1
    assert len(set(ask.texts(temperature=1.5, n=3, max_tokens=12, seed=1))) == 3


def cuts_the_distribution(ask: Method) -> None:
    greedy = ask.text(temperature=0)
    assert ask.text(temperature=2, top_p=1e-9, seed=1) == greedy
    assert ask.text(temperature=2, top_p=1, seed=1) != greedy


def changes_repetition(field: str) -> Check:
    """A penalty makes answers use more different words, and a negative one fewer."""

    def check(ask: Method) -> None:
        def variety(penalty: float) -> float:
            texts = ask.texts(**{field: penalty}, temperature=1, n=2, seed=1, max_tokens=40)
            words = [word for text in texts for word in text.split()]
            return len(set(words)) / len(words)

        assert variety(2) > variety(-2)

    return check


def chooses_or_bans_a_token(ask: Method) -> None:
    first = ask.text(logit_bias={"1234": 100}, max_tokens=4)
    unit = first[: len(first) // 4]
    assert unit
    assert first == 4 * unit
    both = {"1234": 100, "2345": 100}
    other = ask.text(logit_bias={**both, "1234": -100}, max_tokens=4)
    assert unit not in other
    assert other == 4 * other[: len(other) // 4]


def ends_before_a_text(ask: Method) -> None:
    full = ask.text()
    assert "Paris" in full
    for stop in ("Paris", ["Rome", "Paris"]):
        answer = ask(stop=stop)
        assert ask.texts_of(answer)[0] == full.partition("Paris")[0]
        assert answer.choices[0].finish_reason == "stop"


def adds_usage_to_a_stream(ask: Method) -> None:
    whole = ask()
    options = {"include_usage": True, "include_obfuscation": False}
    *chunks, last = ask(stream=True, stream_options=options)
    assert {chunk.usage for chunk in chunks} == {None}
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def adds_fields_of_vllm(ask: Method) -> None:
    greedy = ask.text(temperature=0)
    assert ask.text(temperature=2, seed=1, extra_body={"top_k": 1}) == greedy


SAMPLING: dict[str, Check] = {
    "model": names_the_model,
    "n": makes_several_choices,
    "seed": repeats_samples,
    "temperature": sharpens_or_flattens,
    "top_p": cuts_the_distribution,
    "frequency_penalty": changes_repetition("frequency_penalty"),
    "presence_penalty": changes_repetition("presence_penalty"),
    "logit_bias": chooses_or_bans_a_token,
    "max_tokens": limits_tokens("max_tokens"),
    "stop": ends_before_a_text,
    "stream_options": adds_usage_to_a_stream,
    "extra_body": adds_fields_of_vllm,
}
CLIENT_OPTIONS = {
    "extra_headers": {"X-Title": "a"},
    "extra_query": {"api-version": "1"},
    "timeout": 60.0,
}
"""Parameters of the client itself."""

# Chat completions

TOOL = {"type": "function", "function": {"name": "book", "parameters": SCHEMA, "strict": True}}
OTHER_TOOL = {"type": "function", "function": {"name": "cancel", "parameters": SCHEMA}}
CALLS = {"tools": [TOOL, OTHER_TOOL], "tool_choice": "required", "max_tokens": 60}


def reads_the_conversation(ask: Method) -> None:
    short = ask(messages=QUESTION)
    assert "Paris" in ask.texts_of(short)[0]
    call = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": "{}"}}
    parts = [{"type": "text", "text": "And of"}, {"type": "text", "text": "Italy?"}]
    turns = [
        {"role": "developer", "content": "You are a helpful assistant."},
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "Paris"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "name": "Ann", "content": parts},
    ]
    long = ask(messages=turns)
    assert long.choices[0].message.role == "assistant"
    assert long.usage.prompt_tokens > short.usage.prompt_tokens + 10
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(openai.BadRequestError, match="image_url") as caught:
        ask(messages=[{"role": "user", "content": [image]}])
    assert caught.value.param == "messages[0].content"


def streams_the_chat(ask: Method) -> None:
    chunks = list(ask(stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(deltas) == ask.text()
    assert sum(map(bool, deltas)) > 3
    assert chunks[-1].choices[0].finish_reason == "stop"


def reports_chosen_tokens(ask: Method) -> None:
    choice = ask(logprobs=True, max_tokens=4).choices[0]
    tokens = choice.logprobs.content
    assert len(tokens) == 4
    assert "".join(token.token for token in tokens) == choice.message.content
    assert bytes(byte for token in tokens for byte in token.bytes).decode() == "".join(
        token.token for token in tokens
    )
    assert all(token.logprob <= 0 and token.top_logprobs == [] for token in tokens)
    assert choice.logprobs.refusal is None


def reports_alternatives(ask: Method) -> None:
    tokens = ask(logprobs=True, top_logprobs=3, max_tokens=4).choices[0].logprobs.content
    for token in tokens:
        values = [other.logprob for other in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
        assert token.top_logprobs[0].token == token.token, "greedy"


def gives_answers_a_form(ask: Method) -> None:
    form = {"type": "json_schema", "json_schema": JSON_SCHEMA}
    assert_stay(ask.text(response_format=form, max_tokens=100))
    assert ask.text(response_format={"type": "text"}) == ask.text()


def calls_of(answer: Any, finish_reason: str = "tool_calls") -> list[Any]:
    """The calls of the first choice, whose arguments have the form of `SCHEMA`."""
    choice = answer.choices[0]
    assert choice.finish_reason == finish_reason
    for call in choice.message.tool_calls:
        assert call.type == "function"
        assert call.id
        assert_stay(call.function.arguments)
    return choice.message.tool_calls


def lets_the_model_call(ask: Method) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    (call,) = calls_of(ask(tools=[TOOL], **fields))
    assert call.function.name == "book"


def says_which_tool_is_called(ask: Method) -> None:
    named = {"type": "function", "function": {"name": "cancel"}}
    # A call that the client demands ends as a text does.
    (call,) = calls_of(ask(**{**CALLS, "tool_choice": named}), finish_reason="stop")
    assert call.function.name == "cancel"
    for choice in ("none", "auto"):  # the model's chat template tells it of no tools
        message = ask(tools=[TOOL], tool_choice=choice).choices[0].message
        assert message.content
        assert not message.tool_calls
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tools=[TOOL], tool_choice=allowed)
    assert caught.value.param == "tool_choice"


def limits_calls(ask: Method) -> None:
    (call,) = calls_of(ask(**CALLS, parallel_tool_calls=False))
    assert call.function.name in ("book", "cancel")
    several = ask(**CALLS, parallel_tool_calls=True).choices[0].message.tool_calls
    assert several[0].function.name in ("book", "cancel")


def names_the_tier(ask: Method) -> None:
    for tier in ("auto", "default"):
        assert ask(service_tier=tier).service_tier == "default"
    assert ask().service_tier is None


CHAT = ParameterTable(
    effects={
        **SAMPLING,
        "messages": reads_the_conversation,
        "max_completion_tokens": limits_tokens("max_completion_tokens"),
        "stream": streams_the_chat,
        "logprobs": reports_chosen_tokens,
        "top_logprobs": reports_alternatives,
        "response_format": gives_answers_a_form,
        "tools": lets_the_model_call,
        "tool_choice": says_which_tool_is_called,
        "parallel_tool_calls": limits_calls,
        "service_tier": names_the_tier,
    },
    ignored={
        **CLIENT_OPTIONS,
        "function_call": "none",
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "prompt_cache_key": "a",
        "prompt_cache_options": {"mode": "explicit"},
        "prompt_cache_retention": "24h",
        "reasoning_effort": "low",  # its chat template has no use for it
        "safety_identifier": "a",
        "store": True,
        "user": "a",
        "verbosity": "medium",
    },
    refused={
        "audio": {"voice": "alloy", "format": "mp3"},
        "function_call": "auto",
        "functions": [{"name": "book", "parameters": SCHEMA}],
        "modalities": ["text", "audio"],
        "moderation": {"model": "omni-moderation-latest"},
        "prediction": {"type": "content", "content": "Paris"},
        "service_tier": "flex",
        "verbosity": "low",
        "web_search_options": {},
    },
)


@pytest.mark.parametrize("name", parameters_of(ChatCompletions.create))
def test_every_parameter_of_chat_completions(name, client):
    def texts_of(answer: Any) -> list[str]:
        return [choice.message.content for choice in answer.choices]

    defaults = {"model": SMALL_MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    create = client.chat.completions.create
    CHAT.check(name, Method(create, texts_of, openai.BadRequestError, defaults))


# Completions


def continues_every_form_of_prompt(ask: Method) -> None:
    forms = ("The capital of France is", [504, 260, 1234], [[504, 260], [504]], ["A", "B", "C"])
    counts = [len(ask.texts(prompt=prompt)) for prompt in forms]
    assert counts == [1, 1, 2, 3]
    assert "Paris" in ask.text(prompt=forms[0])


def keeps_the_most_probable(ask: Method) -> None:
    answer = ask(best_of=4, n=2, seed=7, logprobs=0, temperature=1, max_tokens=12)
    means = [sum(one.logprobs.token_logprobs) / 12 for one in answer.choices]
    assert len(means) == 2
    assert means == sorted(means, reverse=True)


def repeats_the_prompt(ask: Method) -> None:
    assert ask.text(echo=True) == ask.defaults["prompt"] + ask.text()


def reports_parallel_lists(ask: Method) -> None:
    choice = ask(logprobs=2, max_tokens=4).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 4
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert choice.text[offset:].startswith(token)


def streams_the_text(ask: Method) -> None:
    chunks = list(ask(stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == ask.text()
    assert len(chunks) > 3
    assert chunks[-1].choices[0].finish_reason == "length"


COMPLETIONS = ParameterTable(
    effects={
        **SAMPLING,
        "prompt": continues_every_form_of_prompt,
        "best_of": keeps_the_most_probable,
        "echo": repeats_the_prompt,
        "logprobs": reports_parallel_lists,
        "stream": streams_the_text,
    },
    ignored={**CLIENT_OPTIONS, "suffix": "", "user": "a"},
    refused={"suffix": "!"},
)


@pytest.mark.parametrize("name", parameters_of(Completions.create))
def test_every_parameter_of_completions(name, client):
    def texts_of(answer: Any) -> list[str]:
        return [choice.text for choice in answer.choices]

    prompt = "The capital of France is"
    defaults = {"model": SMALL_MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 12}
    create = client.completions.create
    COMPLETIONS.check(name, Method(create, texts_of, openai.BadRequestError, defaults))


# Responses

RESPONSES_TOOL = {"type": "function", "name": "book", "parameters": SCHEMA, "strict": True}
RESPONSES_CALL = {
    "tools": [RESPONSES_TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 60,
}


def reads_items(ask: Method) -> None:
    assert "Paris" in ask.text(input=QUESTION[0]["content"])
    parts = [{"type": "input_text", "text": "And of Italy?"}]
    items = [
        *QUESTION,
        {"type": "function_call", "call_id": "c1", "name": "book", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Paris"},
        *ask(input=QUESTION).output,
        {"role": "user", "content": parts},
    ]
    assert ask(input=items).usage.input_tokens > ask().usage.input_tokens + 20


def repeats_instructions(ask: Method) -> None:
    answer = ask(instructions="You answer in one word.")
    assert answer.instructions == "You answer in one word."
    assert answer.usage.input_tokens != ask().usage.input_tokens


def limits_output(ask: Method) -> None:
    answer = ask(max_output_tokens=3)
    assert (answer.usage.output_tokens, answer.max_output_tokens) == (3, 3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def repeats_metadata(ask: Method) -> None:
    assert ask(metadata={"a": "b"}).metadata == {"a": "b"}


def limits_calls_of_responses(ask: Method) -> None:
    answer = ask(**RESPONSES_CALL)
    assert answer.parallel_tool_calls is False
    assert [item.type for item in answer.output] == ["function_call"]


def calls_in_responses(ask: Method) -> None:
    answer = ask(**RESPONSES_CALL)
    assert answer.tools[0].name == "book"
    for item in answer.output:
        assert (item.type, item.name, item.status) == ("function_call", "book", "completed")
        assert_stay(item.arguments)


def says_which_tool_responses_call(ask: Method) -> None:
    named = {"type": "function", "name": "book"}
    answer = ask(**{**RESPONSES_CALL, "tool_choice": named})
    assert answer.tool_choice.name == "book"
    (call,) = answer.output
    assert_stay(call.arguments)
    assert ask(tools=[RESPONSES_TOOL], tool_choice="none").output_text == ask.text()


def streams_the_response(ask: Method) -> None:
    events = list(ask(stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == ask.text() == events[-1].response.output_text
    assert events[-1].type == "response.completed"


def sharpens_or_flattens_responses(ask: Method) -> None:
    fields = {"max_output_tokens": 12, "temperature": 1.5}
    assert ask(temperature=0.25).temperature == 0.25
    assert len({ask.text(**fields) for _ in range(4)}) > 1


def cuts_the_distribution_of_responses(ask: Method) -> None:
    answer = ask(temperature=2, top_p=1e-9)
    assert answer.top_p == 1e-9
    assert answer.output_text == ask.text()


def gives_responses_a_form(ask: Method) -> None:
    form = {"type": "json_schema", **JSON_SCHEMA}
    assert_stay(ask.text(text={"format": form}, max_output_tokens=100))
    assert ask.text(text={"format": {"type": "text"}, "verbosity": "medium"}) == ask.text()


def stores_nothing(ask: Method) -> None:
    assert ask(store=False).store is False


RESPONSES = ParameterTable(
    effects={
        "model": names_the_model,
        "input": reads_items,
        "instructions": repeats_instructions,
        "max_output_tokens": limits_output,
        "metadata": repeats_metadata,
        "parallel_tool_calls": limits_calls_of_responses,
        "service_tier": names_the_tier,
        "store": stores_nothing,
        "stream": streams_the_response,
        "temperature": sharpens_or_flattens_responses,
        "text": gives_responses_a_form,
        "tool_choice": says_which_tool_responses_call,
        "tools": calls_in_responses,
        "top_p": cuts_the_distribution_of_responses,
    },
    ignored={
        **CLIENT_OPTIONS,
        "background": False,
        "extra_body": {"cache_salt": "a"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
        "prompt_cache_options": {"mode": "explicit"},
        "prompt_cache_retention": "24h",
        "reasoning": {"effort": "high"},
        "safety_identifier": "a",
        "stream_options": {"include_obfuscation": False},
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": "a",
    },
    refused={
        "access_programs": {"cyber": "standard"},
        "background": True,
        "context_management": [{"type": "compaction"}],
        "conversation": "conv_1",
        "image": {"context_compression": "enabled"},
        "include": ["file_search_call.results"],
        "max_tool_calls": 1,
        "moderation": {"model": "omni-moderation-latest"},
        "previous_response_id": "resp_1",
        "prompt": {"id": "pmpt_1"},
        "reasoning": {"mode": "pro"},
        "service_tier": "flex",
        "stream_options": {"include_obfuscation": True},
        "text": {"verbosity": "low"},
        "top_logprobs": 2,
        "truncation": "auto",
    },
)


@pytest.mark.parametrize("name", parameters_of(Responses.create))
def test_every_parameter_of_responses(name, client):
    def texts_of(answer: Any) -> list[str]:
        return [answer.output_text]

    defaults = {"model": SMALL_MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 24}
    create = client.responses.create
    RESPONSES.check(name, Method(create, texts_of, openai.BadRequestError, defaults))


# Anthropic's messages

ANTHROPIC_TOOL = {"name": "book", "input_schema": SCHEMA}
ANTHROPIC_CALL = {
    "tools": [ANTHROPIC_TOOL],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "max_tokens": 60,
}


def names_anthropics_model(ask: Method) -> None:
    assert ask(model=SMALL_MODEL).model == SMALL_MODEL
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        ask(model="claude")


def limits_a_message(ask: Method) -> None:
    message = ask(max_tokens=3)
    assert message.usage.output_tokens == 3
    assert message.stop_reason == "max_tokens"


def reads_turns(ask: Method) -> None:
    assert "Paris" in ask.text(messages=QUESTION)
    use = {"type": "tool_use", "id": "t1", "name": "book", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "Paris"}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And of Italy?"}]},
    ]
    assert ask.text(messages=turns)


def ends_before_a_sequence(ask: Method) -> None:
    full = ask.text()
    message = ask(stop_sequences=["Paris"])
    assert ask.texts_of(message) == [full.partition("Paris")[0]]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")


def streams_the_message(ask: Method) -> None:
    events = list(ask(stream=True))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(deltas) == ask.text()
    assert len(deltas) > 3


def reads_the_system_prompt(ask: Method) -> None:
    message = ask(system=SYSTEM["content"])
    assert tokens_read(message) != tokens_read(ask())
    blocks = [{"type": "text", "text": SYSTEM["content"], "cache_control": {"type": "ephemeral"}}]
    assert ask.texts(system=blocks) == ask.texts_of(message)


def tokens_read(message: Any) -> int:
    """The tokens of the prompt of a message."""
    return message.usage.input_tokens + message.usage.cache_read_input_tokens


def calls_in_messages(ask: Method) -> None:
    message = ask(**ANTHROPIC_CALL)
    assert message.stop_reason == "tool_use"
    for block in message.content:
        assert (block.type, block.name) == ("tool_use", "book")
        assert_stay(json.dumps(block.input))


def says_which_tool_messages_call(ask: Method) -> None:
    named = {"type": "tool", "name": "book", "disable_parallel_tool_use": True}
    (block,) = ask(**{**ANTHROPIC_CALL, "tool_choice": named}).content
    assert_stay(json.dumps(block.input))
    assert ask.text(tools=[ANTHROPIC_TOOL], tool_choice={"type": "none"}) == ask.text()


def gives_messages_a_form(ask: Method) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert_stay(ask.text(output_config=form, max_tokens=100))


MESSAGES = ParameterTable(
    effects={
        "model": names_anthropics_model,
        "max_tokens": limits_a_message,
        "messages": reads_turns,
        "output_config": gives_messages_a_form,
        "stop_sequences": ends_before_a_sequence,
        "stream": streams_the_message,
        "system": reads_the_system_prompt,
        "tool_choice": says_which_tool_messages_call,
        "tools": calls_in_messages,
    },
    ignored={
        **CLIENT_OPTIONS,
        "cache_control": {"type": "ephemeral"},
        "extra_body": {"temperature": 0, "top_k": 1},
        "metadata": {"user_id": "a"},
        "service_tier": "auto",
        "speed": "standard",
        "thinking": {"type": "disabled"},
        "user_profile_id": "a",
        "workspace_id": "a",
    },
    refused={
        "container": "a",
        "diagnostics": {"previous_message_id": "a"},
        "inference_geo": "us",
        "output_config": {"effort": "endless"},
        "speed": "fast",
    },
)


@pytest.fixture
def messages(url) -> Iterator[Any]:
    """Anthropic's client of messages."""
    with anthropic.Anthropic(base_url=url, api_key="none", timeout=60, max_retries=0) as client:
        yield client.messages


@pytest.mark.parametrize("name", parameters_of(Messages.create))
def test_every_parameter_of_messages(name, messages):
    def texts_of(message: Any) -> list[str]:
        return [block.text for block in message.content]

    defaults = {
        "model": SMALL_MODEL,
        "messages": QUESTION,
        "max_tokens": 24,
        "extra_body": {"temperature": 0},
    }
    MESSAGES.check(name, Method(messages.create, texts_of, anthropic.BadRequestError, defaults))


def test_anthropics_client_counts_tokens_and_streams(messages):
    fields = {"model": SMALL_MODEL, "messages": QUESTION}
    counted = messages.count_tokens(**fields, system=SYSTEM["content"])
    with messages.stream(**fields, system=SYSTEM["content"], max_tokens=24) as stream:
        assert "".join(stream.text_stream) == stream.get_final_text()
        assert counted.input_tokens == tokens_read(stream.get_final_message())


# Models and embeddings


def test_the_models_of_the_server(client):
    assert [model.id for model in client.models.list()] == [SMALL_MODEL]
    model = client.models.retrieve(SMALL_MODEL)
    assert (model.object, model.owned_by) == ("model", "trencadis")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5.4")


def embeds_every_form(ask: Method) -> None:
    for inputs, count in (("a", 1), (["a", "b"], 2), ([504, 260], 1), ([[504], [260]], 2)):
        assert len(ask(input=inputs).data) == count


def shortens_vectors(ask: Method) -> None:
    (item,) = ask(dimensions=8).data
    assert len(item.embedding) == 8
    assert sum(value * value for value in item.embedding) == pytest.approx(1, abs=1e-3)


def encodes_vectors(ask: Method) -> None:
    (numbers,), (encoded,) = (ask(encoding_format=form).data for form in ("float", "base64"))
    assert isinstance(encoded.embedding, str)
    assert isinstance(numbers.embedding[0], float)


def names_the_model_of_embeddings(ask: Method) -> None:
    assert ask(model=SMALL_MODEL).model == SMALL_MODEL


EMBEDDINGS = ParameterTable(
    effects={
        "input": embeds_every_form,
        "model": names_the_model_of_embeddings,
        "dimensions": shortens_vectors,
        "encoding_format": encodes_vectors,
    },
    ignored={**CLIENT_OPTIONS, "extra_body": {"add_special_tokens": True}, "user": "a"},
    refused={},
)


@pytest.fixture(scope="module")
def embedding_client() -> Iterator[openai.OpenAI]:
    with (
        serving_small_model("--runner", "pooling") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("name", parameters_of(Embeddings.create))
def test_every_parameter_of_embeddings(name, embedding_client):
    def texts_of(answer: Any) -> list[str]:
        return [str([round(value, 2) for value in item.embedding]) for item in answer.data]

    defaults = {"model": SMALL_MODEL, "input": "hello"}
    create = embedding_client.embeddings.create
    EMBEDDINGS.check(name, Method(create, texts_of, openai.BadRequestError, defaults))


@pytest.mark.parametrize(
    ("create", "table"),
    [
        (ChatCompletions.create, CHAT),
        (Completions.create, COMPLETIONS),
        (Responses.create, RESPONSES),
        (Messages.create, MESSAGES),
        (Embeddings.create, EMBEDDINGS),
    ],
    ids=["chat", "completions", "responses", "messages", "embeddings"],
)
def test_the_tables_name_the_parameters_of_the_clients(create, table):
    table.check_names(parameters_of(create))
