"""Sampling parameters: which values are taken, and how the others are rejected."""

from __future__ import annotations

import math
from collections import OrderedDict
from fractions import Fraction
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest

from trencadis.engine import InvalidRequest, SamplingParams
from trencadis.engine.api.sampling_params import MAX_TOKEN_ID

HUGE = 10**5000
"""Python does not write so many digits, also into an error message."""

NO_INTEGERS = ("1", 1.0, math.nan, True, [1], HUGE, -HUGE, object())
NO_NUMBERS = ("1", math.nan, math.inf, -math.inf, True, [1.0], HUGE, 1j, object())
NO_BOOLS = ("no", 0, 1, 0.0, None, [], object())

INTEGERS = (
    *("n", "top_k", "min_tokens", "best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs"),
)
NUMBERS = (
    *("temperature", "top_p", "min_p", "length_penalty"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
BOOLS = (*("use_beam_search", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),)
CASES = [
    *((name, value) for name in INTEGERS for value in NO_INTEGERS),
    *((name, value) for name in NUMBERS for value in NO_NUMBERS),
    *((name, value) for name in BOOLS for value in NO_BOOLS),
    *((name, None) for name in ("n", "top_k", "min_tokens", *NUMBERS)),
    *(("early_stopping", value) for value in ("soon", 1, None, [])),
    *(("stop", value) for value in (5, b"END", [5], [b"END"], "", ["a", ""], ["\ud800"], "\ud800")),
    *(("stop", value) for value in ([["END"]], [None], ["a"] * 17, object())),
    *(("stop_token_ids", value) for value in ([1.5], 7, "77", b"77", ["7"], [True], [-1], [None])),
    *(("stop_token_ids", value) for value in ([MAX_TOKEN_ID + 1], [HUGE], [math.nan])),
    ("stop_token_ids", range(4097)),
    *(("allowed_token_ids", value) for value in ([1.5], 7, "77", ["7"], [True], [-1], [HUGE])),
    *(("allowed_token_ids", value) for value in ([], range(4097))),
    *(("logprob_token_ids", value) for value in ([1.5], 7, "7", [True], [-1], [HUGE], range(129))),
    *(("bad_words", value) for value in ("no", 7, [7], [b"no"], [""], ["  "], ["\ud800"], [None])),
    *(("bad_words", value) for value in (["a" * 129], ["a"] * 257)),
    ("logit_bias", dict.fromkeys(range(4097), 1.0)),
    *(("logit_bias", value) for value in ({1.5: 2}, {"7": 1}, {True: 1}, {-1: 1}, {HUGE: 1})),
    *(("logit_bias", value) for value in ([(7, 1)], 7, "7", {7: "1"}, {7: None}, {7: True})),
    *(
        ("structured_output", value)
        for value in ("json", {"json_object": True}, True, [], object())
    ),
    *(("logit_bias", value) for value in ({7: math.nan}, {7: math.inf}, {7: 101}, {7: HUGE})),
]


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda value: type(value).__name__)
def test_a_wrong_value_is_refused_and_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name) as refusal:
        SamplingParams(**{name: value})
    assert refusal.value.field == name
    assert len(str(refusal.value)) < 600


def test_every_field_is_tried_with_wrong_values() -> None:
    assert {name for name, _ in CASES} == {field.name for field in attrs.fields(SamplingParams)}


RANGES = {
    **dict.fromkeys(("n", "best_of"), (1, 128, 1)),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), (0, 20, 1)),
    "max_tokens": (1, 2**31 - 1, 1),
    "min_tokens": (0, 2**31 - 1, 1),
    "top_k": (-1, 2**31 - 1, 1),
    "seed": (-(2**63), 2**63 - 1, 1),
    "temperature": (0, 2, 1e-9),
    "top_p": (1e-9, 1, 1e-9),
    "min_p": (0, 1, 1e-9),
    "length_penalty": (-100, 100, 1e-9),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2, 2, 1e-9)),
    "repetition_penalty": (1e-9, 10, 1e-9),
}
"""The lowest value that is accepted, the highest one, and how far beyond the next one is."""


def test_a_range_ends_where_it_is_said_to() -> None:
    assert set(RANGES) == {*INTEGERS, *NUMBERS}
    for name, (low, high, step) in RANGES.items():
        beside: dict[str, Any] = {
            "min_tokens": {"max_tokens": None},
            "length_penalty": {"use_beam_search": True},
        }.get(name, {})
        for value in (low, high):
            assert getattr(SamplingParams(**{name: value, **beside}), name) == value
        for value in (low - step, high + step):
            with pytest.raises(InvalidRequest) as refusal:
                SamplingParams(**{name: value})
            assert refusal.value.field == name
    assert len(SamplingParams(stop=["a"] * 16).stop) == 16
    for name in ("stop_token_ids", "allowed_token_ids"):
        assert len(getattr(SamplingParams(**{name: range(4096)}), name)) == 4096
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(4096), 1.0)).logit_bias) == 4096


@pytest.mark.parametrize(
    ("stop", "strings"),
    [
        ("END", ("END",)),
        (["END"], ("END",)),
        (("a", "b"), ("a", "b")),
        ({"a": 1}, ("a",)),
        ([], ()),
        (None, ()),
    ],
    ids=repr,
)
def test_a_single_text_is_one_stop_string(stop: Any, strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop == strings
    assert attrs.evolve(SamplingParams(), stop=stop).stop == strings


def test_stop_strings_may_come_from_an_iterator() -> None:
    assert SamplingParams(stop=iter(["a", "b"])).stop == ("a", "b")


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    params = SamplingParams(
        stop_token_ids=np.array([5, 6]),
        logit_bias={np.int32(7): np.float32(1.5), 8: Fraction(1, 4)},
    )
    assert params == SamplingParams(stop_token_ids=[5, 6], logit_bias={7: 1.5, 8: 0.25})
    assert [type(token) for token in (*params.stop_token_ids, *params.logit_bias)] == [int] * 4
    assert {type(bias) for bias in params.logit_bias.values()} == {float}


def test_what_the_caller_changes_later_does_not_reach_the_request() -> None:
    biases = OrderedDict({7: 1.0})
    stop = ["a"]
    params = SamplingParams(logit_bias=biases, stop=stop)
    biases[1.5] = "nonsense"  # type: ignore[index, assignment]
    stop.append("b")
    assert params == SamplingParams(logit_bias={7: 1.0}, stop=["a"])


def test_none_means_none_of_them() -> None:
    nothing = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)
    assert nothing == SamplingParams()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            stop="END", stop_token_ids=[0, MAX_TOKEN_ID], logit_bias={7: -100, 8: 100.0}
        ),
        SamplingParams(max_tokens=2**31 - 1, seed=-(2**63), n=128, logprobs=20, best_of=128),
        SamplingParams(use_beam_search=True, early_stopping="never", length_penalty=-100),
    ],
    ids=repr,
)
def test_accepted_values_reach_the_core_unchanged(params: SamplingParams) -> None:
    content = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(content, type=SamplingParams) == params


@pytest.mark.parametrize("max_tokens", [1, np.int64(7), None])
def test_another_max_tokens_gives_what_making_it_anew_gives(max_tokens: Any) -> None:
    values: dict[str, Any] = {"stop_token_ids": [5], "logit_bias": {7: 1.5}, "n": 2, "seed": 3}
    params = SamplingParams(max_tokens=9, **values)
    changed = params.with_max_tokens(max_tokens)
    assert changed == SamplingParams(max_tokens=max_tokens, **values)
    assert type(changed.max_tokens) in (int, type(None))
    assert params == SamplingParams(max_tokens=9, **values), "the other is as it was"
    assert changed.logit_bias is params.logit_bias, "thousands of them are checked once"


@pytest.mark.parametrize(
    ("max_tokens", "field"), [(0, "max_tokens"), ("7", "max_tokens"), (2, "min_tokens")]
)
def test_another_max_tokens_is_checked(max_tokens: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(max_tokens=9, min_tokens=3).with_max_tokens(max_tokens)
    assert raised.value.field == field
