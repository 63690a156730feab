"""Features that a setting switches off are off in what is served."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SMALL = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_blocks": 60,
    "use_buckets": True,
}


def started(model: Path, environ: dict[str, str], **changes: object) -> EngineCore:
    core = EngineCore(EngineConfig.from_env(environ, model=str(model), **{**SMALL, **changes}))
    core.warm_up()
    return core


@pytest.mark.parametrize(("enabled", "cached"), [(True, 32), (False, 0)])
def test_prefix_caching(tiny_model: Path, enabled: bool, cached: int) -> None:
    core = started(tiny_model, {}, enable_prefix_caching=enabled, warmup="none")
    hits = []
    for key in ("first", "again"):
        core.add(key, GenerateRequest(tuple(range(40)), GREEDY))
        while core.has_work:
            hits += [token.num_cached_tokens for token in core.step() if token.key == "again"]
    assert set(hits) == {cached}


@pytest.mark.parametrize(
    ("environ", "moved"),
    [({"VLLM_DEFRAG_THRESHOLD": "1"}, True), ({"VLLM_DEFRAG": "false"}, False)],
)
def test_defragmentation(tiny_model: Path, environ: dict[str, str], moved: bool) -> None:
    environ = {"VLLM_DEFRAG_THRESHOLD": "1", **environ}
    core = started(tiny_model, environ, warmup="none")
    for length, tokens in ((100, 1), (9, 12)):  # the long prompt ends first and leaves a hole
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        core.add(str(length), GenerateRequest(tuple(range(length)), params))
    highest = [0]
    while core.has_work:
        core.step()
        highest.append(core.blocks.pool.highest_used_block)
    last = [block for block in highest if block > 0][-1]
    assert (last < 10) is moved


@pytest.mark.parametrize(
    ("environ", "said"),
    [({}, True), ({"VLLM_DEFRAG_WARMUP": "false"}, False), ({"VLLM_DEFRAG": "false"}, False)],
)
def test_the_warm_up_of_the_defragmenter(
    tiny_model: Path, environ: dict[str, str], said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        started(tiny_model, environ)
    assert ("Warming up defragmenter with thresholds" in caplog.text) is said
