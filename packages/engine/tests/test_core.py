"""The engine core on a tiny model: the tokens are those of plain generation, whatever happens."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import (
    LLM,
    STEP_TOKENS,
    BatchControl,
    ConfigError,
    EngineConfig,
    EngineCore,
    EngineOverloaded,
    GenerateRequest,
    InvalidRequest,
    ModelError,
    NewToken,
    SamplingParams,
    StructuredOutput,
)
from trencadis.engine.runner.model_input import ModelInput
from trencadis.engine.runner.step import StepInput

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompts(count: int = 9, seed: int = 1) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 256, rng.integers(1, 90)).tolist()) for _ in range(count)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """What transformers generates for each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            min_new_tokens=12,
            pad_token_id=0,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def settings(**changes: object) -> dict[str, object]:
    return {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "num_blocks": 80,
        "warmup": "none",
        **changes,
    }


ONE_BUCKET = BucketingConfig(
    prompt_batch=AxisConfig(min=4, step=4, max=4),
    prompt_query=AxisConfig(min=32, step=32, max=32),
    prompt_context=AxisConfig(min=16, step=16, max=16),
    decode_batch=AxisConfig(min=4, step=4, max=4),
    decode_blocks=AxisConfig(min=80, step=80, max=80),
)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="default grid"),
        pytest.param({"use_buckets": False}, id="no buckets"),
        pytest.param({"bucketing": BucketingConfig.from_env({})}, id="plugin's default grid"),
        pytest.param({"max_num_batched_tokens": 7}, id="chunks of 7 tokens"),
        pytest.param(
            {"num_blocks": 18, "swap_space": 0}, id="so few blocks that sequences are preempted"
        ),
        pytest.param({"num_blocks": 18, "num_host_blocks": 64}, id="the same, and swapped out"),
        pytest.param({"max_num_seqs": 1}, id="one at a time"),
        pytest.param({"warmup": "full"}, id="after warm-up"),
        pytest.param({"block_size": 1, "num_blocks": 400}, id="one token per block"),
        pytest.param({"block_size": 128, "num_blocks": 9}, id="one block per sequence"),
    ],
)
def test_greedy_tokens_are_those_of_plain_generation(
    tiny_model: Path, expected: list[list[int]], changes: dict[str, object]
) -> None:
    llm = LLM(str(tiny_model), **settings(**changes))
    results = llm.generate(prompts(), GREEDY)
    assert [one.completions[0].token_ids for one in results] == expected
    stats = llm.core.stats
    assert stats.num_used_blocks == 0
    if changes.get("warmup") == "full":
        assert llm.core.executor.worker.is_warm
    assert (stats.num_preemptions > 0) == (changes.get("num_blocks") == 18)
    assert (stats.num_swaps > 0) == ("num_host_blocks" in changes)


def test_one_huge_bucket_changes_no_token(tiny_model: Path, expected: list[list[int]]) -> None:
    llm = LLM(str(tiny_model), **settings(bucketing=ONE_BUCKET, max_num_batched_tokens=128))
    assert llm.core.executor.worker.grids is not None
    assert (
        len(llm.core.executor.worker.grids.prompt)
        == len(llm.core.executor.worker.grids.decode)
        == 1
    )
    results = llm.generate(prompts(), GREEDY)
    assert [one.completions[0].token_ids for one in results] == expected
    stats = llm.core.stats
    assert stats.num_bucket_misses == 0
    assert stats.num_padded_tokens > stats.num_prefill_tokens


@pytest.mark.parametrize("tokens", [32, 96])
def test_all_that_a_step_computes_is_one_forward_pass(
    tiny_model: Path, expected: list[list[int]], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(tiny_model), **settings(device="cpu", max_num_batched_tokens=tokens))
    runner = llm.core.executor.worker.runner
    run_step, run_forward = runner.run, runner.forward_runner.run
    passes: list[int] = []
    chunks: list[int] = []
    mixed: list[int] = []

    def step(output: StepInput) -> object:
        passes.append(0)
        chunks.append(len(output.prompts))
        mixed.append(min(len(output.prompts), len(output.decodes)))
        return run_step(output)

    def forward(batch: ModelInput) -> object:
        passes[-1] += 1
        return run_forward(batch)

    monkeypatch.setattr(runner, "run", step)
    monkeypatch.setattr(runner.forward_runner, "run", forward)
    results = llm.generate(prompts(), GREEDY)
    assert [list(result.completions[0].token_ids) for result in results] == expected
    assert set(passes) == {1}
    assert max(chunks) > 1
    assert max(mixed) > 0
    # Prefill is padded to a multiple of 16 tokens, decodes are not padded.
    assert llm.core.stats.num_padded_tokens <= 15 * sum(count > 0 for count in chunks)


@pytest.mark.parametrize(
    ("set_", "chunks"),
    [
        ({}, [300, 256, 44]),
        ({"max_mixed_prefill_tokens": 64}, [300, 64, 236]),
        ({"max_num_batched_tokens": 512}, [300, 300]),
    ],
    ids=str,
)
def test_a_prompt_is_computed_at_once_unless_others_decode(
    make_tiny_model: Callable[..., Path],
    tmp_path: Path,
    set_: dict[str, int],
    chunks: list[int],
) -> None:
    model = make_tiny_model(tmp_path, max_position_embeddings=512)
    sizes = {"max_model_len": 512, "num_blocks": 200, "max_num_batched_tokens": None, **set_}
    given = {name: value for name, value in settings(**sizes).items() if value is not None}
    core = EngineCore(EngineConfig(model=str(model), **{**given, "device": "cpu"}))
    core.warm_up()
    core.add("first", GenerateRequest((1,) * 300, SamplingParams(max_tokens=2)))
    counts = [0]

    def step() -> None:
        core.step()
        counts.append(core.stats.num_prefill_tokens)

    step()
    core.add("second", GenerateRequest((2,) * 300, SamplingParams(max_tokens=2)))
    while core.has_work:
        step()
    core.close()
    steps = [after - before for before, after in itertools.pairwise(counts)]
    assert [count for count in steps if count] == chunks


@pytest.mark.parametrize(
    ("num_decodes", "length", "padding"),
    [(0, 5, 0), (0, 16, 0), (0, 17, 15), (3, 5, 0), (3, 15, 14)],
)
def test_only_passes_of_more_than_16_tokens_are_padded(
    tiny_model: Path, num_decodes: int, length: int, padding: int
) -> None:
    """To a multiple of 16; decodes have the smaller numbers, too."""
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings(device="cpu")))
    core.warm_up()
    for i in range(num_decodes):
        core.add(str(i), GenerateRequest((i,), GREEDY))
    core.step()
    core.add("prompt", GenerateRequest(tuple(range(length)), GREEDY))
    core.step()
    assert core.stats.num_padded_tokens == padding
    core.close()


def test_warm_up_runs_every_bucket_and_leaves_the_cache_unread(tiny_model: Path) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings(warmup="full")))
    report = core.warm_up()
    assert report is not None
    assert core.executor.worker.grids is not None
    assert len(report.executed) == len(core.executor.worker.grids.prompt) + len(
        core.executor.worker.grids.decode
    )
    assert core.stats.num_used_blocks == 0
    assert not core.executor.worker.cache.key(0)[1:].any(), (
        "dummy batches write to the padding block alone"
    )


def test_sampled_tokens_do_not_depend_on_company_or_preemption(tiny_model: Path) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)
    together = LLM(str(tiny_model), **settings(num_blocks=18)).generate(prompts(), params)
    alone = LLM(str(tiny_model), **settings(max_num_seqs=1))
    for prompt, result in zip(prompts(), together, strict=True):
        (single,) = alone.generate([prompt], params)
        assert single.completions == result.completions


def test_shared_prefix_is_computed_once_and_changes_no_token(tiny_model: Path) -> None:
    common = tuple(range(50, 90))
    asked = [(*common, 1), (*common, 2, 3), common, (*common, 1), (*common[:17], 9)]
    results = {}
    for sharing in (True, False):
        llm = LLM(str(tiny_model), **settings(enable_prefix_caching=sharing, max_num_seqs=8))
        first = llm.generate([common], GREEDY)
        before = llm.core.stats.num_prefill_tokens
        results[sharing] = first + llm.generate(asked, GREEDY)
        computed = llm.core.stats.num_prefill_tokens - before
        assert (computed < sum(map(len, asked)) / 3) == sharing
        assert llm.core.stats.num_used_blocks == 0
    assert results[True] == results[False]


def test_requests_of_other_salts_share_no_cached_prefix(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **settings(max_num_seqs=8))
    prompt = tuple(range(50, 90))
    computed = []
    for salt in ("mine", "yours", None, "mine", None):
        before = llm.core.stats.num_prefill_tokens
        llm.generate([prompt], GREEDY, cache_salt=salt)
        computed.append(llm.core.stats.num_prefill_tokens - before)
    assert computed[:3] == [40, 40, 40]
    assert max(computed[3:]) < 20
    with pytest.raises(InvalidRequest, match="1 to 1024 characters"):
        llm.generate([prompt], GREEDY, cache_salt="")


def test_samples_of_a_request_differ_and_are_reproducible(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **settings())
    params = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)
    (first,) = llm.generate(["abc"], params)
    assert len({tuple(one.token_ids) for one in first.completions}) == 3
    (second,) = llm.generate(["abc"], params)
    assert first.completions == second.completions


def test_unseeded_samples_differ_between_requests(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **settings())
    results = llm.generate(["abc"] * 4, SamplingParams(max_tokens=8, ignore_eos=True))
    assert len({tuple(one.completions[0].token_ids) for one in results}) == 4


def test_stop_string_ends_the_text_and_frees_the_blocks(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **settings())
    (free,) = llm.generate(["hello"], SamplingParams(temperature=0.0, max_tokens=20))
    text = free.completions[0].text
    stop = text[5:7]
    (stopped,) = llm.generate(["hello"], SamplingParams(temperature=0, max_tokens=20, stop=(stop,)))
    assert stopped.completions[0].finish_reason == "stop"
    assert stopped.completions[0].text == text[: text.find(stop)]
    assert llm.core.stats.num_used_blocks == 0


def test_stop_token_ends_without_its_text(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **settings())
    (free,) = llm.generate([(1, 2, 3)], GREEDY)
    stop = free.completions[0].token_ids[4]
    first = free.completions[0].token_ids.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,))
    (stopped,) = llm.generate([(1, 2, 3)], params)
    assert stopped.completions[0].finish_reason == "stop"
    assert stopped.completions[0].token_ids == free.completions[0].token_ids[: first + 1]


def test_an_answer_has_only_allowed_tokens(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **settings())
    end = 257
    rules = [
        {"allowed_token_ids": (65, 66, 67), "seed": 1, "n": 2},
        {"allowed_token_ids": (7,), "temperature": 0.0},
        {"allowed_token_ids": (65, end), "min_tokens": 5, "logit_bias": {end: 100.0}},
        {"allowed_token_ids": (end,), "min_tokens": 5},
        {"temperature": 0.0},
    ]
    params = [SamplingParams(max_tokens=8, **rule) for rule in rules]
    listed, one, late, only, free = llm.generate([(1, 2, 3)] * len(rules), params)
    assert {token for answer in listed.completions for token in answer.token_ids} == {65, 66, 67}
    assert one.completions[0].token_ids == [7] * 8
    assert late.completions[0].token_ids == [65] * 5 + [end]
    assert only.completions[0].token_ids == [end] * 5, "min_tokens leaves the only token"
    (alone,) = llm.generate([(1, 2, 3)], params[-1])
    assert free.completions == alone.completions


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_answer_has_no_bad_words(tiny_model: Path, async_scheduling: bool) -> None:
    """The tokenizer has a token for each byte: of a word only the last letter is forbidden."""
    llm = LLM(str(tiny_model), **settings(async_scheduling=async_scheduling))
    letters = llm.tokenizer.encode("abcdefghij", add_special_tokens=False)
    biases = dict.fromkeys(letters, 60.0)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logit_bias=biases)
    (free,) = llm.generate([(1, 2, 3)], greedy)
    words = {free.completions[0].text[start : start + 3] for start in (0, 4, 9)}
    rules = [
        {"bad_words": words},
        {"bad_words": words, "temperature": 1.0, "seed": 3, "n": 3},
        {"bad_words": [free.completions[0].text[0]], "repetition_penalty": 1.1},
        {},
    ]
    params = [attrs.evolve(greedy, **rule) for rule in rules]
    several, drawn, letter, same = llm.generate([(1, 2, 3)] * len(rules), params)
    answers = [answer.text for each in (several, drawn) for answer in each.completions]
    assert not any(word in answer for word in words for answer in answers)
    assert rules[2]["bad_words"][0] not in letter.completions[0].text
    assert same.completions == free.completions
    assert answers[0] != free.completions[0].text
    (alone,) = llm.generate([(1, 2, 3)], params[0])
    assert alone.completions == several.completions
    long = attrs.evolve(greedy, bad_words=["\U0001f600" * 128])  # a token for each of 512 bytes
    assert llm.generate([(1, 2, 3)], long)[0].completions == free.completions
    space = llm.tokenizer.encode(" ", add_special_tokens=False)
    spaces = attrs.evolve(greedy, bad_words=["\n"], logit_bias={space[0]: 90.0})
    (blank,) = llm.generate([(1, 2, 3)], spaces)
    assert blank.completions[0].token_ids == space * 24, "a line break forbids no space"


def test_logprobs_come_with_every_token(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **settings())
    (one,) = llm.generate(["hi"], SamplingParams(temperature=0.0, max_tokens=4, logprobs=3))
    assert len(one.completions[0].logprobs) == len(one.completions[0].token_ids)
    for token, reported in zip(
        one.completions[0].token_ids, one.completions[0].logprobs, strict=True
    ):
        assert reported.chosen.token_id == token == reported.top[0].token_id
        assert reported.chosen.logprob <= 0


def test_batch_larger_than_the_queue_is_served(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **settings(max_waiting=2))
    results = llm.generate(["a"] * 7, SamplingParams(max_tokens=2, ignore_eos=True))
    assert all(len(one.completions[0].token_ids) == 2 for one in results)


def test_abort_in_any_state_frees_every_block(tiny_model: Path) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings()))
    for steps in range(6):
        for i, prompt in enumerate(prompts()):
            core.add(f"{i}", GenerateRequest(prompt, GREEDY))
        for _ in range(steps):
            core.step()
        for i in range(len(prompts())):
            core.abort(f"{i}")
        core.abort("nobody")
        assert not core.has_work
        assert core.stats.num_used_blocks == 0


def test_full_queue_is_refused_and_the_rest_goes_on(tiny_model: Path) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings(max_waiting=1)))
    core.add("a", GenerateRequest((1, 2), GREEDY))
    with pytest.raises(EngineOverloaded, match="try again later"):
        core.add("b", GenerateRequest((1, 2), GREEDY))
    while core.has_work:
        core.step()
    core.add("b", GenerateRequest((1, 2), GREEDY))


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ((), GREEDY, "prompt"),
        ((1,) * 128, GREEDY, "prompt"),
        ((1, 258), GREEDY, "prompt"),
        ((1, -1), GREEDY, "prompt"),
        ((1,) * 120, GREEDY, "max_tokens"),
        ((1,), SamplingParams(logit_bias={258: 1.0}), "logit_bias"),
        ((1,), SamplingParams(stop_token_ids=(258,)), "stop_token_ids"),
        ((1,), SamplingParams(allowed_token_ids=(1, 258)), "allowed_token_ids"),
        ((1,), SamplingParams(bad_words=[(1, 258)]), "bad_words"),
        ((1,), SamplingParams(bad_words=["a"]), "bad_words"),
    ],
)
def test_bad_request_names_its_field(
    tiny_model: Path, prompt: tuple[int, ...], params: SamplingParams, field: str
) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings()))
    with pytest.raises(InvalidRequest, match=field) as caught:
        core.add("a", GenerateRequest(prompt, params))
    assert caught.value.field == field
    assert not core.has_work


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 24}, "power of two.*24"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization.*1.5"),
        ({"max_num_seqs": 0}, "max_num_seqs.*0"),
        ({"dtype": "int4"}, "dtype.*int4"),
        ({"device": "abacus"}, "device.*abacus"),
        ({"device": "simulated"}, "use the command trencadis-simulate"),
        ({"max_model_len": 1000}, "max_model_len 1000 is above.*256"),
        ({"swap_space": -1}, "swap_space.*-1"),
        ({"num_host_blocks": -1}, "num_host_blocks.*-1"),
        ({"swap_bandwidth": 0}, "swap_bandwidth.*0"),
        ({"swap_bandwidth": 1e-9}, "swap_bandwidth.*less than one block"),
        ({"scheduling_policy": "random"}, "scheduling_policy.*random"),
        ({"thermal_policy": "proportional", "device": "cpu"}, "needs temperature_source"),
        ({"temperature_source": "crystal ball"}, "crystal ball"),
        ({"temperature_source": "recorded:/no/such/file"}, "/no/such/file"),
        ({"temperature_source": "sensors", "thermal_policy": "hope"}, "hope.*proportional"),
        ({"num_blocks": 10**9}, "num_blocks asks for 1000000000 blocks .*: lower num_blocks"),
        ({"num_host_blocks": 10**9}, "num_host_blocks asks for 1000000000 blocks"),
        ({"num_blocks": 5}, "cannot hold one sequence of max_model_len 128"),
        ({"num_blocks": None, "kv_cache_memory": 1000}, "raise kv_cache_memory"),
        ({"bucketing": BucketingConfig(bucket_file="/no/such/file")}, "/no/such/file"),
    ],
)
def test_bad_setting_is_named_before_anything_is_served(
    tiny_model: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineCore(EngineConfig(model=str(tiny_model), **settings(**changes)))


def test_wrong_model_is_refused() -> None:
    with pytest.raises(ModelError, match="no directory"):
        EngineCore(EngineConfig(model="/no/such/model"))


@pytest.mark.parametrize(
    ("changes", "num_host_blocks"),
    [
        ({"device": "cpu"}, 0),
        ({"swap_space": 100_000 / 2**30}, 24),
        ({"swap_space": 100_000 / 2**30, "num_host_blocks": 3}, 3),
        ({"swap_space": 4}, 4 * 128 // 8),
    ],
    ids=["none on the CPU", "as large as asked for", "counted", "no more than could be used"],
)
def test_swap_space(tiny_model: Path, changes: dict[str, object], num_host_blocks: int) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings(**changes)))
    assert (
        core.blocks.config.num_host_blocks
        == core.executor.worker.cache.num_host_blocks
        == num_host_blocks
    )


def test_a_request_that_goes_on_counts_its_earlier_tokens_for_min_tokens(tiny_model: Path) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings()))
    free = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def served(params: SamplingParams, output: tuple[int, ...] = ()) -> list[int]:
        core.add("a", GenerateRequest((1, 2, 3), params, output_token_ids=output))
        tokens = []
        while core.has_work:
            tokens += [token.token_id for token in core.step()]
        return tokens

    tokens = served(free)
    end = next(i for i in range(4, 12) if tokens[i] not in tokens[:i])
    stopping = attrs.evolve(free, stop_token_ids=(tokens[end],), min_tokens=end)
    assert served(stopping) == tokens[: end + 1]
    assert served(stopping, tuple(tokens[: end - 1])) == tokens[end - 1 : end + 1]


def test_what_swaps_take_is_learned(tiny_model: Path) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings(num_host_blocks=64)))
    before = attrs.evolve(core.scheduler.costs)
    assert (before.swap_out_s_per_block, before.swap_in_s_per_block) == (40e-6, 50e-6)
    core.add("a", GenerateRequest((1,) * 30, GREEDY))
    core.step()
    core.control(BatchControl(force_evict=9))
    core.control(BatchControl(max_num_seqs=4))  # which lets it resume at once
    while core.has_work:
        core.step()
    learned = core.scheduler.costs
    assert learned.prefill_s_per_token != before.prefill_s_per_token
    assert learned.swap_out_s_per_block != before.swap_out_s_per_block
    assert learned.swap_in_s_per_block != before.swap_in_s_per_block


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=6)],
    ids=["samples", "beams"],
)
def test_the_first_token_tells_how_long_its_request_waited(
    tiny_model: Path, params: SamplingParams
) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings(max_num_seqs=2)))
    for key in ("a", "b", "c"):
        core.add(key, GenerateRequest((1, 2, 3), params))
    core.control(BatchControl(max_num_seqs=params.num_seqs))
    tokens: dict[tuple[str, int], list[NewToken]] = {}
    while core.has_work:
        for token in core.step():
            tokens.setdefault((token.key, token.index), []).append(token)
    assert all(token.queue_s is None for sample in tokens.values() for token in sample[1:])
    waited = [tokens[key, 0][0].queue_s for key in ("a", "b", "c")]
    assert None not in waited
    assert 0 <= waited[0] < waited[1] < waited[2]


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=6)],
    ids=["samples", "beams"],
)
def test_a_request_that_was_parked_before_its_first_token_tells_no_time_in_the_queue(
    tiny_model: Path, params: SamplingParams
) -> None:
    """The core knows the wait since its return alone: the rest would count as prefill."""
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings(max_num_seqs=2)))
    core.add("parked", GenerateRequest((1, 2, 3), params, is_resumed=True))
    tokens = []
    while core.has_work:
        tokens += core.step()
    assert tokens
    assert all(token.queue_s is None for token in tokens)


@pytest.mark.parametrize("caches", [True, False])
def test_prefix_hits_are_counted_by_the_tokens_of_prompts(tiny_model: Path, caches: bool) -> None:
    changes = settings(enable_prefix_caching=caches)
    core = EngineCore(EngineConfig(model=str(tiny_model), **changes))
    for key in ("a", "b"):
        core.add(key, GenerateRequest(tuple(range(2, 32)), GREEDY))
        while core.has_work:
            core.step()
    stats = core.stats
    assert stats.num_prompt_tokens == 60
    assert stats.num_prefix_query_tokens == (60 if caches else 0)
    assert stats.num_prefix_hit_tokens == (24 if caches else 0), "three full blocks of 8 tokens"
    assert stats.block_size == 8
    first, later = (30, 6 if caches else 30)
    steps = Counter(bisect_left(STEP_TOKENS, prompt + 1) for prompt in (first, later))
    steps[0] = stats.num_generation_tokens - 2
    assert stats.num_steps_by_tokens == tuple(steps[i] for i in range(len(STEP_TOKENS) + 1))


def test_a_request_whose_grammar_is_compiled_waits_for_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings()))
    monkeypatch.setattr(core.requests._grammars, "compile", lambda *_: Future())
    form = StructuredOutput(json_object=True)
    core.add("a", GenerateRequest((1, 2, 3), SamplingParams(structured_output=form)))
    core.add("b", GenerateRequest((1, 2, 3), GREEDY))
    assert (core.stats.num_waiting_reqs, core.stats.num_compiling_reqs) == (2, 1)
    core.abort("a")
    assert (core.stats.num_waiting_reqs, core.stats.num_compiling_reqs) == (1, 0)


@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_a_request_that_is_preempted_by_its_key_keeps_its_tokens_which_say_so(
    tiny_model: Path, num_host_blocks: int
) -> None:
    changes = {"num_host_blocks": num_host_blocks, "enable_prefix_caching": False}
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings(**changes)))
    prompt = tuple(range(2, 62))

    def served(preempted: bool) -> list[NewToken]:
        core.add("a", GenerateRequest(prompt, GREEDY))
        core.step()
        if preempted:
            assert core.abort_and_swap(["a", "unknown"]) == ("a",)
            core.step()
            assert core.abort_and_swap(["a"]) == (), "it does not run"
            core.control(BatchControl(max_num_seqs=4))
        tokens = []
        while core.has_work:
            tokens += core.step()
        return tokens

    calm, tokens = served(preempted=False), served(preempted=True)
    assert [token.token_id for token in tokens] == [token.token_id for token in calm]
    assert {token.request_status for token in calm} == {"normal"}
    status = "swapped" if num_host_blocks else "preempted"
    assert {token.request_status for token in tokens} == {status}
    assert (calm[-1].num_preemptions, tokens[-1].num_preemptions) == (0, 1)
    assert tokens[0].queue_s is not None
    stats = core.stats
    assert stats.num_swap_out_bytes == stats.num_swap_in_bytes
    assert stats.num_swap_out_bytes % core.executor.worker.block_bytes == 0
    assert (stats.num_swap_out_bytes > 0) == (stats.swap_seconds > 0) == bool(num_host_blocks)
    assert stats.num_queued_swaps == 0
    for wrong in ("a", None, [5]):
        with pytest.raises(InvalidRequest, match="abort_and_swap needs a list of request ids"):
            core.abort_and_swap(wrong)


def test_prompts_of_a_call_are_preempted_by_their_numbers(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **settings(num_host_blocks=64))
    expected = llm.generate(prompts()[:2], GREEDY)
    step, preempted = llm.core.step, []

    def stepping() -> object:
        stats = llm.core.stats
        if stats.num_running_seqs == 2 and not preempted:
            assert (stats.num_running_reqs, stats.num_waiting_reqs) == (2, 0)
            preempted.extend(llm.abort_and_swap([1, 9]))
        return step()

    llm.core.step = stepping  # type: ignore[method-assign]
    assert llm.generate(prompts()[:2], GREEDY) == expected
    assert preempted == [1]
    assert llm.core.stats.num_preemptions == 1
    assert llm.abort_and_swap([0]) == (), "no call runs"


def test_cache_fills_the_memory_it_is_given(tiny_model: Path) -> None:
    config = settings(num_blocks=None, kv_cache_memory=100_000)
    core = EngineCore(EngineConfig(model=str(tiny_model), **config))
    block_bytes = 2 * 2 * 2 * 8 * 16 * 4  # keys and values, layers, heads, tokens, size, fp32
    assert core.executor.worker.limits.num_blocks == 100_000 // block_bytes


@pytest.mark.parametrize("length", [1, 10])
def test_prompt_tokens_are_counted_once_whatever_is_recomputed_or_sampled(
    tiny_model: Path, length: int
) -> None:
    """As vLLM's ``prompt_tokens_total``: cached, recomputed and shared tokens do not change it."""
    llm = LLM(str(tiny_model), **settings(num_blocks=20, max_num_seqs=4))
    prompts = [tuple(range(50 + i, 50 + i + length)) for i in range(2)]
    params = SamplingParams(n=2, max_tokens=50, seed=0, ignore_eos=True)
    llm.generate(prompts, params)
    stats = llm.core.stats
    assert stats.num_preemptions > 0
    assert stats.num_prompt_tokens == 2 * length
    assert stats.num_generation_tokens == 2 * 2 * 50


def test_a_request_of_more_samples_than_may_run_counts_as_one_that_runs(tiny_model: Path) -> None:
    """Its samples are several groups of the scheduler."""
    core = LLM(str(tiny_model), **settings(max_num_seqs=4)).core
    core.add("a", GenerateRequest((5, 6, 7), SamplingParams(n=6, max_tokens=30, ignore_eos=True)))
    for _ in range(5):
        core.step()
    stats = core.stats
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 0)
    assert stats.num_running_seqs == 4


def test_the_prompt_of_a_beam_search_counts_when_its_prefill_ends(tiny_model: Path) -> None:
    core = LLM(str(tiny_model), **settings()).core
    core.add(
        "a", GenerateRequest((5, 6, 7), SamplingParams(use_beam_search=True, n=2, max_tokens=20))
    )
    for _ in range(3):
        core.step()
    assert core.stats.num_prompt_tokens == 3
    core.abort("a")
    assert core.stats.num_prompt_tokens == 3
