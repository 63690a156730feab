"""Whatever a model would write, a demanded call is one of a tool, with arguments of its schema."""

from __future__ import annotations

import json
import random
import re

import pytest

from trencadis.engine.grammars.grammar import new_matcher
from trencadis.server.parsers.answer_parser import AnswerParser
from trencadis.server.parsers.events import CallArguments, CallBegin, Content, Reasoning
from trencadis.server.parsers.forced_calls import Thought, after_thought, forced_calls
from trencadis.server.parsers.harmony import MARKERS
from trencadis.server.parsers.reasoning_parsers import (
    HarmonyReasoningParser,
    Qwen3ReasoningParser,
)
from trencadis.server.parsers.registry import TOOL_PARSERS, find_tool_parser

llguidance = pytest.importorskip("llguidance", reason="needs the engine's extra `structured`")

PLACE = {
    "type": "object",
    "description": 'text with "quotes", ::= and \\ in it',
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "title": {"type": "boolean", "title": "no annotation, but a property"},
        "near": {"type": "array", "items": {"$ref": "#/$defs/city"}, "maxItems": 2},
    },
    "required": ["city", "title"],
    "$defs": {"city": {"enum": ["Paris", "São Paulo", 'a "b"']}},
}
TOOLS = {"place": PLACE, "place.v2:x": {"type": "object", "properties": {}}}
CITIES = PLACE["$defs"]["city"]["enum"]
OPENED = Thought(("<think>",), ("</think>",), is_open=True)
POSSIBLE = Thought(("<think>",), ("</think>",), is_open=False)


def matcher_of(form):
    """A matcher over bytes: token n is byte n."""
    grammar = llguidance.grammar_from("grammar", form.grammar)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def written_by_chance(form, seed, max_bytes=4000):
    """An answer of a model whose tokens are all as probable."""
    rng, matcher, text = random.Random(seed), matcher_of(form), bytearray()
    while not matcher.is_stopped() and len(text) < max_bytes:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if matcher.is_accepting() and (not allowed or rng.random() < 0.5):
            break
        assert allowed, (bytes(text), matcher.get_error())
        letters = [byte for byte in allowed if byte not in b" \n"]
        text.append(rng.choice(letters if letters and rng.random() < 0.7 else allowed))
        assert matcher.consume_token(text[-1])
    return bytes(text).decode()


def accepts(form, text):
    matcher = matcher_of(form)
    consumed = matcher.try_consume_tokens(list(text.encode()))
    return consumed == len(text.encode()) and matcher.is_accepting()


def calls_in(text, tools, reasoning=None):
    parser = AnswerParser(reasoning, tools(TOOLS))
    calls, content = [], ""
    for event in parser.push(text) + parser.finish():
        if isinstance(event, CallBegin):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[event.index][1] += event.text
        elif isinstance(event, Content):
            content += event.text
    assert content == ""
    return [(name, json.loads(arguments)) for name, arguments in calls]


def check(name, arguments):
    assert name in TOOLS
    if name != "place":
        assert arguments == {}
        return
    assert {"city", "title"} <= set(arguments) <= {"city", "title", "near"}
    assert arguments["city"] in CITIES
    assert isinstance(arguments["title"], bool)
    assert all(city in CITIES for city in arguments.get("near", ()))


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_all_that_a_grammar_allows_is_read_as_valid_calls(name):
    tools = find_tool_parser(name)
    numbers = set()
    for seed in range(12):
        text = written_by_chance(forced_calls(TOOLS, tools.call_format), seed)
        calls = calls_in(text, tools)
        assert calls, text
        for call in calls:
            check(*call)
        numbers.add(len(calls))
    assert max(numbers) > 1


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_one_call_where_no_more_may_be(name):
    tools = find_tool_parser(name)
    form = forced_calls(TOOLS, tools.call_format, max_calls=1)
    for seed in range(6):
        assert len(calls_in(written_by_chance(form, seed), tools)) == 1


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_calls_may_come_after_reasoning(name):
    tools = find_tool_parser(name)
    call = written_by_chance(forced_calls(TOOLS, tools.call_format), 1)
    thought = "Hm, <think <tool_call> \n{}.\n</think>\n\n"
    for reasoning, text, is_accepted in (
        (OPENED, f"{thought}{call}", True),
        (OPENED, "Hm, {}", False),
        (POSSIBLE, f"<think>{thought}{call}", True),
        (POSSIBLE, call, True),
        (POSSIBLE, f"{thought}{call}", False),
        (None, f"<think>{thought}{call}", False),
    ):
        form = forced_calls(TOOLS, tools.call_format, thought=reasoning)
        assert accepts(form, text) == is_accepted
        if is_accepted and reasoning is not None:
            assert calls_in(text, tools, Qwen3ReasoningParser(reasoning.is_open or None))


@pytest.mark.parametrize("name", [name for name in TOOL_PARSERS if name != "llama3_json"])
def test_json_may_come_in_place_of_calls(name):
    tools = find_tool_parser(name)
    form = forced_calls(TOOLS, tools.call_format, or_json={"type": "object", "required": ["a"]})
    assert accepts(form, '{"a": 1}')
    assert not accepts(form, '{"b": 1}')
    assert accepts(form, written_by_chance(forced_calls(TOOLS, tools.call_format), 1))


@pytest.mark.parametrize("name", [name for name in TOOL_PARSERS if name != "llama3_json"])
def test_markers_that_are_special_tokens_are_forced_as_tokens(name):
    """No text has them. In this test, bytes that UTF-8 does not have are the special tokens."""
    tools = find_tool_parser(name)
    markers = [*tools.markers, "<think>", "</think>"]
    special = {marker: 0xF5 + number for number, marker in enumerate(markers)}
    plain = written_by_chance(forced_calls(TOOLS, tools.call_format), 1)
    form = forced_calls(TOOLS, tools.call_format, thought=POSSIBLE, special=special)
    for text in (plain, f"<think>Hm, {{}}.</think>\n{plain}"):
        pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text)
        tokens = [[special[part]] if part in special else part.encode() for part in pieces]
        matcher = matcher_of(form)
        ids = [token for part in tokens for token in part]
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert matcher.is_accepting()


def test_an_answer_in_json_may_come_after_reasoning():
    form = after_thought({"enum": ["a"]}, OPENED)
    assert accepts(form, 'Hm.</think>\n\n"a"')
    assert not accepts(form, 'Hm.</think>\n\n"b"')
    sentences = Thought(("Here is my thought process:",), ("Here is my response:",), is_open=False)
    form = after_thought({"enum": ["a"]}, sentences)
    assert accepts(form, 'Here is my thought process: Hm. Here is my response: "a"')


GPT_OSS = Thought(
    HarmonyReasoningParser.begins,
    HarmonyReasoningParser.ends,
    is_open=False,
    before_answer=HarmonyReasoningParser.before_answer,
)
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize("has_special", [False, True])
def test_gpt_oss_writes_json_into_the_final_channel(has_special):
    special = {marker: 0xF5 + i for i, marker in enumerate(MARKERS)} if has_special else {}

    def is_accepted(text):
        pieces = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
        tokens = [[special[part]] if part in special else part.encode() for part in pieces]
        matcher = matcher_of(after_thought({"enum": ["a"]}, GPT_OSS, special))
        ids = [token for part in tokens for token in part]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert is_accepted('<|channel|>final<|message|>"a"')
    assert is_accepted(f'{ANALYSIS}<|channel|>final<|message|>"a"')
    assert not is_accepted('"a"')
    assert not is_accepted(f'{ANALYSIS}"a"')


def test_gpt_oss_may_reason_before_calls_that_are_demanded():
    tools = find_tool_parser("openai")
    form = forced_calls(TOOLS, tools.call_format, thought=GPT_OSS)
    call = written_by_chance(forced_calls(TOOLS, tools.call_format), 1)
    for text in (call, ANALYSIS + call):
        assert accepts(form, text)
        assert calls_in(text, tools, HarmonyReasoningParser())


def test_schemas_that_refer_to_each_other_stay_open():
    base = {"$defs": {"a": {"type": "object", "properties": {"a": {"type": "null"}}}}}
    schema = base | {
        "type": "object",
        "allOf": [{"$ref": "#/$defs/a"}],
        "properties": {"b": {"type": "null"}},
        "required": ["a", "b"],
    }
    form = forced_calls({"f": schema}, find_tool_parser("hermes").call_format)
    text = '<tool_call>\n{"name": "f", "arguments": {"a": null, "b": null}}\n</tool_call>'
    assert accepts(form, text)


def test_properties_that_a_schema_allows_by_name_stay_allowed():
    schema = {"type": "object", "properties": {}, "additionalProperties": {"type": "null"}}
    form = forced_calls({"f": schema}, find_tool_parser("hermes").call_format)
    text = '<tool_call>\n{"name": "f", "arguments": {"a": null}}\n</tool_call>'
    assert accepts(form, text)
    assert not accepts(form, text.replace("null", "1"))


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_an_argument_that_would_be_another_number_is_refused(name):
    """Forced calls are checked as every grammar is, before their request reaches the core."""
    tokenizer = llguidance.LLTokenizer("byte")
    for number, is_kept in ((2**53, True), (2**53 + 1, False)):
        schema = {"properties": {"id": {"enum": [number]}}, "required": ["id"]}
        form = forced_calls({"find": schema}, find_tool_parser(name).call_format)
        if is_kept:
            new_matcher(tokenizer, form)
        else:
            with pytest.raises(ValueError, match=f"enum {number} would be {2**53}"):
                new_matcher(tokenizer, form)


def test_reasoning_is_not_a_call():
    parser = Qwen3ReasoningParser(True)
    events = parser.push("a</think>b") + parser.finish()
    assert events == [Reasoning("a"), Content("b")]
