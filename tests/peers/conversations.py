"""The conversations of vLLM's tests that need a model which calls tools, reasons or ends.

Those of tool calls are read from vLLM's files, the short ones of other files are written here. The
answers are ours: what the tests ask for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs

from trencadis.server.api.chat_messages import ChatMessage, messages_for_template
from trencadis.server.parsers.chat_template import template_traits
from trencadis.server.parsers.registry import find_tool_parser

DATE = "26 Jul 2024"
"""What templates take for today, so that prompts are the same each day."""

TEMPLATES = {
    "granite": "examples/tool_chat_template_granite.jinja",
    "mistral": "examples/tool_chat_template_mistral.jinja",
}
"""For servers that name none, by their tool parser: that of the test's own model shows tools."""

JOKE = "Why did the scarecrow win a prize? He was outstanding in his field."
PLAIN = "I cannot look up the weather in Dallas now."
ONE = "It is 98 degrees in Dallas, partly cloudy, with little rain."
TWO = "It is 98 degrees in Dallas and 78 degrees in Orlando."
DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
ORLANDO = {"city": "Orlando", "state": "FL", "unit": "fahrenheit"}
THOUGHT = "<think>\nI think.\n</think>\n\n"
HELPFUL = "You are a helpful assistant."
HELPER = "you are a helpful assistant"
LANGUAGE, ADDRESS = "I disagree, pick another one", "Give me a different one"
PEOPLE = [
    {"name": name, "age": age, "skills": ["a", "b", "c"], "work_history": []}
    for name, age in (("Ann", 30), ("Bob", 40))
]

Messages = Sequence[dict[str, Any]]


@attrs.frozen
class Conversation:
    """``template``: the chat template's text, "" for the tokenizer's own."""

    template: str
    messages: Messages
    tools: Sequence[dict[str, Any]] | None
    answer: str
    continues: bool = False
    """Whether the answer continues the last message."""

    def prompt(self, tokenizer: Any) -> str:
        """The prompt that transformers makes of it."""
        template = self.template or tokenizer.chat_template
        messages = messages_for_template(
            [ChatMessage.model_validate(message) for message in self.messages],
            text_arguments=template_traits(template).text_arguments,
        )
        text: str = tokenizer.apply_chat_template(
            messages,
            tools=self.tools,
            chat_template=template,
            add_generation_prompt=not self.continues,
            continue_final_message=self.continues,
            tokenize=False,
            date_string=DATE,
        )
        return text


def template_of(flags: Sequence[str]) -> str | None:
    """The file of the chat template for a server with these flags of vLLM's; None for none."""
    if "--chat-template" in flags:
        return flags[flags.index("--chat-template") + 1]
    parser = flags[flags.index("--tool-call-parser") + 1] if "--tool-call-parser" in flags else ""
    return str(Path.cwd() / TEMPLATES[parser]) if parser in TEMPLATES else None


def conversations() -> list[Conversation]:
    """All, each once for each server that gets it."""
    tests = import_module("tests.tool_use.utils")
    mistral = import_module("tests.tool_use.mistral.utils")
    found = []
    for config in tests.CONFIGS.values():
        if not config.get("extended"):
            found += list(_of_tool_use(tests, config))
    for config in mistral.CONFIGS.values():
        found += list(_of_mistral(tests, config))
    return [*found, *_of_responses(), *_of_chat(), *_of_calls()]


def _of_tool_use(tests: Any, config: dict[str, Any]) -> Iterator[Conversation]:
    """Those of test_chat_completions.py, test_tool_calls.py and test_parallel_tool_calls.py."""
    make, both = _maker(config), [tests.WEATHER_TOOL, tests.SEARCH_TOOL]
    parser, name = _parser(config), tests.WEATHER_TOOL["function"]["name"]

    def ensured(messages: Messages) -> Messages:
        kept: Messages = tests.ensure_system_prompt(messages, config)
        return kept

    for tools in (None, [tests.WEATHER_TOOL]):
        yield make(ensured(tests.MESSAGES_WITHOUT_TOOLS), tools, JOKE)
    question = [{"role": "user", "content": "What is the weather in Dallas, Texas?"}]
    yield make(ensured(question), both[:1], forced(parser, name, [DALLAS]))
    yield make(ensured(tests.MESSAGES_ASKING_FOR_TOOLS), both, calls(parser, name, [DALLAS]))
    yield make(tests.MESSAGES_WITH_TOOL_RESPONSE, both, ONE)
    has_both = config.get("supports_parallel", True)
    with_prompt = ensured if "granite-3.0" in config["model"] else list
    called = [DALLAS, ORLANDO] if has_both else [DALLAS]
    parallel = with_prompt(tests.MESSAGES_ASKING_FOR_PARALLEL_TOOLS)
    yield make(parallel, both, calls(parser, name, called))
    if has_both:
        yield make(with_prompt(tests.MESSAGES_WITH_PARALLEL_TOOL_RESPONSE), both, TWO)


def _of_mistral(tests: Any, config: dict[str, Any]) -> Iterator[Conversation]:
    """Those of mistral/test_mistral_tool_calls.py."""
    make, both = _maker(config), [tests.WEATHER_TOOL, tests.SEARCH_TOOL]
    parser, name = _parser(config), tests.WEATHER_TOOL["function"]["name"]

    def ensured(messages: Messages) -> Messages:
        kept: Messages = tests.ensure_system_prompt(messages, config)
        return kept

    asking = ensured(tests.MESSAGES_ASKING_FOR_TOOLS)
    yield make(asking, both, calls(parser, name, [DALLAS]))
    yield make(asking, both[:1], forced(parser, name, [DALLAS]))
    yield make(asking, None, PLAIN)
    yield make(ensured(tests.MESSAGES_WITHOUT_TOOLS), None, JOKE)
    yield make(ensured(tests.MESSAGES_WITH_TOOL_RESPONSE), both, ONE)
    parallel = ensured(tests.MESSAGES_ASKING_FOR_PARALLEL_TOOLS)
    yield make(parallel, both[:1], calls(parser, name, [DALLAS, ORLANDO]))


def _turns(*texts: str, system: str = "") -> Messages:
    roles = ("user", "assistant")
    begin = [{"role": "system", "content": system}] if system else []
    return begin + [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]


def _without_tools(messages: Messages, answer: str, *, continues: bool = False) -> Conversation:
    """One with the tokenizer's own template, which shows no tools. So the prompt is short."""
    return Conversation("", messages, None, answer, continues)


def _of_responses() -> Iterator[Conversation]:
    """Those of openai/responses, test_include_reasoning.py and launchers/test_run_batch.py."""
    yield _without_tools(_turns("What is 1+1? Be concise."), f"{THOUGHT}2")
    yield _without_tools(_turns("Hello.", ""), f"{THOUGHT}Hello!")
    yield _without_tools(_turns("Compute 17 * 19 and explain briefly."), f"{THOUGHT}323")
    yield _without_tools(_turns("Compute 23 * 17 and explain briefly."), f"{THOUGHT}391")
    yield _without_tools(_turns("Solve this math problem: 2+2=?", system=HELPFUL), f"{THOUGHT}4")
    yield _without_tools(
        _turns("What is the capital of France?", system=HELPFUL), f"{THOUGHT}Paris"
    )
    yield _without_tools(_turns("What is 123 * 456?"), "56088")
    yield _without_tools(_turns("What is 13 * 24?"), f"{THOUGHT}312")
    yield _without_tools(
        _turns("What is 13 * 24?", system="Finish the answer with QED."), "312. QED."
    )
    multiplied = ("What is 5 * 3?", "15. QED.", "Multiply the result by 2.")
    yield _without_tools(_turns(*multiplied, system="Finish the answer with QED."), "30. QED.")
    for hello in ("Hello!", "Hello"):
        yield _without_tools(_turns(hello), "Hello!")
    tested = "You are tested on your ability to retrieve the correct information from the previous "
    first = ("Hello, my name is John.", "Hello John.")
    yield _without_tools(_turns(first[0], system=f"{tested}response."), first[1])
    yield _without_tools(
        _turns(*first, "Actually, my name is not John. My name is Mark."), "Hello Mark."
    )
    yield _without_tools(_turns(*first, "What is my name again? Answer in one word."), "John")
    second = (*first, "Actually, my name is not John. My real name is Mark.")
    yield _without_tools(_turns(*second), "Hello Mark.")
    yield _without_tools(
        _turns(*second, "Hello Mark.", "What is my real name again? Answer in one word."), "Mark"
    )
    event = {"event_name": "science fair", "date": "Friday", "participants": ["Alice", "Bob"]}
    fair = "Alice and Bob are going to a science fair on Friday."
    yield _without_tools(_turns(fair, system="Extract the event information."), json.dumps(event))


def _of_chat() -> Iterator[Conversation]:
    """Those of openai/chat_completion."""
    yield _without_tools([{"role": "my-custom-role", "content": "what is 1+1?"}], "2")
    yield _without_tools(
        _turns("what is 1+1? please provide the result without any other text."), "2"
    )
    asked = 'what is 1+1? please respond with a JSON object, the format is {"result": 2}'
    yield _without_tools(_turns(asked), '{"result": 2}')
    saying = "Here is a common saying about apple. An apple a day, keeps"
    yield _without_tools(
        _turns("tell me a common saying", saying), " the doctor away.", continues=True
    )
    samples = import_module("tests.entrypoints.conftest")
    regex = _plain(samples.sample_regex)
    for question, answers, other in (
        ("The best language for type-safe systems programming is ", ("C++", "Swift"), LANGUAGE),
        (
            f"Give an example IP address with this regex: {regex}",
            ("127.0.0.1", "10.0.0.1"),
            ADDRESS,
        ),
    ):
        yield _without_tools(_turns(question, system=HELPER), answers[0])
        yield _without_tools(_turns(question, answers[0], other, system=HELPER), answers[1])
    schema = _plain(samples.sample_json_schema)
    fits = f"Give an example JSON for an employee profile that fits this schema: {schema}"
    by_tool = "Give an example JSON for an employee profile using the specified tool."
    another = "Give me another one with a different name and age"
    ann, bob = (json.dumps(person) for person in PEOPLE)
    yield _without_tools(_turns(fits, system=HELPER), ann)
    yield _without_tools(_turns(fits, ann, another, system=HELPER), bob)
    named = [forced("hermes", "dummy_function_name", [person]) for person in PEOPLE]
    yield _without_tools(_turns(by_tool, system=HELPER), named[0])
    yield _without_tools(_turns(by_tool, ann, another, system=HELPER), named[1])


def _of_calls() -> Iterator[Conversation]:
    """Those of openai/test_return_token_ids.py, anthropic, and of tools in openai/responses."""
    weather = forced("hermes", "get_weather", [{"location": "Paris"}])
    yield _without_tools(_turns("What's the weather like in Paris?", system=HELPFUL), weather)
    weather = forced("hermes", "get_current_weather", [{"location": "New York"}])
    yield _without_tools(_turns("What's the weather like in New York today?"), weather)
    for system in ("", HELPER):
        yield _without_tools(_turns("how are you!", system=system), "I am well.")
    state = forced("hermes", "mcp__computer_use__get_app_state", [{"app": "Google Chrome"}])
    yield _without_tools(_turns("Use the computer app state tool to inspect Google Chrome."), state)


def _plain(fixture: Any) -> Any:
    """What a fixture without arguments returns."""
    return fixture._get_wrapped_function()()


def _maker(config: dict[str, Any]) -> Any:
    file = template_of(config["arguments"])
    template = "" if file is None else Path(file).read_text("utf-8")

    def make(
        messages: Messages, tools: Sequence[dict[str, Any]] | None, answer: str
    ) -> Conversation:
        return Conversation(template, messages, tools, answer)

    return make


def _parser(config: dict[str, Any]) -> str:
    arguments = config["arguments"]
    name: str = arguments[arguments.index("--tool-call-parser") + 1]
    return name


def forced(parser: str, name: str, each: Iterable[dict[str, Any]]) -> str:
    """Calls in the form in which engine-serve forces them."""
    form = find_tool_parser(parser).call_format
    texts = [
        form.before_name + name + form.before_arguments + json.dumps(arguments) + form.after
        for arguments in each
    ]
    return form.begin + form.separator.join(texts) + form.end


def calls(parser: str, name: str, each: Iterable[dict[str, Any]]) -> str:
    """Calls as the models of a parser write them."""
    if parser != "pythonic":
        return forced(parser, name, each)
    texts = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for arguments in each
    ]
    return f"[{', '.join(texts)}]"
