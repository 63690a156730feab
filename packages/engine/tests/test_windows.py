"""Layers that do not see all tokens, under preemption, chunked prefill and prefix caching."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_families import save_family
from transformers import AutoModelForCausalLM

from trencadis.bucketing import BucketingConfig
from trencadis.engine import LLM, GenerateRequest, SamplingParams
from trencadis.engine.runner import cache_sizing
from trencadis.engine.runner.shapes import DecodeRead
from trencadis.warmup import Phase

from .conftest import SESSION_DEVICE

COMMON = list(range(100, 124))
PROMPTS = [[5, *range(60, 60 + n)] for n in (3, 25, 31, 40)] + [[*COMMON, n] for n in (1, 2, 3)]
"""Around the 32 tokens of a window or a chunk; three have their first three blocks in common."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize(
    "family",
    [
        "gpt-oss",
        "Llama 4 (text)",
        "Mistral v0.1",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("Gemma 2", "Gemma 3 (text)")),
    ],
)
def test_tokens_are_those_of_transformers_whatever_the_engine_does(
    family: str, tmp_path: Path, add_tokenizer: Callable[[Path], None]
) -> None:
    if family.startswith("Llama 4") and SESSION_DEVICE is not None:
        pytest.skip("a Gaudi refuses its experts")
    add_tokenizer(save_family(family, tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [
        model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    several = SESSION_DEVICE is None and family != "Mistral v0.1"
    llm = LLM(
        str(tmp_path),
        **{"dtype": "float32", "max_model_len": 64, "warmup": "none", "block_size": 8},
        **{"max_num_batched_tokens": 12, "num_blocks": 40 if several else 19},
    )
    assert (len(llm.core.facts.windows) > 1) == several
    for _ in range(2):  # the second time the prompts that were last are in the prefix cache
        answers = llm.generate(PROMPTS, GREEDY)
        assert [list(answer.completions[0].token_ids) for answer in answers] == expected
    assert llm.core.stats.num_prefix_hit_tokens > 0
    assert llm.core.stats.num_preemptions > 0


@pytest.fixture(scope="module")
def mistral(
    tmp_path_factory: pytest.TempPathFactory, add_tokenizer: Callable[[Path], None]
) -> Path:
    """All of its layers have a window of 32 tokens."""
    directory: Path = save_family("Mistral v0.1", tmp_path_factory.mktemp("mistral"))
    add_tokenizer(directory)
    return directory


def engine(model: Path, **changes: object) -> LLM:
    settings = {"dtype": "float32", "max_model_len": 128, "warmup": "none", "block_size": 8}
    return LLM(str(model), **(settings | {"max_num_batched_tokens": 12} | changes))


def test_a_sequence_holds_the_blocks_of_its_window_alone(mistral: Path) -> None:
    core = engine(mistral, enable_prefix_caching=False).core
    params = SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True)
    core.add("long", GenerateRequest(tuple(range(60, 160)), params))
    held = []
    while core.has_work:
        core.step()
        held.append(core.blocks.pool.num_used_blocks)
    assert max(held) == 5, "four of a window, and a part of a further one"


@pytest.mark.slow
def test_groups_that_give_blocks_back_share_swap_and_fork_them(
    mistral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of n and of beams as without giving back, where all blocks fit, and where few do."""
    prompts = [[5, *range(60, 60 + n)] for n in (3, 31, 40, 62, 70)]
    beams = SamplingParams(n=2, use_beam_search=True, temperature=0.0, max_tokens=40)
    several = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)

    def tokens(params: SamplingParams, **changes: object) -> list[list[tuple[int, ...]]]:
        llm = engine(mistral, **changes)
        found = [
            [tuple(each.token_ids) for each in answer.completions]
            for _ in range(2)
            for answer in llm.generate(prompts, params)
        ]
        if changes:
            assert llm.core.stats.num_swaps > 0
            assert llm.core.stats.num_prefix_hit_tokens > 0
        assert llm.core.blocks.pool.num_used_blocks == 0
        return found

    for params, num_blocks in ((beams, 24), (several, 28)):
        small = {"num_blocks": num_blocks, "num_host_blocks": 40}
        narrow = [tokens(params), tokens(params, **small)]
        with monkeypatch.context() as patch:
            patch.setattr(cache_sizing, "seen_tokens", lambda layers, _: [None] * len(layers))
            assert narrow == [tokens(params)] * 2


def test_blocks_that_were_given_back_need_no_place_in_a_decode_bucket(
    mistral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pairs, ``VLLM_CONTIGUOUS_PA=false``."""
    bucketing = BucketingConfig(contiguous_pa=False)
    core = engine(mistral, bucketing=bucketing, enable_prefix_caching=False).core
    assert core.executor.worker.read is DecodeRead.PAIRS
    buckets, sizes = core.executor.worker.runner.buckets, []
    find = buckets.find

    def noted(phase: Phase, size: tuple[int, ...]) -> tuple[int, ...]:
        if phase is Phase.DECODE:
            sizes.append(size)
        return find(phase, size)

    monkeypatch.setattr(buckets, "find", noted)
    params = SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True)
    core.add("long", GenerateRequest(tuple(range(60, 160)), params))
    while core.has_work:
        core.step()
    assert set(sizes) == {(1, 4), (1, 5)}, "blocks that hold its window; the sequence has sixteen"
