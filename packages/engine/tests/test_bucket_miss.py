"""What becomes of a batch in a shape that was not warmed up: compiled, run eagerly, or rejected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import attrs
import pytest

from trencadis.engine import (
    LLM,
    AsyncEngine,
    BucketMiss,
    ConfigError,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    SamplingParams,
)
from trencadis.engine.devices import CPUDevice

SMALL = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_blocks": 60,
    "use_buckets": True,
    "enable_prefix_caching": False,  # so that the lowest blocks are used again
}
FEW_BLOCKS = {
    "VLLM_DECODE_BLOCK_BUCKET_MAX": "8",
    "VLLM_DECODE_BS_BUCKET_STEP": "4",
    "VLLM_PROMPT_BS_BUCKET_MAX": "1",
}


def started(model: Path, environ: dict[str, str], **changes: object) -> EngineCore:
    core = EngineCore(EngineConfig.from_env(environ, model=str(model), **{**SMALL, **changes}))
    core.warm_up()
    return core


def serve(core: EngineCore, **lengths: int) -> tuple[dict[str, int], dict[str, str]]:
    """The number of tokens of each request, and the messages of those that failed."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    tokens: dict[str, int] = dict.fromkeys(lengths, 0)
    errors: dict[str, str] = {}
    for key, length in lengths.items():
        core.add(key, GenerateRequest(tuple(range(length)), params))
    while core.has_work:
        for token in core.step():
            tokens[token.key] += 1
        for failure in core.take_failures():
            assert failure.code == "bucket_miss"
            errors[failure.key] = failure.message
    return tokens, errors


def test_a_refused_request_ends_and_the_others_are_served(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core = started(tiny_model, FEW_BLOCKS, on_bucket_miss="refuse")
    tokens, errors = serve(core, short=5)
    assert (tokens, errors) == ({"short": 4}, {})
    tokens, errors = serve(core, short=5, long=100)  # 13 blocks do not fit a prefix of 8
    assert tokens["short"] == 4
    assert list(errors) == ["long"]
    for part in (
        "no decode bucket holds a batch of batch 1, blocks ",
        "(the largest blocks is 8: VLLM_DECODE_BLOCK_BUCKET_MAX, or the bucket file)",
        "--on-bucket-miss refuse",
    ):
        assert part in errors["long"]
    assert core.stats.num_bucket_misses > 0
    assert core.stats.num_used_blocks == 0, "its blocks are free again"
    assert "Traceback" not in caplog.text
    assert serve(core, again=30) == ({"again": 4}, {})


def test_a_refused_prompt_of_a_batch_raises_a_bucket_miss(tiny_model: Path) -> None:
    config = EngineConfig.from_env(
        FEW_BLOCKS, model=str(tiny_model), **SMALL, on_bucket_miss="refuse"
    )
    settings = {name: getattr(config, name) for name in (*SMALL, "bucketing", "on_bucket_miss")}
    llm = LLM(str(tiny_model), **settings)
    with pytest.raises(BucketMiss, match=r"--on-bucket-miss refuse"):
        llm.generate([list(range(100))], SamplingParams(max_tokens=4, ignore_eos=True))
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].completions


def test_the_check_of_the_device_is_no_traffic(lazy_gaudi: object, tiny_model: Path) -> None:
    """It follows a failed step, and a switch back to weights that were kept."""
    core = EngineCore(
        EngineConfig(model=str(tiny_model), device="hpu", on_bucket_miss="refuse", **SMALL)
    )
    core.warm_up(lambda: True)  # nothing
    assert list(serve(core, cold=5)[1]) == ["cold"]
    before = core.stats
    core.executor.probe()
    assert core.stats == before


@pytest.mark.slow
def test_the_front_raises_a_bucket_miss_for_the_request_that_it_concerns(tiny_model: Path) -> None:
    config = EngineConfig.from_env(
        FEW_BLOCKS, model=str(tiny_model), **SMALL, on_bucket_miss="refuse"
    )

    async def served() -> list[object]:
        engine = await AsyncEngine.start(config)
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

        async def tokens(length: int) -> int:
            deltas = engine.generate(GenerateRequest(list(range(length)), params))
            return sum([len(delta.token_ids) async for delta in deltas])

        try:
            short = asyncio.create_task(tokens(5))
            await asyncio.sleep(0)
            return await asyncio.gather(short, tokens(100), return_exceptions=True)
        finally:
            await engine.stop()

    short, long = asyncio.run(served())
    assert isinstance(long, BucketMiss)
    assert "the largest blocks is 8: VLLM_DECODE_BLOCK_BUCKET_MAX" in str(long)
    assert short == 4 or isinstance(short, BucketMiss)  # or its blocks came to lie behind


def test_a_shape_that_is_cold_is_refused_on_a_device_that_compiles(
    lazy_gaudi: object, tiny_model: Path
) -> None:
    small = {"max_model_len": 48, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 13}
    environ = {"VLLM_DECODE_BLOCK_BUCKET_MAX": "3"}
    few = {
        "VLLM_PROMPT_QUERY_BUCKET_MIN": "16",
        "VLLM_PROMPT_CTX_BUCKET_LIMIT": "2",
        "VLLM_PROMPT_BS_BUCKET_MAX": "1",
    }
    core = started(tiny_model, {**environ, **few}, **small, device="hpu", on_bucket_miss="refuse")
    compiled = core.executor.device.num_compilations()
    tokens, errors = serve(core, short=5, long=40)
    assert tokens["short"] == 4
    assert list(errors) == ["long"]
    assert core.executor.device.num_compilations() == compiled
    assert core.stats.num_compilations == 0


@pytest.mark.parametrize(
    ("policy", "warmup", "compiles"),
    [
        ("auto", "full", False),
        ("auto", "none", True),
        ("compile", "full", True),
        ("eager", "none", False),
    ],
)
def test_a_cold_shape_is_compiled_or_runs_eagerly_as_asked(
    tiny_model: Path, policy: str, warmup: str, compiles: bool
) -> None:
    core = EngineCore(
        EngineConfig.from_env(
            {}, model=str(tiny_model), device="cpu", **SMALL, warmup=warmup, on_bucket_miss=policy
        )
    )
    assert core.executor.worker.runner.forward_runner.compile_cold is compiles


def test_settings_that_contradict_a_refusal_are_named(tiny_model: Path) -> None:
    for changes in ({"warmup": "none"}, {"warmup": "background"}, {"use_buckets": False}):
        with pytest.raises(ConfigError, match="on_bucket_miss refuse needs a full warm-up"):
            EngineConfig(model="m", on_bucket_miss="refuse", **changes)

    class Compiling(CPUDevice):
        dynamic_shapes = False

    config = EngineConfig(model=str(tiny_model), **SMALL, on_bucket_miss="eager")
    with pytest.raises(ConfigError, match="compiles each: choose compile or refuse"):
        EngineCore(attrs.evolve(config, device=Compiling()))
