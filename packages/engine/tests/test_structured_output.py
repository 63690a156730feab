"""Structured outputs: whatever the weights, an answer has the form that its request asks for."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import msgspec
import numpy as np
import pytest
import torch
from child_processes import children

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import (
    LLM,
    AsyncEngine,
    EngineConfig,
    EngineCore,
    EngineDead,
    EngineOverloaded,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
    StructuredOutput,
    Tokenizer,
)
from trencadis.engine.api.structured_output import MAX_BYTES
from trencadis.engine.devices import CPUDevice, Device, HPUDevice
from trencadis.engine.front.request_stream import RequestStream
from trencadis.engine.grammars.checker import GrammarChecker
from trencadis.engine.grammars.compiler import GrammarCompiler
from trencadis.engine.grammars.finite_schemas import accepts_finite
from trencadis.engine.grammars.matcher import GrammarMatcher, allowed_tokens
from trencadis.scheduler import BatchControl

needs_llguidance = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="needs the extra `structured`"
)

YES_NO = StructuredOutput(choice=["yes", "no"])
DIGITS = StructuredOutput(regex="[0-9]{4}")
PERSON = StructuredOutput(
    json_schema={
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
TEXTS = {
    "json_object": True,
    "json_schema": "{}",
    "regex": "a+",
    "choice": ["a", "b"],
    "grammar": 'start: "a"',
}


# What a request may say.


@pytest.mark.parametrize("name", TEXTS)
def test_each_form_is_accepted_alone_and_reaches_the_core(name: str) -> None:
    params = SamplingParams(structured_output=StructuredOutput(**{name: TEXTS[name]}))
    content = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(content, type=SamplingParams) == params


def test_a_schema_is_the_same_as_a_dict_and_as_text() -> None:
    schema = {"type": "string", "enum": ["ü"]}
    text = json.dumps(schema, ensure_ascii=False)
    assert StructuredOutput(json_schema=schema) == StructuredOutput(json_schema=text)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json_object": False},
        {"regex": "a", "choice": ["a"]},
        {"json_object": True, "json_schema": {}},
        {"json_object": "yes"},
        {"json_schema": 7},
        {"json_schema": 1},
        {"json_schema": 0},
        {"json_schema": {"enum": [object()]}},
        {"json_schema": {"enum": [float("nan")]}},
        {"regex": ""},
        {"regex": b"a"},
        {"regex": "\ud800"},
        {"regex": "a" * (MAX_BYTES + 1)},
        {"choice": []},
        {"choice": "yes"},
        {"choice": ["yes", ""]},
        {"choice": ["yes", 1]},
        {"choice": ["ü" * MAX_BYTES]},
        {"grammar": ["start"]},
    ],
)
def test_a_wrong_form_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        StructuredOutput(**fields)
    assert refusal.value.field == "structured_output"
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize("name", ["use_beam_search", "ignore_eos"])
def test_what_contradicts_it_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as refusal:
        SamplingParams(structured_output=YES_NO, **{name: True})
    assert refusal.value.field == name


def test_without_llguidance_the_refusal_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidRequest, match=r"pip install 'trencadis-engine\[structured\]'"):
        GrammarChecker(str).check(YES_NO)


# Grammars are checked in a separate process.


def references(count: int) -> dict[str, Any]:
    """A schema in which each property refers to the next one."""
    chain = {
        f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["x"]}
        for i in range(count)
    }
    return {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def rules(count: int) -> str:
    chain = [f"r{i}: r{i + 1}" for i in range(count)]
    return "\n".join(["start: r0", *chain, f'r{count}: "a"'])


def ambiguous_rules(count: int) -> str:
    start = " ".join(f"x{i}?" for i in range(count))
    return "\n".join([f"start: {start}", *(f'x{i}: "a" | "b" start' for i in range(count))])


def alternatives(*schemas: dict[str, str]) -> StructuredOutput:
    properties = {"a": {"anyOf": list(schemas)}}
    return StructuredOutput(
        json_schema={"type": "object", "properties": properties, "required": ["a"]}
    )


def recursive(*, required: list[str]) -> StructuredOutput:
    """An object that has its own schema in a property, at a place that is not ``$defs``."""
    node = {
        "type": "object",
        "properties": {"a": {"$ref": "#/components/a~1b/0"}, "b": {"type": "string"}},
        "required": required,
    }
    schema = {"components": {"a/b": [node]}, "allOf": [{"$ref": "#/components/a~1b/0"}]}
    return StructuredOutput(json_schema=schema)


ENDLESS = {
    "a property that is required": recursive(required=["a"]),
    "a property of two types": StructuredOutput(
        json_schema={"type": ["object", "array"], "properties": {"a": {"$ref": "#"}}}
        | {"required": ["a"], "minItems": 1, "items": {"$ref": "#"}}
    ),
    "the items of an array": StructuredOutput(
        json_schema={"type": "array", "minItems": 2, "items": {"$ref": "#"}}
        | {"prefixItems": [{"type": "string"}]}
    ),
    "each alternative": alternatives({"$ref": "#"}, {"$ref": "#"}),
}
ENDING = {
    "another property is required": recursive(required=["b"]),
    "an alternative": alternatives({"$ref": "#"}, {"type": "null"}),
    "an array that may be empty": StructuredOutput(
        json_schema={"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
        | {"$defs": {"x": {"type": "array", "items": {"$ref": "#"}}}}
    ),
    "first items that end": StructuredOutput(
        json_schema={"type": "array", "minItems": 1, "items": {"$ref": "#"}}
        | {"prefixItems": [{"type": "string"}]}
    ),
    "any value": StructuredOutput(json_schema=True),
}
REFUSED = {
    "text that is not JSON": StructuredOutput(json_schema='{"type":'),
    "unknown type": StructuredOutput(json_schema={"type": "strng"}),
    "keyword that cannot be guaranteed": StructuredOutput(json_schema={"uniqueItems": True}),
    "regex with an open group": StructuredOutput(regex="("),
    "look-ahead": StructuredOutput(regex="(?=a)b"),
    "nothing matches": StructuredOutput(regex=r"[^\s\S]"),
    "reference to itself": StructuredOutput(json_schema={"$ref": "#"}),
    "lengths that contradict": StructuredOutput(
        json_schema={"type": "string", "minLength": 5, "maxLength": 2}
    ),
    "JSON nested 600 deep": StructuredOutput(
        json_schema='{"properties":{"a":' * 600 + "{}" + "}}" * 600
    ),
    "800 nested references": StructuredOutput(json_schema=references(800)),
    "3,500 nested rules": StructuredOutput(grammar=rules(3500)),
    "2,000 ambiguous rules": StructuredOutput(grammar=ambiguous_rules(1900)),
    "30,000 optional letters": StructuredOutput(regex="a?" * 30_000),
    "GBNF nested 5,000 deep": StructuredOutput(grammar=f"root ::= {'(' * 5000}'a'{')' * 5000}"),
    "Lark nested 30,000 deep": StructuredOutput(grammar=f'start: {"(" * 30_000}"a"{")" * 30_000}'),
    "regex nested 30,000 deep": StructuredOutput(regex="(" * 30_000 + "a" + ")" * 30_000),
    "intersection of 60 regexes": StructuredOutput(
        grammar="start: A\nA: " + " & ".join(f"/(.*{chr(97 + i % 26)}.*){{30}}/" for i in range(60))
    ),
}
SERVED = {
    "(a|a)*b": StructuredOutput(regex="(a|a)*b"),
    "a{1,100000}": StructuredOutput(regex="a{1,100000}"),
    "((a*)*)*b": StructuredOutput(regex="((a*)*)*b"),
    "repetitions nested": StructuredOutput(regex="((a{1,1000}){1,1000}){1,1000}"),
    "4,000 alternatives": StructuredOutput(regex="|".join(f"word{i}" for i in range(4000))),
    "4,000 choices": StructuredOutput(choice=[f"word {i}" for i in range(4000)]),
    "objects nested 40 deep": StructuredOutput(json_schema=nested(40)),
    "recursive reference": StructuredOutput(
        json_schema={"type": "object", "properties": {"next": {"$ref": "#"}}}
    ),
    "references that double 30 times": StructuredOutput(
        json_schema={
            "$defs": {
                **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)},
                "d30": {"type": "string"},
            },
            "$ref": "#/$defs/d0",
        }
    ),
    "left-recursive grammar": StructuredOutput(grammar='start: start start | "a"'),
    "GBNF": StructuredOutput(grammar='root ::= "a" | "b" root'),
}


@pytest.fixture(scope="module")
def checker(tiny_model: Path) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(Tokenizer.load(str(tiny_model)).to_json)
    yield checker
    checker.close()


@needs_llguidance
@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_or_hostile_grammar_is_refused(checker: GrammarChecker, name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be served") as refusal:
        checker.check(REFUSED[name])
    assert refusal.value.field == "structured_output"
    assert len(str(refusal.value)) < 400
    assert checker.recall(YES_NO) is False
    checker.check(DIGITS)  # the process still answers


@needs_llguidance
@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_that_recurs_for_ever_is_refused(checker: GrammarChecker, name: str) -> None:
    with pytest.raises(InvalidRequest, match="no finite value matches it"):
        checker.check(ENDLESS[name])


@needs_llguidance
@pytest.mark.parametrize("name", ENDING)
def test_a_schema_that_may_end_is_served(checker: GrammarChecker, name: str) -> None:
    checker.check(ENDING[name])


SELF = {"$ref": "#"}
FINITE: list[tuple[Any, bool]] = [
    *((json.loads(form.json_schema or ""), False) for form in ENDLESS.values()),
    *((json.loads(form.json_schema or ""), True) for form in ENDING.values()),
    (True, True),
    (SELF, False),
    ({"$ref": "other.json#/a"}, True),
    ({"$ref": "#/a/b"}, True),
    ({"$ref": "#/$defs/x/1", "$defs": {"x": [SELF]}}, True),
    ({"$ref": "#/$defs/x/0", "$defs": {"x": [SELF]}}, False),
    ({"$ref": "#/$defs/x/00", "$defs": {"x": [SELF]}}, False),
    ({"$ref": "#/$defs/x/a", "$defs": {"x": [SELF]}}, True),
    ({"$ref": "#/$defs/a~0b", "$defs": {"a~b": SELF}}, False),
    ({"$ref": "#/$defs/a%25b", "$defs": {"a%b": SELF}}, False),
    ({"$ref": "#/$defs/~01", "$defs": {"~1": SELF, "/": {}}}, False),
    ({"allOf": [{}, SELF]}, False),
    ({"allOf": [{}, {"type": "string"}]}, True),
    ({"anyOf": [SELF, {}]}, True),
    ({"oneOf": [SELF, SELF]}, False),
    ({"oneOf": [SELF, {}]}, True),
    ({"anyOf": []}, True),
    ({"type": "object", "required": ["a"], "properties": {"a": SELF}}, False),
    ({"type": ["object", "null"], "required": ["a"], "properties": {"a": SELF}}, True),
    ({"required": ["a"], "properties": {"a": SELF}}, True),
    ({"type": "object", "required": [7], "properties": {"a": SELF}}, True),
    ({"type": "object", "required": "a", "properties": {"a": SELF}}, True),
    ({"type": "object", "required": ["a"], "properties": []}, True),
    ({"type": "object", "required": ["a"], "additionalProperties": SELF}, False),
    ({"type": "object", "required": ["a"], "additionalProperties": True}, True),
    ({"type": "object", "required": ["a"], "properties": {"a": SELF}, "enum": [{}]}, True),
    ({"type": "object", "required": ["a"], "properties": {"a": SELF}, "const": {}}, True),
    ({"type": "array", "items": SELF}, True),
    ({"type": "array", "items": SELF, "minItems": 0}, True),
    ({"type": "array", "items": SELF, "minItems": 1}, False),
    ({"type": "array", "items": SELF, "minItems": 1.5}, True),
    ({"type": "array", "prefixItems": [{}, SELF], "minItems": 1}, True),
    ({"type": "array", "prefixItems": [{}, SELF], "minItems": 2}, False),
    ({"type": "array", "prefixItems": [{}], "items": SELF, "minItems": 2}, False),
    ({"type": "array", "prefixItems": [{}], "minItems": 2}, True),
    ({"type": ["array", "object"], "items": SELF, "minItems": 1}, True),
]


@pytest.mark.parametrize(("schema", "is_finite"), FINITE)
def test_a_schema_is_finite_if_what_it_requires_is(schema: Any, is_finite: bool) -> None:
    assert accepts_finite(schema) is is_finite


def test_true_is_a_schema_and_other_text_than_an_object_is_not() -> None:
    for value in (True, "true", " true\n"):
        assert StructuredOutput(json_schema=value) == StructuredOutput(json_schema={})
    for value, reason in ((False, "accepts no value"), ("false", "accepts no"), ("12", "'12'")):
        with pytest.raises(InvalidRequest, match=reason):
            StructuredOutput(json_schema=value)


@needs_llguidance
@pytest.mark.parametrize("name", SERVED)
def test_what_only_looks_hostile_is_served(checker: GrammarChecker, name: str) -> None:
    checker.check(SERVED[name])
    assert checker.recall(SERVED[name])


@needs_llguidance
def test_a_verdict_is_remembered(checker: GrammarChecker) -> None:
    bad = REFUSED["unknown type"]
    for look in (checker.check, checker.recall):
        with pytest.raises(InvalidRequest, match="strng"):
            look(bad)


@needs_llguidance
def test_a_checker_whose_process_was_killed_starts_another(checker: GrammarChecker) -> None:
    checker.check(YES_NO)
    process = checker._process.started()
    process.kill()
    process.wait()
    checker.check(StructuredOutput(regex="after"))


# In the core, with random weights.


class DeviceOnCPU(CPUDevice):
    """The CPU, taken for a device with memory of its own: it samples in static shapes."""

    shares_host_memory = False

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()


FEW_BUCKETS = BucketingConfig(
    prompt_batch=AxisConfig(min=1, step=1, max=1),
    prompt_query=AxisConfig(min=16, step=16, max=16),
    prompt_context=AxisConfig(min=8, step=8, max=8),
    decode_batch=AxisConfig(min=4, step=4, max=4),
    decode_blocks=AxisConfig(min=128, step=128, max=128),
)


def make_core(model: Path, device: Device | None = None, **changes: object) -> EngineCore:
    settings: dict[str, Any] = {
        "max_model_len": 256,
        "block_size": 8,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "num_blocks": 128,
        "dtype": "float32",
        "warmup": "none",
        "device": "cpu" if device is None else device,
        "bucketing": FEW_BUCKETS,
        **changes,
    }
    core = EngineCore(EngineConfig(model=str(model), **settings))
    core.warm_up()
    return core


@attrs.define
class Answer:
    token_ids: list[int] = attrs.field(factory=list)
    finish_reason: str | None = None
    text: str = ""


class Served:
    """A core with requests, and their answers as the front would stream them."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self.core = core
        self.answers: dict[tuple[str, int], Answer] = {}
        self.failures: dict[str, str] = {}
        self._tokenizer = tokenizer
        self._streams: dict[str, RequestStream] = {}

    def add(self, key: str, params: SamplingParams, prompt: Sequence[int] = (1, 2, 3)) -> None:
        def emit(delta: Any) -> None:
            answer = self.answers.setdefault((key, delta.index), Answer())
            answer.token_ids.extend(delta.token_ids)
            answer.text += delta.text
            answer.finish_reason = delta.finish_reason

        request = GenerateRequest(prompt, params)
        self._streams[key] = RequestStream(key, request, self._tokenizer, emit)
        self.core.add(key, request)

    def step(self) -> None:
        for token in self.core.step():
            self._streams[token.key].push(token)
        for failure in self.core.take_failures():
            self.failures[failure.key] = failure.message

    def run(self) -> dict[tuple[str, int], Answer]:
        while self.core.has_work:
            self.step()
        return self.answers

    def texts(self) -> list[str]:
        assert all(answer.finish_reason == "stop" for answer in self.answers.values())
        assert not self.failures
        return [self.answers[key].text for key in sorted(self.answers)]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(str(tiny_model))


@pytest.fixture(scope="module", params=["host", "device"])
def core(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[EngineCore]:
    core = make_core(tiny_model, DeviceOnCPU() if request.param == "device" else None)
    yield core
    core.close()


def is_person(text: str) -> bool:
    person = json.loads(text)
    assert list(person)[:2] == ["name", "age"]
    assert set(person) <= {"name", "age", "tags"}
    assert len(person["name"]) <= 6
    assert type(person["age"]) is int and 0 <= person["age"] <= 120
    assert set(person.get("tags", ())) <= {"a", "b"} and len(person.get("tags", ())) <= 2
    return True


SAMPLED = {
    "drawn": {},
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 2.0},
    "nucleus": {"top_p": 0.5},
    "top_k": {"top_k": 3, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {65: 100.0, 257: 100.0, 92: -100.0}},
    "logprobs": {"logprobs": 3},
}


@needs_llguidance
@pytest.mark.parametrize("name", SAMPLED)
def test_random_weights_give_valid_json(core, tokenizer, name: str) -> None:
    served = Served(core, tokenizer)
    for seed in range(3):
        params = {"seed": seed, "max_tokens": 250, "structured_output": PERSON, **SAMPLED[name]}
        served.add(f"{name}-{seed}", SamplingParams(**params))
    served.run()
    assert [is_person(text) for text in served.texts()] == [True] * 3


@needs_llguidance
def test_every_form(core: EngineCore, tokenizer: Tokenizer) -> None:
    forms = {
        "choice": YES_NO,
        "grammar": StructuredOutput(grammar='start: "<" /[ab]{2,5}/ ">"'),
        "gbnf": StructuredOutput(grammar='root ::= "<" [ab] [ab] [ab]? ">"'),
        "regex": DIGITS,
        "characters": StructuredOutput(choice=['ü"\\\n😀 #&~-{}']),
    }
    served = Served(core, tokenizer)
    for key, form in forms.items():
        served.add(key, SamplingParams(seed=3, max_tokens=40, structured_output=form))
    answers = served.run()
    patterns = ("yes|no", "<[ab]{2,5}>", "<[ab]{2,3}>", "[0-9]{4}")
    for key, pattern in zip(forms, patterns, strict=False):
        assert re.fullmatch(pattern, answers[key, 0].text)
    assert answers["characters", 0].text == 'ü"\\\n😀 #&~-{}'
    assert {answer.finish_reason for answer in answers.values()} == {"stop"}


@needs_llguidance
def test_an_answer_ends_with_its_grammar_and_keeps_its_last_token(core, tokenizer) -> None:
    """Without a step for an end-of-sequence token, also where it is the last token allowed."""
    served = Served(core, tokenizer)
    served.add("four", SamplingParams(max_tokens=4, structured_output=DIGITS))
    served.add("three", SamplingParams(max_tokens=3, structured_output=DIGITS))
    answers = served.run()
    four, three = answers["four", 0], answers["three", 0]
    assert (len(four.token_ids), len(four.text), four.finish_reason) == (4, 4, "stop")
    assert (len(three.text), three.finish_reason) == (3, "length")
    assert core.blocks.pool.num_used_blocks == 0


@needs_llguidance
def test_min_tokens_delays_an_end_that_the_grammar_leaves_open_and_no_other(core, tokenizer):
    open_end = StructuredOutput(regex="[0-9]+")
    likely_end = {"logit_bias": {257: 100.0}, "max_tokens": 20}
    served = Served(core, tokenizer)
    served.add("none", SamplingParams(structured_output=open_end, **likely_end))
    served.add("open", SamplingParams(structured_output=open_end, min_tokens=7, **likely_end))
    served.add("closed", SamplingParams(structured_output=DIGITS, min_tokens=7, **likely_end))
    answers = served.run()
    assert {key: len(answer.text) for (key, _), answer in answers.items()} == {
        "none": 1,
        "open": 7,
        "closed": 4,
    }
    assert not served.failures


@needs_llguidance
def test_min_tokens_does_not_forbid_the_only_token_that_the_grammar_allows(core, tokenizer):
    (letter,) = tokenizer.encode("a")
    params = SamplingParams(
        min_tokens=9,
        max_tokens=20,
        stop_token_ids=[letter],
        structured_output=StructuredOutput(regex="aaaa"),
    )
    served = Served(core, tokenizer)
    served.add("a", params)
    served.run()
    assert served.texts() == ["aaaa"]


@needs_llguidance
def test_a_complete_sample_frees_its_slot_while_the_others_go_on(core, tokenizer) -> None:
    served = Served(core, tokenizer)
    form = StructuredOutput(regex="[a-z]|[0-9A-Z]{40}")
    served.add(
        "n", SamplingParams(n=4, seed=2, temperature=2, max_tokens=60, structured_output=form)
    )
    running = []
    while core.has_work:
        served.step()
        running.append(core.scheduler.num_running_seqs)
    texts = served.texts()
    num_long = sum(len(text) == 40 for text in texts)
    assert 0 < num_long < 4
    assert running[20:30] == [num_long] * 10


@needs_llguidance
def test_samples_of_one_prompt_differ_and_each_has_the_form(core, tokenizer) -> None:
    params = SamplingParams(n=3, best_of=4, seed=1, max_tokens=210, structured_output=PERSON)
    served = Served(core, tokenizer)
    served.add("n", params, range(40))  # several chunks
    served.run()
    texts = served.texts()
    assert len(set(texts)) == 3
    assert all(map(is_person, texts))


@needs_llguidance
def test_neighbours_do_not_disturb_each_other(core: EngineCore, tokenizer: Tokenizer) -> None:
    free = SamplingParams(seed=5, max_tokens=30, ignore_eos=True)
    bound = SamplingParams(seed=6, max_tokens=250, structured_output=PERSON)
    alone = {}
    for key, params in {"free": free, "bound": bound}.items():
        served = Served(core, tokenizer)
        served.add(key, params)
        alone |= served.run()
    together = Served(core, tokenizer)
    together.add("bound", bound)
    together.add("free", free)
    together.add("other", SamplingParams(max_tokens=9, structured_output=DIGITS))
    answers = together.run()
    for key, answer in alone.items():
        assert answers[key] == answer


@needs_llguidance
def test_an_answer_may_be_preempted_and_swapped(tiny_model, tokenizer) -> None:
    texts = []
    for num_host_blocks, evicted in ((0, False), (0, True), (64, True)):
        core = make_core(tiny_model, num_host_blocks=num_host_blocks)
        served = Served(core, tokenizer)
        for seed in range(2):
            params = SamplingParams(seed=seed, n=2, max_tokens=200, structured_output=PERSON)
            served.add(str(seed), params, range(seed, seed + 9))
        while core.has_work:
            if evicted and core.stats.num_steps % 5 == 4:
                core.control(BatchControl(force_evict=9))
                core.control(BatchControl(max_num_seqs=4))  # which lets them resume at once
            served.step()
        texts.append(served.texts())
        assert evicted == (core.stats.num_preemptions > 10)
        assert bool(num_host_blocks) == (core.stats.num_swaps > 0)
        core.close()
    assert texts[1:] == texts[:1] * 2


@needs_llguidance
def test_others_are_served_while_a_grammar_is_compiled(tiny_model, tokenizer, monkeypatch) -> None:
    core = make_core(tiny_model)
    released = threading.Event()
    compile_grammar = GrammarCompiler._compile

    def slow(*args: Any) -> Any:
        assert released.wait(300)
        return compile_grammar(*args)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    served = Served(core, tokenizer)
    served.add("bound", SamplingParams(max_tokens=9, structured_output=YES_NO))
    served.add("aborted", SamplingParams(max_tokens=9, structured_output=YES_NO))
    served.add("free", SamplingParams(max_tokens=5, ignore_eos=True))
    core.abort("aborted")
    assert core.stats.num_waiting_reqs == 2
    while ("free", 0) not in served.answers or not served.answers["free", 0].finish_reason:
        served.step()
    assert list(served.answers) == [("free", 0)]
    assert core.has_work
    released.set()
    served.run()
    assert served.answers["bound", 0].text in ("yes", "no")
    core.close()


@needs_llguidance
def test_a_grammar_that_cannot_be_compiled_is_refused_late(core, tokenizer) -> None:
    """Without the front's check, as for an `EngineCore` of one's own."""
    served = Served(core, tokenizer)
    served.add("bad", SamplingParams(structured_output=StructuredOutput(regex="(")))
    served.add("good", SamplingParams(max_tokens=9, structured_output=YES_NO))
    served.run()
    assert list(served.failures) == ["bad"]
    assert "regex" in served.failures["bad"]
    assert served.answers["good", 0].text in ("yes", "no")


@needs_llguidance
@pytest.mark.parametrize("method", ["compute", "consume"])
def test_a_matcher_that_fails_ends_its_request_alone(core, tokenizer, monkeypatch, method) -> None:
    """A regex whose lexer takes more states with each token, until there are too many."""
    served = Served(core, tokenizer)
    if method == "compute":
        hard = StructuredOutput(regex="(.*a.{9}b.{9}c)*[0-9]{3}")
        monkeypatch.setattr("trencadis.engine.grammars.grammar._MAX_LEXER_STATES", 60)
    else:
        hard = StructuredOutput(regex="[x-z]{50}")
        consume = GrammarMatcher.consume

        def wrong(matcher: GrammarMatcher, token_id: int) -> None:
            """A token that the mask does not allow, as from a defect of a device's sampler."""
            consume(matcher, 7 if chr(token_id + 33) in "xyz" else token_id)

        monkeypatch.setattr(GrammarMatcher, "consume", wrong)
    served.add("hard", SamplingParams(n=2, seed=4, max_tokens=200, structured_output=hard))
    digits = SamplingParams(seed=1, max_tokens=200, structured_output=DIGITS)
    served.add("neighbour", digits)
    served.run()
    assert list(served.failures) == ["hard"]
    assert "grammar" in served.failures["hard"]
    assert re.fullmatch("[0-9]{4}", served.answers["neighbour", 0].text)
    assert core.blocks.pool.num_used_blocks == 0


@needs_llguidance
def test_a_grammar_whose_masks_take_too_long_delays_two_steps(core, tokenizer, monkeypatch) -> None:
    name = "trencadis.engine.grammars.matcher._SLOWEST_MASK_SECONDS"
    with monkeypatch.context() as patch:
        patch.setattr(name, 0.0)
        served = Served(core, tokenizer)
        served.add("slow", SamplingParams(max_tokens=200, structured_output=PERSON))
        served.add("free", SamplingParams(max_tokens=9, ignore_eos=True))
        served.run()
    assert len(served.answers["slow", 0].token_ids) == 1
    assert "too hard" in served.failures["slow"]
    assert len(served.answers["free", 0].token_ids) == 9
    after = Served(core, tokenizer)
    for key in "ab":  # the first is one by one, because the last step was slow
        after.add(key, SamplingParams(max_tokens=9, structured_output=YES_NO))
        after.run()
    assert set(after.texts()) <= {"yes", "no"}


@needs_llguidance
def test_too_many_requests_that_wait_for_a_grammar_are_refused(tiny_model, monkeypatch) -> None:
    core = make_core(tiny_model, max_waiting=2)
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: Future())
    for key in "ab":
        core.add(key, GenerateRequest((1,), SamplingParams(structured_output=YES_NO)))
    with pytest.raises(Exception, match="waiting"):
        core.add("c", GenerateRequest((1,), SamplingParams(structured_output=YES_NO)))
    core.close()


@needs_llguidance
def test_grammars_of_one_client_refuse_no_other(tiny_model, monkeypatch) -> None:
    core = make_core(tiny_model, max_waiting=4)
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: Future())
    params = SamplingParams(structured_output=YES_NO)
    core.add("plain", GenerateRequest((1,), SamplingParams(), client="trickle"))
    for number in range(3):
        core.add(f"flood {number}", GenerateRequest((1,), params, client="flood"))
    with pytest.raises(EngineOverloaded, match="4 requests are waiting"):
        core.add("flood 3", GenerateRequest((1,), params, client="flood"))
    core.add("trickle", GenerateRequest((1,), params, client="trickle"))
    core.close()


@needs_llguidance
def test_padding_of_the_vocabulary_is_never_sampled(make_tiny_model, tmp_path, tokenizer) -> None:
    """Logits are wider than the tokenizer; without an end token, the grammar alone ends."""
    for eos in (257, 300):
        model = make_tiny_model(tmp_path / str(eos), vocab_size=333, eos_token_id=eos)
        core = make_core(model)
        bias = dict.fromkeys(range(259, 333), 100.0)
        served = Served(core, tokenizer)
        text = StructuredOutput(regex="(?s:.{30})")
        served.add("a", SamplingParams(max_tokens=200, structured_output=text, logit_bias=bias))
        served.run()
        assert len(served.texts()[0]) == 30
        core.close()


def test_bits_are_in_the_order_of_token_ids() -> None:
    words = np.array([[1 | 1 << 3, -(2**31)], [-1, 0]], np.int32)
    bits = allowed_tokens(words, 50)
    assert [row.nonzero()[0].tolist() for row in bits] == [[0, 3], list(range(32))]
    assert allowed_tokens(words, 64)[0].nonzero()[0].tolist() == [0, 3, 63]


@needs_llguidance
@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_on_a_gaudi_nothing_is_compiled_after_warm_up(stand_in, mode, tiny_model, tokenizer):
    small = {"max_model_len": 32, "num_blocks": 16}
    plain = Served(make_core(tiny_model, **small), tokenizer)
    with stand_in(mode):
        core = make_core(tiny_model, HPUDevice(), warmup="full", **small)
        gaudi = Served(core, tokenizer)
        for served in (plain, gaudi):
            params = SamplingParams(seed=8, max_tokens=20, structured_output=DIGITS)
            served.add("a", params)
            served.run()
        assert gaudi.texts() == plain.texts()
        assert core.stats.num_compilations == 0
        core.close()


# Schemas.

SCHEMAS = json.loads((Path(__file__).parent / "data" / "schemas.json").read_text("utf-8"))
"""Fifty schemas of what APIs ask for: objects, unions, references, formats, ranges, tool calls."""


def valid_answers(core: EngineCore, tokenizer: Tokenizer, names: Sequence[str], seed: int) -> int:
    served = Served(core, tokenizer)
    for name in names:
        params = SamplingParams(
            seed=seed,
            max_tokens=900,
            structured_output=StructuredOutput(json_schema=SCHEMAS[name]),
            logit_bias={198: -100.0, 220: -100.0},  # newline and space, which take most steps
        )
        served.add(name, params)
    served.run()
    for (name, _), answer in served.answers.items():
        assert answer.finish_reason == "stop", (name, answer.text)
        check_schema(json.loads(answer.text), SCHEMAS[name])
    assert not served.failures
    return len(served.answers)


def check_schema(value: Any, schema: Any) -> None:
    checker = jsonschema.Draft202012Validator
    checker(schema, format_checker=checker.FORMAT_CHECKER).validate(value)


@pytest.fixture(scope="module")
def long_core(make_tiny_model, tmp_path_factory) -> Iterator[EngineCore]:
    model = make_tiny_model(tmp_path_factory.mktemp("long"), max_position_embeddings=1024)
    core = make_core(model, use_buckets=False, max_model_len=1024, max_num_seqs=64, num_blocks=3000)
    yield core
    core.close()


@needs_llguidance
def test_twenty_schemas(long_core: EngineCore, tokenizer: Tokenizer) -> None:
    assert valid_answers(long_core, tokenizer, list(SCHEMAS)[:20], seed=1) == 20


@needs_llguidance
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_fifty_schemas(long_core: EngineCore, tokenizer: Tokenizer, seed: int) -> None:
    assert valid_answers(long_core, tokenizer, list(SCHEMAS), seed) == 50


# In the front.


@needs_llguidance
def test_llm_takes_a_form_for_each_prompt(tiny_model: Path) -> None:
    llm = LLM(tiny_model, dtype="float32", max_model_len=256, warmup="none")
    params = [
        SamplingParams(seed=1, max_tokens=200, structured_output=PERSON),
        SamplingParams(seed=1, max_tokens=5, ignore_eos=True),
        SamplingParams(seed=1, max_tokens=9, structured_output=YES_NO),
    ]
    person, free, choice = llm.generate(["a", "b", "c"], params)
    assert is_person(person.completions[0].text)
    assert len(free.completions[0].token_ids) == 5
    assert choice.completions[0].text in ("yes", "no")
    bad = SamplingParams(structured_output=StructuredOutput(regex="("))
    with pytest.raises(InvalidRequest, match="prompt 1") as refusal:
        llm.generate(["a", "b"], [params[0], bad])
    assert refusal.value.field == "structured_output"
    llm.core.close()


@pytest.mark.slow
@needs_llguidance
@pytest.mark.usefixtures("own_processes")
def test_a_hostile_schema_hurts_its_sender_alone(tiny_model: Path) -> None:
    async def text_of(engine: AsyncEngine, form: StructuredOutput) -> str:
        params = SamplingParams(seed=2, max_tokens=200, structured_output=form)
        return "".join(
            [delta.text async for delta in engine.generate(GenerateRequest((1, 2), params))]
        )

    async def body() -> None:
        settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "warmup": "none"}
        engine = await AsyncEngine.start(EngineConfig(model=str(tiny_model), **settings))
        try:
            hostile = [REFUSED[name] for name in ("800 nested references", "look-ahead")] * 2
            answers = await asyncio.gather(
                *(text_of(engine, form) for form in (*hostile, PERSON, PERSON)),
                return_exceptions=True,
            )
            assert [type(answer) for answer in answers[:4]] == [InvalidRequest] * 4
            assert [is_person(str(answer)) for answer in answers[4:]] == [True, True]
        finally:
            await engine.stop()
        assert not children(), "no process is left behind"

    asyncio.run(asyncio.wait_for(body(), 600))


@pytest.mark.slow
@needs_llguidance
def test_an_engine_that_stops_during_a_check_fails_its_request(tiny_model, monkeypatch) -> None:
    """The request is not known to the engine yet, so only a second look tells that it stopped."""

    async def body() -> None:
        settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "warmup": "none"}
        engine = await AsyncEngine.start(EngineConfig(model=str(tiny_model), **settings))
        try:
            loop = asyncio.get_running_loop()
            check, waiting, released = GrammarChecker.check, asyncio.Event(), threading.Event()

            def slow(*args: Any) -> None:
                loop.call_soon_threadsafe(waiting.set)
                assert released.wait(300)
                check(*args)

            monkeypatch.setattr(GrammarChecker, "check", slow)
            params = SamplingParams(max_tokens=9, structured_output=YES_NO)
            request = asyncio.ensure_future(anext(engine.generate(GenerateRequest((1, 2), params))))
            await waiting.wait()
            engine._fail("the core is gone")
            released.set()
            with pytest.raises(EngineDead):
                await request
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(body(), 600))
