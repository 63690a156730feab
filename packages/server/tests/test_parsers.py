"""What parsers find in an answer, however its text is cut into deltas."""

from __future__ import annotations

import itertools
import json
import tracemalloc

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trencadis.engine import ConfigError
from trencadis.server.parsers.answer_parser import AnswerParser
from trencadis.server.parsers.events import CallArguments, CallBegin, Content, Reasoning
from trencadis.server.parsers.reasoning_parsers import GraniteReasoningParser
from trencadis.server.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    find_reasoning_parser,
    find_tool_parser,
)
from trencadis.server.parsers.tool_parsers import HermesToolParser
from trencadis.server.settings import ServerSettings

TOOLS = {"get", "put"}

EXAMPLES = {
    "hermes": (
        'Sure!\n<tool_call>\n{"name": "get", "arguments": {"a": "x\\"}"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "put", "arguments": {"b": [1, {}]}}\n</tool_call>'
    ),
    "llama3_json": (
        '{"name": "get", "parameters": {"a": "x\\"}"}}; '
        '{"name": "put", "parameters": {"b": [1, {}]}}'
    ),
    "mistral": (
        'Sure![TOOL_CALLS] [{"name": "get", "arguments": {"a": "x\\"}"}, "id": "abcdefghi"}, '
        '{"name": "put", "arguments": {"b": [1, {}]}}]'
    ),
    "deepseek_v3": (
        "Sure!<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
        '{"a": "x\\"}"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>put\n'
        '```json\n{"b": [1, {}]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "granite": (
        'Sure!<|tool_call|>[{"name": "get", "arguments": {"a": "x\\"}"}}, '
        '{"name": "put", "arguments": {"b": [1, {}]}}]'
    ),
    "internlm": (
        'Sure!<|action_start|><|plugin|>\n{"name": "get", "parameters": {"a": "x\\"}"}}'
        '<|action_end|>\n<|action_start|><|plugin|>\n{"name": "put", "parameters": '
        '{"b": [1, {}]}}<|action_end|>'
    ),
    "pythonic": """[get(a='x"}'), put(b=[1, {}])]""",
    "openai": (
        "Sure!<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json"
        '<|message|>{"a": "x\\"}"}<|call|><|start|>assistant to=functions.put<|channel|>commentary '
        'json<|message|>{"b": [1, {}]}<|call|>'
    ),
}
"""Two calls in each format, as the models' chat templates write them."""

PIECES = [
    *("<tool_call>", "</tool_call>", "<|tool_call|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "function",
        "\n```json\n",
    ),
    *("\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<think>", "</think>", "[CALL_ID]"),
    *("Here is my thought process:", "Here's my response:", "Here ", "is my "),
    *(
        '{"name": "get", ',
        '"arguments": ',
        '{"a": "b", "c": [1, null, {"d": -1e3}]}',
        '"parameters": ',
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        ";",
        '"',
        "\\",
        '"name"',
        '"get"',
        "get",
        "12",
        " ",
        "\n",
        "é",
        "<",
    ),
    *("<|start|>", "assistant", "<|channel|>", "analysis", "final", "commentary", "<|message|>"),
    *(
        " to=functions.get",
        "to=python",
        "<|constrain|>",
        "json",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ),
    *("<|action_start|>", "<|plugin|>", "<|action_end|>", "<|python_start|>", "<|python_end|>"),
    *("[get(", "a='b", "'", "c=[1, None, {'d': -1e3}]", ")", "(", "=", '"""', "\\u00e9"),
    *(" " * 70, '"{\\"a\\": 1}"', "null", "</tool", "_call>"),
]
TEXTS = st.lists(
    st.sampled_from(PIECES) | st.sampled_from(list(EXAMPLES.values())) | st.text(max_size=3),
    max_size=14,
).map("".join)
PARSERS = st.tuples(
    st.sampled_from([None, *REASONING_PARSERS]),
    st.sampled_from([None, True, False]),
    st.sampled_from([None, *TOOL_PARSERS]),
    st.sampled_from([None, 1]),
)


def new_parser(reasoning, is_open, tools, max_calls=None):
    return AnswerParser(
        None if reasoning is None else find_reasoning_parser(reasoning)(is_open),
        None if tools is None else find_tool_parser(tools)(TOOLS),
        max_calls,
    )


def found(events):
    """Content, reasoning, and the name and arguments of each call."""
    content, reasoning, calls = "", "", []
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallBegin):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        else:
            name, arguments = calls[event.index]
            calls[event.index] = (name, arguments + event.text)
    return content, reasoning, calls


def parse(parser, deltas):
    events = [event for delta in deltas for event in parser.push(delta)]
    return found(events + parser.finish())


def cut(text, positions):
    bounds = [0, *sorted(position % (len(text) + 1) for position in positions), len(text)]
    return [text[low:high] for low, high in itertools.pairwise(bounds)]


@settings(max_examples=400, deadline=None)
@given(TEXTS, PARSERS, st.lists(st.integers(0, 10_000), max_size=12))
@example(
    '<tool_call>{"name": "get", "arguments": {"a" 1}}</tool_call>b',
    (None, None, "hermes", None),
    [],
)
@example(" " * 80 + "<tool_call>", (None, None, "hermes", None), [3, 70, 75, 81])
def test_a_stream_is_the_whole_answer_wherever_it_is_cut(text, parsers, positions):
    whole = parse(new_parser(*parsers), [text])
    assert parse(new_parser(*parsers), cut(text, positions)) == whole
    assert parse(new_parser(*parsers), text) == whole  # character by character


def test_each_format_has_an_example_and_is_named_by_the_help_of_its_flag():
    assert EXAMPLES.keys() == TOOL_PARSERS.keys()
    for field, names in (
        ("tool_call_parser", TOOL_PARSERS),
        ("reasoning_parser", REASONING_PARSERS),
    ):
        text = attrs.fields_dict(ServerSettings)[field].metadata["help"]
        assert not [name for name in names if name not in text]


def test_a_parser_that_is_no_parser_is_refused():
    with pytest.raises(ConfigError, match="reasoning_parser 'builtins:int' is not a Reasoning"):
        find_reasoning_parser("builtins:int")
    with pytest.raises(ConfigError, match="tool_call_parser 'builtins:int' is not a ToolParser"):
        find_tool_parser("builtins:int")


@pytest.mark.parametrize("name", EXAMPLES)
def test_calls_are_found_in_each_format(name):
    content, _, calls = parse(new_parser(None, None, name), [EXAMPLES[name]])
    assert calls == [("get", '{"a": "x\\"}"}'), ("put", '{"b": [1, {}]}')]
    assert content == ("" if name in ("llama3_json", "pythonic") else "Sure!")


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_part_of_a_marker_is_content_and_arguments_come_bit_by_bit(name):
    parser = new_parser(None, None, name)
    events = [event for letter in EXAMPLES[name] for event in parser.push(letter)]
    content, _, _ = found(events + parser.finish())
    assert content in ("", "Sure!")
    least = 15 if name == "pythonic" else 20  # characters of its arguments are fewer
    assert sum(isinstance(event, CallArguments) for event in events) > least


OTHER_FORMS = [
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "get"}</tool_call>', '{"a": 1}'),
    ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
    ("hermes", '<tool_call>{"name": "get"}</tool_call>', "{}"),
    ("hermes", '<tool_call>{"name": "get", "arguments": null}</tool_call>', "{}"),
    ("hermes", '<tool_call>{"name": "get", "arguments": {}}}</tool_call>\n', "{}"),
    ("hermes", '<tool_call>{"id": [1], "name": "get", "arguments": {}}', "{}"),
    ("llama3_json", '<|python_tag|>{"name": "get", "parameters": {}}', "{}"),
    ("mistral", '[TOOL_CALLS]get[ARGS]{"a": 1}', '{"a": 1}'),
    ("mistral", '[TOOL_CALLS]get[CALL_ID]abcdefghi[ARGS]{"a": 1}', '{"a": 1}'),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "{}",
    ),
    ("internlm", '<|action_start|>{"name": "get", "arguments": {}}', "{}"),
    ("pythonic", "<|python_start|>[get(a=1)]<|python_end|>", '{"a": 1}'),
    ("pythonic", "<|python_tag|>[get()]", "{}"),
    ("pythonic", ' [{"name": "get", "arguments": {"a": 1}}] ', '{"a": 1}'),
    ("pythonic", "[get(a=True, b=None, c=false,)]", '{"a": true, "b": null, "c": false}'),
    (
        "pythonic",
        "[get(a=(1, -2.5, 1e+3), b={'x': {}})]",
        '{"a": [1, -2.5, 1000.0], "b": {"x": {}}}',
    ),
    ("pythonic", r"""[get(a='it\'s', b="\u00e9\n\d")]""", r"""{"a": "it's", "b": "é\n\\d"}"""),
    ("pythonic", "[get(a='''\"a\" or 'b' ''', b='')]", r"""{"a": "\"a\" or 'b' ", "b": ""}"""),
    ("openai", ' to=functions.get<|channel|>commentary json<|message|>{"a": 1}', '{"a": 1}'),
    ("openai", "<|channel|>analysis to=functions.get code<|message|>{}<|call|>", "{}"),
    ("openai", "<|channel|>commentary to=functions.get<|constrain|>json<|message|>", "{}"),
    ("openai", "<|start|>assistant to=get<|channel|>commentary<|message|>\n{}<|call|>", "{}"),
    ("granite", '<tool_call>[{"name": "get", "arguments": {}}]', "{}"),
    ("granite", '<tool_call>{"name": "get", "arguments": {}}</tool_call>', "{}"),
]


@pytest.mark.parametrize(("name", "text", "arguments"), OTHER_FORMS)
def test_other_ways_to_write_a_call_are_read(name, text, arguments):
    assert parse(new_parser(None, None, name), [text]) == ("", "", [("get", arguments)])


def test_newer_mistral_models_write_a_marker_for_each_call():
    text = '[TOOL_CALLS]get[ARGS]{"a": 1}[TOOL_CALLS]put{"b": 2}'
    _, _, calls = parse(new_parser(None, None, "mistral"), [text])
    assert calls == [("get", '{"a": 1}'), ("put", '{"b": 2}')]


NO_CALLS = [
    ("hermes", "<tool_call>get()</tool_call> or not"),
    ("hermes", '<tool_call>{"name": "get", "arg'),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", "a < b <tool"),
    ("llama3_json", '{"name": "Bob", "parameters": {}}'),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", 'I call {"name": "get", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>search.call(query="x")'),
    ("mistral", "[TOOL_CALLS] none"),
    ("mistral", "[TOOL_CALLS] []"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function get"),
    ("granite", "<|tool_call|>[1]"),
    ("internlm", "<|action_start|><|interpreter|>print(1)"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[see(a=1)]"),
    ("pythonic", "[get(1)]"),
    ("pythonic", '[{"name": "Bob"}]'),
    ("pythonic", "I call [get()]"),
    ("openai", "<|channel|>final<|message|>Yes"),
    ("openai", "<|channel|>commentary to=functions.get"),
    ("openai", "<|channel|>commentary to=functions.<|message|>{}"),
    ("openai", "<|channel|>commentary to=functions.get<|message|>print(1)"),
    ("openai", "<|channel|>analysis to=python code<|message|>{}"),
    ("openai", " to be or not"),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_content(name, text):
    assert parse(new_parser(None, None, name), [text]) == (text, "", [])


def test_a_call_after_a_malformed_one_is_found():
    text = '<tool_call>oops<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    assert parse(new_parser(None, None, "hermes"), [text]) == (
        "<tool_call>oops", "", [("get", "{}")]
    )  # fmt: skip


def test_arguments_that_are_no_json_are_passed_on_to_their_end():
    text = '<tool_call>{"name": "get", "arguments": {"a": 1 2}}</tool_call>Done'
    content, _, calls = parse(new_parser(None, None, "hermes"), [text])
    assert (content, calls) == ("Done", [("get", '{"a": 1 2}}')])
    for cut_off in ('{"a":', "{", '{"a": 1', '{"a": "b"'):
        text = f'<tool_call>{{"name": "get", "arguments": {cut_off}</tool_call>Done'
        content, _, calls = parse(new_parser(None, None, "hermes"), [text])
        assert (content, calls) == ("Done", [("get", cut_off)])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[get(a=1 + 1)]", '{"a": 1 + 1)]'),
        ("[get(a=1, 2)]", '{"a": 1, 2)]'),
        ("[get(a='b", '{"a": "b'),
        ("[get(a=now)]", '{"a": now)]'),
        ("[get(a=1e999)]", '{"a": 1e999)]'),  # JSON has no infinity
        ("[get(a=1__0)]", '{"a": 1__0)]'),
        ("[get(a=" + "[" * 100, '{"a": ' + "[" * 100),
    ],
)
def test_arguments_that_are_no_python_literal_are_passed_on_to_their_end(text, arguments):
    assert parse(new_parser(None, None, "pythonic"), [text]) == ("", "", [("get", arguments)])


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,5}", fullmatch=True),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(),
            lambda part: st.lists(part) | st.dictionaries(st.text(), part),
            max_leaves=6,
        ),
        min_size=1,
    ),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_a_call_in_python_has_the_values_that_python_reads(arguments, positions):
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    deltas = cut(f"[get({written})]", positions)
    _, _, ((_, found_arguments),) = parse(new_parser(None, None, "pythonic"), deltas)
    assert json.loads(found_arguments) == arguments


def test_one_call_at_most_where_calls_are_not_parallel():
    text = EXAMPLES["hermes"]
    content, _, calls = parse(new_parser(None, None, "hermes", 1), [text])
    assert (content, [name for name, _ in calls]) == ("Sure!", ["get"])


THOUGHTS = [
    ("qwen3", None, "<think>\nHm.\n</think>\n\nYes", ("Yes", "Hm.", [])),
    ("qwen3", None, "Yes", ("Yes", "", [])),
    ("qwen3", True, "Hm.\n</think>\n\nYes", ("Yes", "Hm.", [])),
    ("qwen3", True, "Hm", ("", "Hm", [])),
    ("qwen3", False, "Yes </think>", ("Yes </think>", "", [])),
    ("deepseek_r1", None, "Hm.\n</think>\n\nYes", ("Yes", "Hm.", [])),
    ("deepseek_r1", None, "<think>\nHm.\n</think>\n\nYes", ("Yes", "Hm.", [])),
    ("deepseek_r1", False, "Yes", ("Yes", "", [])),
    ("granite", None, "Here's my thought process: Hm. Here is my response: Y", ("Y", "Hm.", [])),
    (
        "openai_gptoss",
        True,
        "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Y",
        ("Y", "Hm.", []),
    ),
    ("openai_gptoss", False, "Yes<|return|>", ("Yes", "", [])),
    ("openai_gptoss", None, "Yes", ("Yes", "", [])),
    ("openai_gptoss", None, "<|channel|>final<|message|> Yes ", (" Yes ", "", [])),
    ("openai_gptoss", None, "<|channel|>anal", ("", "", [])),
]


@pytest.mark.parametrize(("name", "is_open", "text", "expected"), THOUGHTS)
def test_reasoning_is_separated_from_the_answer(name, is_open, text, expected):
    assert parse(new_parser(name, is_open, None), [text]) == expected


ARITHMETIC = 'User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.'
END = "<|end|><|start|>assistant"
HARMONY = [
    (
        f"<|channel|>analysis<|message|>{ARITHMETIC}{END}<|channel|>final<|message|>2 + 2 = 4."
        "<|return|>",
        ("2 + 2 = 4.", ARITHMETIC, []),
    ),
    (
        f"<|channel|>analysis<|message|>Need to use function get_weather.{END}<|channel|>"
        "commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"location":"San Francisco"}<|call|>',
        (
            "",
            "Need to use function get_weather.",
            [("get_weather", '{"location":"San Francisco"}')],
        ),
    ),
    (
        f"<|channel|>analysis<|message|>{{long chain of thought}}{END}<|channel|>commentary"
        "<|message|>**Action plan**:\n1. Generate an HTML file\n---\nWill start executing the plan "
        f"step by step{END}<|channel|>commentary to=functions.generate_file<|constrain|>json"
        '<|message|>{"template": "basic_html", "path": "index.html"}<|call|>',
        (
            "**Action plan**:\n1. Generate an HTML file\n---\n"
            "Will start executing the plan step by step",
            "{long chain of thought}",
            [("generate_file", '{"template": "basic_html", "path": "index.html"}')],
        ),
    ),
    (
        "<|start|>assistant to=functions.get_weather<|channel|>commentary<|constrain|>json"
        '<|message|>{"location": "Tokyo"}<|call|>',
        ("", "", [("get_weather", '{"location": "Tokyo"}')]),
    ),
    (
        "<|channel|>analysis<|message|>We need to use lookup_weather tool.<|end|><|start|>assistant"
        '<|channel|>analysis to=lookup_weather code<|message|>{"location": "Tokyo"}<|call|>',
        (
            "",
            "We need to use lookup_weather tool.",
            [("lookup_weather", '{"location": "Tokyo"}')],
        ),
    ),
]
"""Answers and their messages, from docs/format.md and tests/test_harmony.py of
github.com/openai/harmony (Apache 2.0), the second of them shortened."""


@pytest.mark.parametrize(("text", "expected"), HARMONY)
def test_the_published_examples_of_harmony_are_read(text, expected):
    for deltas in ([text], text, text.removesuffix("<|call|>").removesuffix("<|return|>")):
        assert parse(new_parser("openai_gptoss", None, "openai"), deltas) == expected


def test_messages_of_gpt_oss_without_an_end_or_with_another_recipient():
    text = (
        "<|channel|>analysis<|message|>One<|channel|>analysis to=python code<|message|>2+2<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.get<|message|>{}<|start|>assistant"
        "<|channel|>final<|message|>Done<|end|>"
    )
    assert parse(new_parser("openai_gptoss", None, "openai"), text) == (
        "Done", "One\n2+2", [("get", "{}")]
    )  # fmt: skip


def test_a_call_of_gpt_oss_is_content_where_no_tools_were_sent():
    call = "<|start|>assistant<|channel|>commentary to=functions.get<|message|>{}<|call|>"
    text = f"<|channel|>final<|message|>Y{call}"
    assert parse(new_parser("openai_gptoss", None, None), [text]) == (f"Y{call}", "", [])


def test_calls_are_found_only_after_the_reasoning():
    call = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    text = f"<think>I could {call}</think>{call}"
    assert parse(new_parser("qwen3", None, "hermes"), text) == (
        "", f"I could {call}", [("get", "{}")]
    )  # fmt: skip


HOSTILE = [
    *(
        "<tool_call>",
        '<tool_call>{"a":[',
        '<tool_call>{"name": "get", "arguments": {',
        "[",
        "<",
        " ",
    ),
    *(
        '{"name":',
        "[TOOL_CALLS][{",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        '<tool_call>{"x":"',
    ),
    *("<|channel|>", "<|start|>assistant ", "<|channel|>commentary to=functions.a<|message|>{"),
    *("<|python_tag|>", "[TOOL_CALLS]a", "Here is my ", "\\", '"', "<tool_call>\n", "x" * 40),
]


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_little_text_is_held_back_between_deltas(tools):
    """What is held back is read again with each delta, so it bounds the time of a long answer."""
    for piece in HOSTILE:
        parser = find_tool_parser(tools)(TOOLS)
        for letter in piece * (1500 // len(piece)):
            parser.push(letter)
            unread = parser.reader._text[parser.reader._position :]
            assert len(unread) < 128


@pytest.mark.parametrize(
    ("reasoning", "begin"),
    [
        (None, '<tool_call>{"name": "get", "arguments": {"a": "'),
        ("openai_gptoss", "<|channel|>analysis<|message|>"),
        ("openai_gptoss", '<|channel|>commentary to=functions.get<|message|>{"a": "'),
    ],
)
def test_what_is_passed_on_is_not_kept(reasoning, begin):
    parser = new_parser(reasoning, None, "hermes" if reasoning is None else "openai")
    parser.push(begin)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1000):
            parser.push(f"{number:04}" * 250)
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 100_000, "of a million characters"


def test_long_answers_are_read_at_once():
    """Not so in quadratic time: each of these would take minutes."""
    for tools in TOOL_PARSERS:
        for piece in HOSTILE:
            find_tool_parser(tools)(TOOLS).push(piece * (100_000 // len(piece)))


class OwnParser(HermesToolParser):
    """A parser of the user's own."""


class OwnReasoning(GraniteReasoningParser):
    """A parser of the user's own."""


def test_own_parsers_are_named_by_module_and_class():
    assert find_tool_parser(f"{__name__}:OwnParser") is OwnParser
    assert find_reasoning_parser(f"{__name__}:OwnReasoning") is OwnReasoning


@pytest.mark.parametrize(
    "name",
    ["nope", "json:nope", "nope:Nope", "json:loads", f"{__name__}:OwnReasoning", "a:b:c", ":"],
)
def test_a_parser_that_is_none_is_refused_by_name(name):
    with pytest.raises(ConfigError, match="tool_call_parser") as refusal:
        find_tool_parser(name)
    assert name in str(refusal.value)


def test_ids_of_calls_have_the_form_that_templates_want():
    assert len({HermesToolParser.new_call_id() for _ in range(9)}) == 9
    for _ in range(9):
        new = find_tool_parser("mistral").new_call_id()
        assert len(new) == 9
        assert new.isalnum()


def test_arguments_are_the_json_that_the_model_wrote():
    written = {"text": 'a "b" \\ {é}', "n": [1, -2.5e3, None, True], "o": {"p": {}}}
    text = f'<tool_call>{{"name": "get", "arguments": {json.dumps(written)}}}</tool_call>'
    _, _, [(_, arguments)] = parse(new_parser(None, None, "hermes"), text)
    assert json.loads(arguments) == written
