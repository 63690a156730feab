"""Log-probabilities of prompts: those of transformers, however a prompt is computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import FAMILIES, SIZES
from request_mix import SMALL
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import (
    LLM,
    BatchControl,
    CompletionDelta,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    Generation,
    InvalidRequest,
    SamplingParams,
    Tokenizer,
)
from trencadis.engine.front.request_stream import RequestStream
from trencadis.engine.models.logit_head import LogitHead, keep_last_hidden, take_last_hidden

ASKED = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=4)
LENGTHS = (1, 2, 8, 31, 33, 65, 97, 65)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Prompts longer than a chunk of `SMALL`, all of one prefix."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(0, 250, 24).tolist()
    return [[*prefix, *rng.integers(0, 250, 128).tolist()][:length] for length in lengths]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """The log-probabilities by transformers of what follows each token but the last."""
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def logprobs(prompt: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], -1)

    return logprobs


def check(generation: Generation, logprobs: torch.Tensor, count: int = 4) -> None:
    """Compare what was reported of a prompt."""
    assert generation.prompt_logprobs is not None
    first, *others = generation.prompt_logprobs
    assert first is None
    assert len(others) == len(logprobs)
    for token_id, expected, found in zip(
        generation.prompt_token_ids[1:], logprobs, others, strict=True
    ):
        assert found is not None
        assert found.chosen.token_id == token_id
        assert found.chosen.logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
        assert found.rank == 1 + int((expected > expected[token_id]).sum())
        best = expected.topk(count)
        assert [token.token_id for token in found.top] == best.indices.tolist()
        assert [token.logprob for token in found.top] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize(
    "compiles", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_they_are_those_of_transformers(
    tiny_model: Path, reference: Callable[..., torch.Tensor], tmp_path: Path, compiles: bool
) -> None:
    llm = LLM(tiny_model, **SMALL, compile=compiles, compile_cache=str(tmp_path))
    wanted = prompts()
    # Also where the prefix is cached, and beside prompts that ask for nothing.
    for number in range(2):
        for generation in llm.generate(wanted, ASKED):
            check(generation, reference(generation.prompt_token_ids))
        if number == 0:
            plain = llm.generate(wanted, SamplingParams(max_tokens=2))
            assert all(generation.prompt_logprobs is None for generation in plain)
    for changes in ({"n": 3}, {"n": 2, "best_of": 4}, {"n": 20}):
        params = SamplingParams(max_tokens=2, prompt_logprobs=4, **changes)
        for generation in llm.generate(wanted, params):
            check(generation, reference(generation.prompt_token_ids))
    (of_text,) = llm.generate("a text", SamplingParams(max_tokens=1, prompt_logprobs=0))
    check(of_text, reference(of_text.prompt_token_ids), 0)


@pytest.mark.parametrize(
    ("bucketing", "chunks"),
    [(None, [21, 21, 18]), (BucketingConfig(), [32, 28])],
    ids=["ragged", "padded"],
)
def test_a_step_computes_fewer_tokens_of_a_scored_prompt_unless_it_would_pad_them(
    tiny_model: Path, bucketing: BucketingConfig | None, chunks: list[int]
) -> None:
    sizes = {**SMALL, "device": "cpu"}  # a Gaudi pads all prompts
    core = EngineCore(EngineConfig(model=str(tiny_model), bucketing=bucketing, **sizes))
    prompt = tuple(prompts([60])[0])
    core.add("scored", GenerateRequest(prompt, ASKED))
    counts = []
    while core.has_work:
        before = core.stats.num_prefill_tokens
        core.step()
        counts.append(core.stats.num_prefill_tokens - before)
    assert counts[: len(chunks)] == chunks
    core.close()


def test_cached_blocks_are_computed_again_and_stay_cached(tiny_model: Path) -> None:
    llm = LLM(tiny_model, **SMALL)
    (prompt,) = prompts([65])
    llm.generate([prompt], ASKED)
    before = llm.core.stats.num_prefill_tokens
    llm.generate([prompt], ASKED)
    assert llm.core.stats.num_prefill_tokens - before >= 64
    assert llm.core.stats.num_prefix_hit_tokens == 0
    llm.generate([prompt], SamplingParams(max_tokens=1))
    assert llm.core.stats.num_prefix_hit_tokens == 64


def test_a_request_that_goes_on_after_tokens_has_none(tiny_model: Path) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), **SMALL))
    (prompt,) = prompts([33])
    request = GenerateRequest(prompt, ASKED, output_token_ids=(5,))
    core.add("a", request)
    deltas: list[CompletionDelta] = []
    tokenizer = Tokenizer.load(str(tiny_model))
    stream = RequestStream("a", request, tokenizer, deltas.append)
    for token in (token for tokens in [core.step() for _ in range(4)] for token in tokens):
        stream.push(token)
    assert stream.finished
    assert [delta.prompt_logprobs for delta in deltas] == [None, None]


@pytest.mark.parametrize("num_host_blocks", [0, 64], ids=["recomputed", "swapped"])
def test_a_preempted_request_reports_them_once(
    tiny_model: Path, reference: Callable[..., torch.Tensor], num_host_blocks: int
) -> None:
    blocks = {"num_host_blocks": num_host_blocks} if num_host_blocks else {"swap_space": 0}
    config = EngineConfig(model=str(tiny_model), **{**SMALL, "num_blocks": 18, **blocks})
    core = EngineCore(config, clock=itertools.count(step=0.01).__next__)
    core.warm_up()
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, prompt_logprobs=1)
    wanted = prompts([40, 57, 33, 41, 61, 65])
    for number, prompt in enumerate(wanted):
        core.add(f"{number}", GenerateRequest(prompt, params))
    reported: dict[str, list[bytes]] = {}
    step = 0
    while core.has_work:
        step += 1
        if step in (2, 5):  # also in the middle of a prompt
            core.abort_and_swap([f"{number}" for number in range(len(wanted))])
            core.control(BatchControl(max_prefill_tokens=20))  # the chunks get other limits
        for token in core.step():
            if token.prompt_logprobs is not None:
                reported.setdefault(token.key, []).append(token.prompt_logprobs)
    assert not core.take_failures()
    assert core.stats.num_preemptions > 2
    for number, prompt in enumerate(wanted):
        (values,) = reported[f"{number}"]
        rows = np.frombuffer(values, "<f4").reshape(len(prompt) - 1, 4)
        own = reference(prompt).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert rows[:, 0] == pytest.approx(own.numpy(), abs=1e-4)


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_gaudi_compiles_nothing_for_them(
    mode: str,
    tiny_model: Path,
    stand_in: Callable[[str], Any],
    reference: Callable[..., torch.Tensor],
) -> None:
    sizes = {"prompt_batch": 2, "prompt_context": 12, "decode_batch": 4, "decode_blocks": 64}
    axes = {axis: AxisConfig(min=size, step=size, max=size) for axis, size in sizes.items()}
    # The profiling run has the longer chunks alone.
    grid = BucketingConfig(**axes, prompt_query=AxisConfig(min=16, step=16, max=32))
    settings = {**SMALL, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with stand_in(mode) as machinery:
        llm = LLM(tiny_model, device="hpu", **{**settings, "warmup": "full", "bucketing": grid})
        llm.generate(prompts(), SamplingParams(max_tokens=2))
        counters = machinery.counters
        before = counters.compile_calls, counters.traces, counters.recipes
        for generation in llm.generate(prompts(), ASKED):
            check(generation, reference(generation.prompt_token_ids))
        assert (counters.compile_calls, counters.traces, counters.recipes) == before
        stats = llm.core.stats
        assert stats.num_compilations == stats.num_cold_forwards == stats.num_bucket_misses == 0


@pytest.mark.parametrize(
    "family", ["Cohere (Command R)", "Gemma 2", "GPT-2", "Granite 3", "Llama 4 (text)", "OPT"]
)
def test_the_head_computes_what_the_model_does(family: str) -> None:
    model_type, changes = FAMILIES[family]
    settings = {name: value for name, value in (SIZES | changes).items() if value is not ...}
    if family == "Gemma 2":
        settings["final_logit_softcapping"] = 2.0
    if family == "Granite 3":
        settings["logits_scaling"] = 8.0
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    head = LogitHead(model)
    keep_last_hidden(model)
    with torch.inference_mode():
        logits = model(torch.arange(9)[None], use_cache=False).logits[0]
        hidden = take_last_hidden()
        assert hidden is not None
        assert torch.equal(head(hidden[0]), logits)
    assert take_last_hidden() is None


def test_beam_search_has_none() -> None:
    with pytest.raises(InvalidRequest, match="prompt_logprobs 1 has no meaning"):
        SamplingParams(use_beam_search=True, prompt_logprobs=1)
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=21)
