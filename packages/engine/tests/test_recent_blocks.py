"""Layers with a window read the last blocks of each sequence alone, in decodes of static shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from model_families import save_family
from request_mix import finish
from transformers import AutoModelForCausalLM

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.runner import forward_runner
from trencadis.engine.runner.forward_runner import ForwardOutput, ForwardRunner
from trencadis.engine.runner.model_input import ModelInput
from trencadis.engine.runner.shapes import (
    DecodeRead,
    DecodeShape,
    ForwardShape,
    PromptShape,
    padded_decode,
    with_recent_context,
)

PROMPTS = {"a": tuple(range(1, 31)), "b": tuple(range(40, 45)), "c": (7,), "d": tuple(range(9, 30))}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

modes = pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])


@pytest.fixture
def gaudi(stand_in: Any, mode: str) -> Iterator[Any]:
    with stand_in(mode) as bridge:
        yield bridge


@pytest.mark.parametrize(
    ("read", "size", "windows", "recent"),
    [
        (DecodeRead.PREFIX, (1, 13), (6,), 4),  # 1 + 5 / 2, rounded up; three times as many, and 1
        (DecodeRead.PREFIX, (1, 12), (6,), 0),
        (DecodeRead.PREFIX, (4, 49), (6,), 4),
        (DecodeRead.PREFIX, (4, 48), (6,), 0),
        (DecodeRead.PREFIX, (1, 500), (), 0),
        (DecodeRead.PREFIX, (1, 500), (1,), 1),
        (DecodeRead.PREFIX, (1, 40), (6, 20, 60), 11),  # that of 60 would be 31
        (DecodeRead.PAIRS, (1, 5), (6,), 4),  # where all blocks are gathered, fewer are
        (DecodeRead.PAIRS, (1, 4), (6,), 0),
        (DecodeRead.SEQUENCES, (3, 10), (6,), 4),
        (DecodeRead.SEQUENCES, (3, 8), (6,), 0),
    ],
)
def test_the_last_blocks_are_gathered_where_that_reads_less(
    read: DecodeRead, size: tuple[int, int], windows: tuple[int, ...], recent: int
) -> None:
    assert padded_decode(size, read, 2, 1000, windows).recent == recent


@pytest.mark.parametrize(
    ("blocks", "windows", "recent"), [(5, (6,), 4), (4, (6,), 0), (0, (6,), 0), (40, (6, 60), 31)]
)
def test_a_chunk_reads_the_last_blocks_of_a_longer_context(
    blocks: int, windows: tuple[int, ...], recent: int
) -> None:
    assert with_recent_context(PromptShape(2, 16, blocks), windows, 2).recent == recent


def few_buckets(**changes: Any) -> BucketingConfig:
    sizes = BucketingConfig(
        prompt_batch=AxisConfig(min=1, step=1, max=1),
        prompt_query=AxisConfig(min=16, step=48, max=64),
        prompt_context=AxisConfig(min=0, step=32, max=32),
        decode_batch=AxisConfig(min=1, step=3, max=4),
        decode_blocks=AxisConfig(min=32, step=32, max=64),
    )
    return attrs.evolve(sizes, **changes)


def core_of(model: Path, **settings: Any) -> EngineCore:
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 2}
    given = {"device": "hpu", "dtype": "float32", "num_blocks": 64, "bucketing": few_buckets()}
    core = EngineCore(EngineConfig(model=str(model), **{**sizes, **given, **settings}))
    core.warm_up()
    return core


def windowed(family: str, directory: Path) -> Path:
    """A model of which some layers, or all, see the last 6 tokens or chunks of 6."""
    limit = "attention_chunk_size" if family.startswith("Llama 4") else "sliding_window"
    return save_family(family, directory, **{limit: 6})


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> set[ForwardShape]:
    """Those of all forward passes."""
    found: set[ForwardShape] = set()
    run = ForwardRunner.run

    def noted(self: ForwardRunner, batch: ModelInput) -> ForwardOutput:
        found.add(batch.shape)
        return run(self, batch)

    monkeypatch.setattr(ForwardRunner, "run", noted)
    return found


@pytest.mark.parametrize(
    ("family", "contiguous", "mode"),
    [
        ("Mistral v0.1", True, "lazy"),
        ("Gemma 3 (text)", False, "lazy"),
        *(
            pytest.param(family, contiguous, mode, marks=pytest.mark.slow)
            for family, contiguous, mode in (
                *(("Mistral v0.1", False, "eager"), ("Gemma 3 (text)", True, "eager")),
                *(("gpt-oss", True, "lazy"), ("Gemma 2", False, "eager")),
            )
        ),
    ],
)
def test_tokens_are_those_of_transformers(
    gaudi: Any,
    shapes: set[ForwardShape],
    tmp_path: Path,
    add_tokenizer: Callable[[Path], None],
    family: str,
    contiguous: bool,
) -> None:
    add_tokenizer(windowed(family, tmp_path))
    bucketing = few_buckets(contiguous_pa=contiguous)
    core = core_of(tmp_path, bucketing=bucketing, max_num_batched_tokens=16)
    shapes.clear()
    for names in ("a", "abcd"):
        for name in names:
            core.add(name, GenerateRequest(PROMPTS[name], GREEDY))
        found = {key: [token.token_id for token in made] for key, made in finish(core).items()}
        for name in names:
            assert found[name] == generated(tmp_path, PROMPTS[name]), name
    recent = [shape for shape in shapes if getattr(shape, "recent", 0) == 4]
    assert {type(shape) for shape in recent} == {PromptShape, DecodeShape}
    assert core.stats.num_compilations == core.stats.num_cold_forwards == 0


def generated(model: Path, prompt: Sequence[int]) -> list[int]:
    """By transformers."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    made = plain.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :]
    return list(made.tolist())


@modes
def test_a_decode_reads_the_window_and_not_the_context(
    gaudi: Any, tmp_path: Path, add_tokenizer: Callable[[Path], None], monkeypatch: Any
) -> None:
    """Of four layers that have a window: 32 blocks in place, or four of them gathered."""
    add_tokenizer(windowed("Mistral v0.1", tmp_path))
    read = []
    for is_limited in (False, True):
        with monkeypatch.context() as patch:
            if not is_limited:
                patch.setattr(forward_runner, "windows_of", lambda _: ())
            core = core_of(tmp_path)
        core.add("a", GenerateRequest(PROMPTS["a"], GREEDY))
        for _ in range(4):
            before = gaudi.counters.copy()
            core.step()
        steps = gaudi.counters.since(before)
        assert steps.recipes == steps.fallbacks == 0
        read.append(steps.read_bytes)
    block = 4 * 2 * 2 * (2 * 16) * 4  # layers, tokens, keys and values, heads of 16 values of fp32
    assert read[0] - read[1] > (32 - 2 * 4) * block
