"""The sampler: greedy, truncation, penalties, seeds, log-probabilities."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from trencadis.engine.api.sampling_params import SamplingParams
from trencadis.engine.api.structured_output import StructuredOutput
from trencadis.engine.errors import InvalidRequest
from trencadis.engine.runner.logit_edits import _edits_of, apply_edits, find_edits
from trencadis.engine.runner.sampler import argmax_in_blocks, rank_tokens, sample
from trencadis.engine.runner.step import RowRequest, SampleSettings


def row(seed: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params):
    tokens = (*prompt, *output)
    settings = SampleSettings.of(
        SamplingParams(**params), seed, tokens, len(prompt), frozenset({0})
    )
    return RowRequest(len(tokens), (settings,))


def draw_many(logits: torch.Tensor, count: int = 4000, **params) -> torch.Tensor:
    """Frequencies of the tokens drawn from one row of logits under many seeds."""
    rows = [row(seed, **params) for seed in range(count)]
    tokens = [one.token_id for one in sample(logits.expand(count, -1), rows)]
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]) / count


LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]))


def test_greedy_takes_the_likeliest() -> None:
    tokens = sample(torch.stack([LOGITS, LOGITS.flip(0)]), [row(temperature=0.0)] * 2)
    assert [one.token_id for one in tokens] == [0, 4]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 4),
    st.sampled_from([1, 127, 128, 255, 256, 257, 300, 1024, 49_152, 50_257]),
    st.integers(0, 2**32),
    st.lists(
        st.tuples(st.integers(0, 10**6), st.sampled_from([math.nan, math.inf, -math.inf, 3.0])),
        max_size=6,
    ),
)
def test_the_largest_score_is_found_as_pytorch_finds_it(
    rows: int, size: int, seed: int, special: list[tuple[int, float]]
) -> None:
    """Of equal ones the first; few different values, so that there are many."""
    scores = torch.randint(-3, 3, (rows, size), generator=torch.Generator().manual_seed(seed))
    scores = scores.float()
    for place, value in special:
        if rows:
            scores.view(-1)[place % scores.numel()] = value
    if rows > 1:
        scores[1] = -math.inf
    assert torch.equal(argmax_in_blocks(scores), scores.argmax(-1))


@pytest.mark.parametrize("size", [1, 127, 128, 255, 256, 257, 300, 50_257])
def test_the_last_score_of_a_row_counts(size: int) -> None:
    scores = torch.zeros(3, size)
    scores[:, -1] = 4.0
    assert argmax_in_blocks(scores).tolist() == [size - 1] * 3


def test_draws_follow_the_distribution() -> None:
    # Five standard errors of a frequency of 0.5 among 4,000 draws are 0.04.
    assert torch.allclose(draw_many(LOGITS), LOGITS.exp(), atol=0.04)


def test_temperature_sharpens() -> None:
    expected = torch.softmax(LOGITS / 0.5, dim=-1)
    assert torch.allclose(draw_many(LOGITS, temperature=0.5), expected, atol=0.04)


def test_top_k_keeps_the_k_likeliest() -> None:
    frequency = draw_many(LOGITS, top_k=2)
    assert torch.allclose(frequency, torch.tensor([2 / 3, 1 / 3, 0, 0, 0]), atol=0.04)


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.5, 1), (0.6, 2), (0.8, 3), (0.99, 5)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    frequency = draw_many(LOGITS, top_p=top_p)
    assert (frequency > 0).tolist() == [i < kept for i in range(5)]


def test_top_p_is_of_what_top_k_left() -> None:
    # Of the two kept, the first has 2/3.
    assert (draw_many(LOGITS, top_k=2, top_p=0.6) > 0).tolist() == [True] + [False] * 4
    assert (draw_many(LOGITS, top_k=2, top_p=0.7) > 0).tolist() == [True] * 2 + [False] * 3


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert (draw_many(LOGITS, min_p=0.29) > 0).tolist() == [True] * 3 + [False] * 2


def test_top_p_sees_a_nucleus_wider_than_the_part_sorted_first() -> None:
    flat = torch.zeros(5000)
    tokens = sample(flat.expand(300, -1), [row(seed, top_p=0.9) for seed in range(300)])
    assert len({one.token_id for one in tokens} - set(range(1024))) > 100


@settings(max_examples=80, deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=60),
    seed=st.integers(-(2**63), 2**63 - 1),
    top_k=st.integers(-1, 70),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    temperature=st.floats(0.0, 2.0),
)
def test_a_draw_is_in_the_kept_set_and_does_not_depend_on_its_neighbours(
    logits: list[float], seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    one = torch.tensor([logits])
    params = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    (alone,) = sample(one, [row(seed, **params)])
    beside = sample(
        torch.cat([one.flip(1), one, one * 0.5]),
        [row(5, temperature=1.5), row(seed, **params), row(9, top_k=3)],
    )
    assert beside[1] == alone
    if temperature == 0.0:
        assert logits[alone.token_id] == max(one[0].tolist())
    rank = int((one[0] > one[0, alone.token_id]).sum())
    assert top_k <= 0 or rank < top_k


def test_seed_and_position_decide_the_draw() -> None:
    flat = torch.zeros(1, 1000)
    params = {"output": (5, 6)}
    first = sample(flat, [row(3, **params)])
    assert sample(flat, [row(3, **params)]) == first
    assert sample(flat, [row(4, **params)]) != first
    assert sample(flat, [row(3, output=(5, 6, 7))]) != first


def test_repetition_penalty_works_on_prompt_and_output() -> None:
    logits = torch.tensor([[3.0, 2.9, -1.0, -1.1]])
    assert sample(logits, [row(temperature=0.0)])[0].token_id == 0
    penalised = row(prompt=(0,), temperature=0.0, repetition_penalty=1.5)
    assert sample(logits, [penalised])[0].token_id == 1
    both = row(prompt=(0,), output=(1,), temperature=0.0, repetition_penalty=1.5, logprobs=0)
    assert sample(logits, [both])[0].token_id == 0


def test_presence_counts_once_and_frequency_each_time() -> None:
    logits = torch.tensor([[1.0, 0.0]])
    seen = (0, 0, 0)
    assert (
        sample(logits, [row(output=seen, temperature=0.0, presence_penalty=0.9)])[0].token_id == 0
    )
    assert (
        sample(logits, [row(output=seen, temperature=0.0, presence_penalty=1.1)])[0].token_id == 1
    )
    assert (
        sample(logits, [row(output=seen, temperature=0.0, frequency_penalty=0.3)])[0].token_id == 0
    )
    assert (
        sample(logits, [row(output=seen, temperature=0.0, frequency_penalty=0.4)])[0].token_id == 1
    )


def test_logit_bias_can_force_and_forbid() -> None:
    assert sample(LOGITS[None], [row(temperature=0.0, logit_bias={3: 100.0})])[0].token_id == 3
    assert sample(LOGITS[None], [row(temperature=0.0, logit_bias={0: -100.0})])[0].token_id == 1


def test_no_end_before_min_tokens() -> None:
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (1,)}
    assert sample(LOGITS[None], [row(output=(4,), **params)])[0].token_id == 2
    assert sample(LOGITS[None], [row(output=(4, 4), **params)])[0].token_id == 0


def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    asked = row(temperature=0.0, logit_bias={2: 100.0}, logprobs=2)
    (token,) = sample(LOGITS[None] + 3.0, [asked])
    assert token.token_id == 2
    assert token.logprobs is not None
    assert token.logprobs.chosen.logprob == pytest.approx(math.log(0.15), abs=1e-5)
    assert [one.token_id for one in token.logprobs.top] == [0, 1]
    assert token.logprobs.top[0].logprob == pytest.approx(math.log(0.5), abs=1e-5)


def test_logprobs_of_listed_tokens_are_those_of_the_unmodified_logits() -> None:
    asked = row(temperature=0.0, logit_bias={2: 100.0}, logprobs=0, logprob_token_ids=(1, 0))
    (token,) = sample(LOGITS[None] + 3.0, [asked])
    assert token.logprobs is not None
    assert token.logprobs.chosen == attrs.evolve(token.logprobs.chosen, token_id=2)
    expected = torch.log_softmax(LOGITS, -1)
    assert [(one.token_id, pytest.approx(one.logprob)) for one in token.logprobs.top] == [
        (1, expected[1].item()),
        (0, expected[0].item()),
    ]


def test_logits_are_not_changed() -> None:
    logits = LOGITS[None].clone()
    sample(logits, [row(output=(0,), frequency_penalty=1.0, logit_bias={1: 5.0}, top_p=0.5)])
    assert torch.equal(logits, LOGITS[None])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", 2.1), ("temperature", float("nan")),
        ("temperature", "hot"), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -2), ("top_k", 1.5),
        ("min_p", -0.1), ("max_tokens", 0), ("max_tokens", -5), ("n", 0), ("n", True),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0.0),
        ("logprobs", 21), ("stop", ("",)), ("stop", ("x",) * 17), ("seed", 2**63),
        ("min_tokens", 17), ("logit_bias", {1: 101.0}),
    ],
)  # fmt: skip
def test_bad_parameter_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_seeds_past_the_last_are_refused() -> None:
    assert SamplingParams(seed=2**63 - 1).seed == 2**63 - 1
    with pytest.raises(InvalidRequest, match="seed"):
        SamplingParams(seed=2**63 - 1, n=2)


@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        ("best_of", 0, {}),
        ("best_of", 2, {"n": 3}),
        ("best_of", 129, {}),
        ("length_penalty", 2.0, {}),
        ("early_stopping", True, {}),
        ("early_stopping", "often", {"use_beam_search": True}),
        ("length_penalty", float("nan"), {"use_beam_search": True}),
        ("temperature", 0.7, {"use_beam_search": True}),
        ("top_p", 0.9, {"use_beam_search": True}),
        ("top_k", 5, {"use_beam_search": True}),
        ("min_p", 0.1, {"use_beam_search": True}),
        ("stop", ("a",), {"use_beam_search": True}),
        ("logprobs", 0, {"use_beam_search": True}),
        ("logprob_token_ids", (1,), {}),
        ("logprob_token_ids", (1,), {"use_beam_search": True}),
    ],
)
def test_what_contradicts_the_kind_of_search_is_named(
    field: str, value: object, others: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**{field: value}, **others)
    assert caught.value.field == field


def test_beams_rank_tokens_as_they_are_but_for_what_is_forbidden() -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(use_beam_search=True, min_tokens=1)
    settings = SampleSettings.of(params, 0, (1,), 1, frozenset({int(logits[1].argmax())}))
    rows = [RowRequest(1, (settings,), None, count) for count in (1, 4)]
    (one,), two = rank_tokens(logits, rows)
    assert one == (
        int(logits[0].argmax()),
        pytest.approx(float(logits[0].log_softmax(-1).max())),
    )
    order = logits[1].argsort(descending=True).tolist()
    assert [token for token, _ in two] == order[1:5]


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=5, max_size=5),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    output=st.lists(st.integers(0, 4), max_size=4),
    penalty=st.sampled_from([0.5, 1.3, 2.0]),
)
def test_repetition_penalty_is_that_of_transformers(
    logits: list[float], prompt: list[int], output: list[int], penalty: float
) -> None:
    """Negative logits are multiplied, positive ones divided."""
    given, ids = torch.tensor([logits]), torch.tensor([[*prompt, *output]])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, given.clone())
    rows = [row(prompt=tuple(prompt), output=tuple(output), repetition_penalty=penalty)]
    (packed,) = find_edits(rows).packed(8)
    assert torch.allclose(apply_edits(given, torch.from_numpy(packed)), expected)


VALUES = {
    **{"n": 2, "best_of": 2, "use_beam_search": True, "length_penalty": 2.0},
    **{"early_stopping": True, "temperature": 0.5, "top_p": 0.5, "top_k": 2, "min_p": 0.5},
    **{"seed": 1, "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 2.0},
    **{"max_tokens": 3, "min_tokens": 3, "stop": ("a",), "stop_token_ids": (2,)},
    **{"ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False},
    **{"logprobs": 1, "prompt_logprobs": 1, "logit_bias": {1: 1.0}},
    "allowed_token_ids": (1, 2),
    "logprob_token_ids": (1, 2),
    "bad_words": ("no",),
    "structured_output": StructuredOutput(regex="a"),
}
"""A value of each sampling parameter that differs from its default."""


def test_the_rows_whose_logits_a_parameter_changes_are_looked_at() -> None:
    """`SampleSettings.changes_logits` names the parameters that `logit_edits` reads."""
    assert VALUES.keys() == {field.name for field in attrs.fields(SamplingParams)}
    for name, value in VALUES.items():
        others = NEEDED.get(name, {})
        asked = row(prompt=(1, 2), output=(3, 3), **{**others, name: value})
        has_edits = bool(_edits_of(with_history(asked, (1, 2, 3, 3))))
        assert has_edits <= asked.samples[0].changes_logits, name
        assert bool(len(find_edits([asked]))) == has_edits, name


def with_history(asked: RowRequest, tokens: tuple[int, ...]) -> RowRequest:
    return asked._replace(samples=(attrs.evolve(asked.samples[0], history=tokens),))


_BEAMS = {"use_beam_search": True, "n": 2}
NEEDED = {
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "logprob_token_ids": {"logprobs": 0},
}
"""What a parameter needs besides."""
