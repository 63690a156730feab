"""Whatever numbers a schema has, an answer has them as they are, or the schema is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.engine import LLM, InvalidRequest, SamplingParams, StructuredOutput, Tokenizer
from trencadis.engine.grammars.grammar import load_tokenizer, new_matcher

llguidance = pytest.importorskip("llguidance", reason="needs the extra `structured`")

LARGE = 2**53
NEAR_LIMITS = st.builds(
    lambda sign, power, distance: sign * (2**power + distance),
    st.sampled_from((-1, 1)),
    st.sampled_from((52, 53, 54, 60, 62, 63, 64, 2000)),
    st.integers(-9, 9),
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(Tokenizer.load(str(tiny_model)).to_json(), 258, frozenset({257}))


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    llm = LLM(tiny_model, dtype="float32", max_model_len=256, warmup="none")
    yield llm
    llm.core.close()


def accepted(tokenizer: Any, schema: dict[str, Any], texts: list[str]) -> list[str] | None:
    """Those of ``texts`` that a schema lets an answer be; None if the schema is refused."""
    try:
        matcher = new_matcher(tokenizer, StructuredOutput(json_schema=schema))
    except ValueError:
        return None
    return [text for text in texts if is_match(matcher.deep_copy(), tokenizer, text)]


def is_match(matcher: Any, tokenizer: Any, text: str) -> bool:
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@settings(max_examples=300, deadline=None)
@given(number=NEAR_LIMITS, as_list=st.booleans())
def test_a_constant_is_itself_or_refused(tokenizer: Any, number: int, as_list: bool) -> None:
    schema = {"enum": [1, number]} if as_list else {"const": {"id": [number]}}
    near = [number + distance for distance in range(-3, 4)]
    texts = [str(n) if as_list else json.dumps({"id": [n]}, separators=(",", ":")) for n in near]
    assert accepted(tokenizer, schema, texts) in (None, [texts[3]])
    if abs(number) <= LARGE:
        assert accepted(tokenizer, schema, texts) is not None


@settings(max_examples=300, deadline=None)
@given(
    bounds=st.dictionaries(
        st.sampled_from(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
        NEAR_LIMITS,
        min_size=1,
        max_size=2,
    ),
    is_float=st.booleans(),
    kind=st.sampled_from(("integer", "number")),
)
def test_a_bound_lets_no_other_integer_through(
    tokenizer: Any, bounds: dict[str, int], is_float: bool, kind: str
) -> None:
    is_float = is_float and max(map(abs, bounds.values())) < 1e300
    written = {key: float(bound) if is_float else bound for key, bound in bounds.items()}
    schema = {"type": kind, **written}
    texts = [str(bound + distance) for bound in bounds.values() for distance in range(-9, 10)]
    for text in accepted(tokenizer, schema, texts) or ():
        jsonschema.validate(json.loads(text), schema)


@settings(max_examples=200, deadline=None)
@given(number=st.floats(allow_nan=False, allow_infinity=False))
def test_a_constant_that_is_no_integer_is_itself_or_refused(tokenizer: Any, number: float) -> None:
    try:
        matcher = new_matcher(tokenizer, StructuredOutput(json_schema={"const": number}))
    except ValueError:
        return
    assert json.loads(matcher.compute_ff_bytes()) == number


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": -LARGE + 1, "maximum": LARGE - 1},
        {"minimum": 0, "maximum": 2**63 - 1},
        {"minimum": 0, "maximum": 2**64 - 1},
        {"exclusiveMinimum": -1, "maximum": 1e18},
    ],
    ids=str,
)
def test_the_usual_bounds_of_integers_are_served(tokenizer: Any, bounds: dict[str, Any]) -> None:
    assert accepted(tokenizer, {"type": "integer", **bounds}, ["0", "7"]) == ["0", "7"]


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": {"enum": [LARGE + 1]}},
        {"json_schema": {"const": [{"a": LARGE + 1}]}},
        {"json_schema": {"properties": {"enum": {"anyOf": [{"minimum": LARGE + 1}]}}}},
        {"json_schema": {"type": "integer", "minimum": 2**63, "maximum": 2**63 + 10}},
        {"json_schema": {"type": "integer", "exclusiveMinimum": LARGE}},
        {"grammar": f'start: "<" %json {{"enum": [{LARGE + 1}]}} ">"'},
    ],
    ids=str,
)
def test_a_request_for_a_number_that_would_be_another_is_refused(
    llm: LLM, form: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=40, structured_output=StructuredOutput(**form))
    with pytest.raises(InvalidRequest, match="use integers within") as refusal:
        llm.generate(["a"], params)
    assert refusal.value.field == "structured_output"


def test_a_large_number_that_is_kept_is_answered(llm: LLM) -> None:
    form = StructuredOutput(json_schema={"const": 2**60})
    answer = llm.generate(["a"], SamplingParams(max_tokens=60, structured_output=form))[0]
    assert json.loads(answer.completions[0].text) == 2**60


def test_names_and_defaults_are_no_constants(tokenizer: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"minimum": {"const": "a"}, "const": {"type": "integer"}},
        "default": {"const": "b", "large": LARGE + 1},
        "required": ["minimum", "const"],
        "additionalProperties": False,
    }
    text = json.dumps({"minimum": "a", "const": LARGE + 1}, separators=(",", ":"))
    assert accepted(tokenizer, schema, [text]) == [text]
