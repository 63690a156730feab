"""Samples and beams of one request on a tiny model: each as it would be alone, and none lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from trencadis.engine import (
    LLM,
    BatchControl,
    Completion,
    EngineConfig,
    EngineCore,
    EngineOverloaded,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
)
from trencadis.engine.ipc.messages import NewToken
from trencadis.engine.runner.forward_runner import ForwardOutput
from trencadis.engine.runner.model_input import ModelInput
from trencadis.engine.runner.shapes import DecodeShape, MixedShape
from trencadis.scheduler import SequenceGroup

PROMPT = tuple(range(40, 75))
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)


def settings(**changes: object) -> dict[str, object]:
    return {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "num_blocks": 80,
        "warmup": "none",
        **changes,
    }


def evicting(llm: LLM, every: int) -> LLM:
    """Have everything evicted again and again while ``llm`` generates."""
    step, order = llm.core.step, BatchControl(force_evict=99)
    count = 0

    def stepping() -> object:
        nonlocal count
        count += 1
        if count % every == 0:
            llm.core.control(order)
            llm.core.control(BatchControl(max_num_seqs=8))  # which lets them resume at once
        return step()

    llm.core.step = stepping  # type: ignore[method-assign]
    return llm


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [one.token_ids for one in completions]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="together"),
        pytest.param({"max_num_seqs": 3}, id="more samples than may run at once"),
        pytest.param({"max_num_seqs": 1}, id="one at a time"),
        pytest.param({"max_num_batched_tokens": 9}, id="in chunks"),
        pytest.param({"enable_prefix_caching": False}, id="without a prefix cache"),
    ],
)
def test_a_sample_is_what_a_request_with_its_seed_would_be(
    tiny_model: Path, changes: dict[str, object]
) -> None:
    llm = LLM(str(tiny_model), **settings(**changes))
    (together,) = llm.generate([PROMPT], attrs.evolve(SAMPLED, n=4))
    for index, one in enumerate(together.completions):
        (alone,) = llm.generate([PROMPT], attrs.evolve(SAMPLED, seed=7 + index))
        assert alone.completions == (one,)
    assert len({tuple(one) for one in tokens(together.completions)}) == 4
    assert llm.core.stats.num_used_blocks == 0


def test_the_prompt_of_samples_is_computed_once(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **settings(enable_prefix_caching=False))
    llm.generate([PROMPT], attrs.evolve(SAMPLED, n=4))
    assert llm.core.stats.num_prefill_tokens <= len(PROMPT)
    assert llm.core.stats.num_prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("host", [0, 64], ids=["recomputed", "swapped"])
@pytest.mark.parametrize(
    "params",
    [
        attrs.evolve(SAMPLED, n=3),
        attrs.evolve(SAMPLED, n=2, best_of=4),
        SamplingParams(n=2, best_of=3, use_beam_search=True, max_tokens=10),
    ],
    ids=["samples", "best of", "beams"],
)
def test_evictions_change_no_token(tiny_model: Path, params: SamplingParams, host: int) -> None:
    calm = LLM(str(tiny_model), **settings(num_host_blocks=host))
    driven = evicting(LLM(str(tiny_model), **settings(num_host_blocks=host)), every=3)
    prompts = [PROMPT, PROMPT[:20], (5,)]
    assert driven.generate(prompts, params) == calm.generate(prompts, params)
    stats = driven.core.stats
    assert stats.num_preemptions == stats.num_swaps + stats.num_recomputes > 3
    assert (stats.num_swaps > 0) == (host > 0)
    assert stats.num_used_blocks == 0
    assert driven.core.blocks.host_pool.num_free_blocks == host


def test_best_of_gives_the_samples_with_the_highest_mean_logprob(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **settings())
    (every,) = llm.generate([PROMPT], attrs.evolve(SAMPLED, n=5, logprobs=0))
    ranked = sorted(
        every.completions,
        key=lambda one: sum(position.chosen.logprob for position in one.logprobs) / 10,
        reverse=True,
    )
    (best,) = llm.generate([PROMPT], attrs.evolve(SAMPLED, n=2, best_of=5, logprobs=0))
    assert [one.token_ids for one in best.completions] == [one.token_ids for one in ranked[:2]]
    for one, same in zip(best.completions, ranked[:2], strict=True):
        # The second time the prompt is in the prefix cache, so that sums may round otherwise.
        expected = [position.chosen.logprob for position in same.logprobs]
        assert [position.chosen.logprob for position in one.logprobs] == pytest.approx(expected)
    (plain,) = llm.generate([PROMPT], attrs.evolve(SAMPLED, n=1, best_of=5))
    assert plain.completions[0].text == ranked[0].text
    assert plain.completions[0].logprobs == [], "they were not asked for"


def test_a_stop_string_ends_one_sample_and_the_others_go_on(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **settings())
    (free,) = llm.generate([PROMPT], attrs.evolve(SAMPLED, n=3))
    texts = [one.text for one in free.completions]
    stop = next(c for c in texts[1] if all(c not in other for other in (texts[0], texts[2])))
    (stopped,) = llm.generate([PROMPT], attrs.evolve(SAMPLED, n=3, stop=(stop,)))
    assert stopped.completions[0] == free.completions[0]
    assert stopped.completions[1].text == texts[1].partition(stop)[0]
    assert stopped.completions[1].finish_reason == "stop"
    assert stopped.completions[2] == free.completions[2]
    assert llm.core.stats.num_used_blocks == 0
    assert not llm.core.has_work


def test_samples_that_all_meet_a_stop_string_leave_nothing_behind(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **settings())
    params = attrs.evolve(SAMPLED, n=3, max_tokens=60)
    (free,) = llm.generate([PROMPT], params)
    stops = tuple({one.text[3] for one in free.completions})
    for wanted in (params, attrs.evolve(params, n=1, best_of=3)):
        (stopped,) = llm.generate([PROMPT], attrs.evolve(wanted, stop=stops))
        assert all(one.finish_reason == "stop" for one in stopped.completions)
        assert not llm.core.has_work
        assert llm.core.stats.num_used_blocks == 0


@pytest.mark.parametrize("leader", [True, False])
def test_a_sample_may_be_finished_while_its_group_is_computed_again(
    tiny_model: Path, leader: bool
) -> None:
    """Equal samples, so that all of them go on from one row of logits."""
    recomputing = settings(enable_prefix_caching=False, num_host_blocks=0)
    core = EngineCore(EngineConfig(model=str(tiny_model), **recomputing))
    params = SamplingParams(temperature=0.0, n=2, max_tokens=4, ignore_eos=True)
    core.add("calm", GenerateRequest(PROMPT, params))
    calm = [token.token_id for token in steps(core) if token.index == 0]
    core.add("a", GenerateRequest(PROMPT, params))
    tokens = [token for _ in range(4) for token in core.step()]
    assert len(tokens) == 2 * 3
    core.control(BatchControl(force_evict=9))
    core.control(BatchControl(max_num_seqs=8))
    assert core.step() == [], "it is evicted"
    assert core.step() == [], "the prompt is computed again, in chunks"
    core.finish("a", 0 if leader else 1)
    tokens += steps(core)
    wanted = 1 if leader else 0
    assert [token.token_id for token in tokens if token.index == wanted] == calm
    assert core.stats.num_used_blocks == 0


def steps(core: EngineCore) -> list[NewToken]:
    tokens = []
    while core.has_work:
        tokens.extend(core.step())
    return tokens


@pytest.mark.parametrize(
    ("width", "n", "penalty", "early"),
    [(3, 3, 1.0, False), (4, 2, 0.0, True), (2, 2, 1.0, "never"), (1, 1, 1.0, False)],
)
def test_beams_are_those_of_transformers(
    tiny_model: Path, width: int, n: int, penalty: float, early: bool | str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    llm = LLM(str(tiny_model), **settings())
    params = SamplingParams(
        n=n,
        best_of=width,
        use_beam_search=True,
        length_penalty=penalty,
        early_stopping=early,
        max_tokens=12,
    )
    prompts = [PROMPT, (3, 1, 4), (200,), tuple(range(100, 160))]
    for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=n,
            length_penalty=penalty,
            early_stopping=early,
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )[:, len(prompt) :].tolist()
        for ours, theirs in zip(tokens(result.completions), expected, strict=True):
            assert ours == theirs[: len(ours)]
            assert not any(theirs[len(ours) :]), "padding alone"
    assert llm.core.stats.num_used_blocks == 0


def test_a_request_in_any_state_is_aborted_whole(tiny_model: Path) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings(num_host_blocks=64)))
    for params in (
        attrs.evolve(SAMPLED, n=20),
        attrs.evolve(SAMPLED, best_of=4),
        SamplingParams(n=3, use_beam_search=True),
    ):
        for steps in range(6):
            core.add("a", GenerateRequest(PROMPT, params))
            for step in range(steps):
                if step == 3:
                    core.control(BatchControl(force_evict=9))
                    core.control(BatchControl(max_num_seqs=8))
                core.step()
            core.abort("a")
            core.step()
            assert not core.has_work
            assert core.stats.num_used_blocks == 0


def test_the_last_token_tells_how_long_a_request_was_preempted(tiny_model: Path) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings(num_host_blocks=64)))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for key in ("stays", "goes"):
        core.add(key, GenerateRequest(PROMPT, params))
    away: dict[str, list[float]] = {"stays": [], "goes": []}
    while core.has_work:
        for token in core.step():
            away[token.key].append(token.away_s)
        if len(away["goes"]) == 3:
            core.abort_and_swap(["goes"])
    assert set(away["stays"]) == {0.0}
    assert away["goes"][0] == 0.0 < away["goes"][-1]


@pytest.mark.parametrize("beams", [False, True], ids=["sample", "beams"])
def test_a_token_has_every_number_of_its_group(tiny_model: Path, beams: bool) -> None:
    """Of equal names: `StepSampling` passes them on, in ``core/step_sampling.py``."""
    names = {field.name for field in msgspec.structs.fields(NewToken)}
    names &= {field.name for field in attrs.fields(SequenceGroup)}
    assert names >= {"queue_s", "away_s", "num_preemptions"}
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings(num_host_blocks=64)))
    params = SamplingParams(use_beam_search=beams, n=1 + beams, temperature=0, max_tokens=8)
    core.add("a", GenerateRequest(PROMPT, attrs.evolve(params, ignore_eos=True)))
    requests = core.requests
    found = [*requests.samples.values(), *requests.beam_searches.values()][0]
    group = found.groups[0] if beams else found.sequence.group
    tokens = [token for _ in range(4) for token in core.step()]
    core.control(BatchControl(force_evict=9))
    core.step()
    core.control(BatchControl(max_num_seqs=8))  # so that it resumes at once
    while core.has_work:
        tokens += core.step()
    for name in names - {"finish_reason"}:
        told = [getattr(token, name) for token in tokens if token.index == tokens[0].index]
        assert getattr(group, name), name
        assert getattr(group, name) in (told[0], told[-1]), f"core/step_sampling.py: {name}"


@pytest.mark.parametrize("num_blocks", [16, 80])
def test_samples_of_a_long_prompt_gather_no_more_than_was_profiled(
    tiny_model: Path, num_blocks: int
) -> None:
    """On the CPU no bucket bounds the blocks that samples share; a prompt comes beside them."""
    config = settings(device="cpu", max_model_len=64, num_blocks=num_blocks)
    core = EngineCore(EngineConfig(model=str(tiny_model), **config))
    forward_runner, shapes = core.executor.worker.runner.forward_runner, []
    run = forward_runner.run

    def recording(batch: ModelInput) -> ForwardOutput:
        shapes.append(batch.shape)
        return run(batch)

    forward_runner.run = recording  # type: ignore[method-assign]
    found: dict[object, list[int]] = {}
    core.add("samples", GenerateRequest(PROMPT, attrs.evolve(SAMPLED, n=7, max_tokens=5)))
    for step in range(100):
        if step == 4:
            core.add(
                "beside",
                GenerateRequest(
                    tuple(range(100, 120)), SamplingParams(temperature=0, max_tokens=2)
                ),
            )
        for token in core.step():
            found.setdefault((token.key, token.index), []).append(token.token_id)
    parts = [shape.decode if isinstance(shape, MixedShape) else shape for shape in shapes]
    decodes = [shape for shape in parts if isinstance(shape, DecodeShape)]
    assert max(shape.blocks + shape.extra for shape in decodes) <= 2 * num_blocks
    assert (max(shape.batch for shape in decodes) < 7) == (num_blocks == 16)
    assert any(isinstance(shape, MixedShape) for shape in shapes) == (num_blocks == 80)
    llm = LLM(str(tiny_model), **settings())
    (alone,) = llm.generate([PROMPT], attrs.evolve(SAMPLED, n=7, max_tokens=5))
    assert [found["samples", i] for i in range(7)] == tokens(alone.completions)
    assert len(found["beside", 0]) == 2


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(best_of=9), "best_of"),
        (SamplingParams(n=9, use_beam_search=True), "n"),
    ],
)
def test_what_must_run_together_and_cannot_is_refused(
    tiny_model: Path, params: SamplingParams, field: str
) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings()))
    with pytest.raises(InvalidRequest, match="max_num_seqs 8") as caught:
        core.add("a", GenerateRequest(PROMPT, params))
    assert caught.value.field == field
    assert not core.has_work


def test_a_request_of_which_one_part_finds_no_place_leaves_none_behind(tiny_model: Path) -> None:
    config = settings(max_waiting=2, max_num_seqs=2)
    core = EngineCore(EngineConfig(model=str(tiny_model), **config))
    with pytest.raises(EngineOverloaded):
        core.add("a", GenerateRequest(PROMPT, attrs.evolve(SAMPLED, n=8)))
    assert not core.has_work
    core.add("a", GenerateRequest(PROMPT, attrs.evolve(SAMPLED, n=4)))


def test_a_request_id_is_served_once_at_a_time(tiny_model: Path) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings()))
    core.add("a", GenerateRequest(PROMPT, SAMPLED))
    with pytest.raises(InvalidRequest, match="'a' is being served already"):
        core.add("a", GenerateRequest(PROMPT, SAMPLED))


def test_priority_orders_requests_where_the_policy_says_so(tiny_model: Path) -> None:
    config = EngineConfig(
        model=str(tiny_model), **settings(max_num_seqs=1, scheduling_policy="priority")
    )
    core = EngineCore(config)
    core.add("later", GenerateRequest(PROMPT, SAMPLED, priority=2))
    core.add("sooner", GenerateRequest(PROMPT, SAMPLED, priority=1))
    ended = []
    while core.has_work:
        ended += [token.key for token in core.step() if token.finish_reason]
    assert ended == ["sooner", "later"]


def test_priority_means_nothing_first_come_first_served(tiny_model: Path) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings()))
    with pytest.raises(InvalidRequest, match="scheduling_policy") as caught:
        core.add("a", GenerateRequest(PROMPT, SAMPLED, priority=1))
    assert caught.value.field == "priority"
