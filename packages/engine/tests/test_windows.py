"""Layers that do not see all tokens, under preemption, chunked prefill and prefix caching."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_families import save_family
from transformers import AutoModelForCausalLM

from trencadis.engine import LLM, SamplingParams

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
    llm = LLM(
        str(tmp_path),
        **{"dtype": "float32", "max_model_len": 64, "warmup": "none", "block_size": 8},
        **{"max_num_batched_tokens": 12, "num_blocks": 19},
    )
    for _ in range(2):  # the second time the prompts that were last are in the prefix cache
        answers = llm.generate(PROMPTS, GREEDY)
        assert [list(answer.completions[0].token_ids) for answer in answers] == expected
    assert llm.core.stats.num_prefix_hit_tokens > 0
    assert llm.core.stats.num_preemptions > 0
