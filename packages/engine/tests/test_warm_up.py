"""Shapes are made ready before traffic, behind it, or by it; the tokens are the same each time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    PhiConfig,
    PreTrainedConfig,
    SmolLM3Config,
)

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import (
    LLM,
    ConfigError,
    EngineConfig,
    EngineCore,
    ModelError,
    SamplingParams,
)
from trencadis.engine.devices import CPUDevice

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FEW_BUCKETS = BucketingConfig(
    prompt_batch=AxisConfig(min=1, step=1, max=1),
    prompt_query=AxisConfig(min=32, step=32, max=32),
    prompt_context=AxisConfig(min=16, step=16, max=16),
    decode_batch=AxisConfig(min=4, step=4, max=4),
    decode_blocks=AxisConfig(min=60, step=60, max=60),
)
COMMON = tuple(range(40, 80))


def config(model: Path, **changes: object) -> EngineConfig:
    settings = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "num_blocks": 60,
        "bucketing": FEW_BUCKETS,
        **changes,
    }
    return EngineConfig(model=str(model), **settings)


def on_cpu(model: Path, cache: Path, **changes: object) -> EngineConfig:
    """Compiled, and counted, as the CPU does it."""
    return config(model, device="cpu", compile=True, compile_cache=str(cache), **changes)


def prompts() -> list[tuple[int, ...]]:
    """Short ones, ones that take several chunks, and some that share most of their blocks."""
    rng = np.random.default_rng(3)
    lengths = (1, 5, 31, 32, 33, 70, 90)
    alone = [tuple(rng.integers(0, 256, length).tolist()) for length in lengths]
    return [*alone, *((*COMMON, i) for i in range(4))]


def serve(core: EngineCore) -> dict[str, list[int]]:
    """The tokens of every prompt, the sharing ones once their common blocks are in the cache."""
    tokens: dict[str, list[int]] = {}
    core.add("first", COMMON, GREEDY)
    drain(core, tokens)
    for i, prompt in enumerate(prompts()):
        core.add(str(i), prompt, GREEDY)
    drain(core, tokens)
    return tokens


def drain(core: EngineCore, tokens: dict[str, list[int]]) -> None:
    while core.has_work:
        for token in core.step():
            tokens.setdefault(token.key, []).append(token.token_id)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[int]]:
    core = EngineCore(config(tiny_model, use_buckets=False))
    core.warm_up()
    return serve(core)


@pytest.fixture(scope="module")
def compiled(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineCore, Path]]:
    """A core with everything compiled into an empty cache, and that cache."""
    if (missing := CPUDevice().compiler_missing()) is not None:
        pytest.skip(f"needs {missing}")
    cache = tmp_path_factory.mktemp("compiled")
    core = EngineCore(on_cpu(tiny_model, cache))
    core.warm_up()
    yield core, cache


@pytest.mark.slow
def test_after_a_full_warm_up_nothing_is_compiled(
    compiled: tuple[EngineCore, Path], expected: dict[str, list[int]]
) -> None:
    core, _ = compiled
    ready = core.device.num_compilations()
    assert ready == 2, "32 tokens of a prompt; 4 of a decode, with and without shared blocks"
    assert serve(core) == expected
    assert core.device.num_compilations() == ready
    stats = core.stats
    assert (stats.num_compilations, stats.num_cold_forwards, stats.num_bucket_misses) == (0, 0, 0)
    assert stats.num_ready_buckets == stats.num_buckets == 2


@pytest.mark.slow
def test_shapes_of_as_many_tokens_share_a_program(
    tiny_model: Path, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    """32 tokens with no, little and much context; 4 sequences with few and with many blocks."""
    buckets = BucketingConfig(
        prompt_batch=AxisConfig(min=1, step=1, max=2),
        prompt_query=AxisConfig(min=16, step=16, max=32),
        prompt_context=AxisConfig(min=0, step=4, max=16),
        decode_batch=AxisConfig(min=4, step=4, max=4),
        decode_blocks=AxisConfig(min=20, step=20, max=60),
    )
    core = EngineCore(on_cpu(tiny_model, tmp_path / "empty", bucketing=buckets))
    core.warm_up()
    assert core.stats.num_ready_buckets > 12
    assert core.device.num_compilations() == len({16, 32, 4})
    assert serve(core) == expected
    assert core.stats.num_compilations == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", [GPTNeoXConfig, PhiConfig])
def test_attention_whose_result_is_a_view_is_compiled_right(
    tmp_path: Path, family: type[PreTrainedConfig], add_tokenizer: Callable[[Path], None]
) -> None:
    """These models join rotated and other parts of a query: its memory is by head."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    settings = {"num_attention_heads": 4, "vocab_size": 258, "initializer_range": 0.6, **sizes}
    AutoModelForCausalLM.from_config(family(**settings)).save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    found = []
    for changes in ({"compile": False}, {"compile": True, "compile_cache": str(tmp_path / "c")}):
        core = EngineCore(config(tmp_path / "model", device="cpu", **changes))
        core.warm_up()
        found.append(serve(core))
    assert found[0] == found[1]


def test_layers_with_different_settings_are_not_compiled_as_one(
    tmp_path: Path, add_tokenizer: Callable[[Path], None]
) -> None:
    """Every second layer of this model has no rotary embedding."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 258}
    family = SmolLM3Config(no_rope_layer_interval=2, pad_token_id=0, **sizes, **heads)
    AutoModelForCausalLM.from_config(family).save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="decoder layer 1 differs from layer 0"):
        EngineCore(config(tmp_path, device="cpu", compile=True))


@pytest.mark.slow
def test_a_second_start_finds_all_but_the_damaged_programs(
    tiny_model: Path, compiled: tuple[EngineCore, Path], expected: dict[str, list[int]]
) -> None:
    _, cache = compiled
    settings = on_cpu(tiny_model, cache)
    for damaged in (0, 1):
        for archive in sorted(cache.glob("*.zip"))[:damaged]:
            archive.write_bytes(archive.read_bytes()[:-100])
        core = EngineCore(settings)
        core.warm_up()
        assert core.device.num_compilations() == damaged
        assert serve(core) == expected


@pytest.mark.slow
def test_without_warm_up_live_traffic_compiles_and_says_so(
    tiny_model: Path,
    tmp_path: Path,
    expected: dict[str, list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = on_cpu(tiny_model, tmp_path / "empty", warmup="none")
    core = EngineCore(settings)
    core.warm_up()
    assert serve(core) == expected
    assert core.stats.num_cold_forwards == 2
    assert caplog.text.count("was not warmed up") == 2


def test_without_a_compiler_the_layers_run_as_they_are(
    tiny_model: Path, expected: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    class Bare(CPUDevice):
        def compiler_missing(self) -> str:
            return "a C++ compiler"

    core = EngineCore(config(tiny_model, compile=True), Bare())
    core.warm_up()
    assert serve(core) == expected
    assert "without --compile, which needs a C++ compiler" in caplog.text


def test_shapes_become_ready_behind_traffic(
    tiny_model: Path, expected: dict[str, list[int]]
) -> None:
    core = EngineCore(config(tiny_model, warmup="background", bucketing=None))
    core.warm_up()
    first = core.stats
    assert 2 <= first.num_ready_buckets < first.num_buckets
    assert serve(core) == expected
    deadline = time.monotonic() + 60
    while core.is_warming_up and time.monotonic() < deadline:
        core.advance_warm_up()
    assert core.stats.num_ready_buckets == first.num_buckets
    assert serve(core) == expected


@pytest.mark.slow
def test_requests_are_served_while_a_shape_is_being_compiled(
    tiny_model: Path, compiled: tuple[EngineCore, Path], expected: dict[str, list[int]]
) -> None:
    _, cache = compiled
    buckets = attrs.evolve(FEW_BUCKETS, prompt_query=AxisConfig(min=16, step=16, max=32))
    core = EngineCore(on_cpu(tiny_model, cache, warmup="background", bucketing=buckets))
    core.warm_up()
    assert core.is_warming_up
    core.advance_warm_up()
    before = core.stats.num_ready_buckets
    assert serve(core) == expected
    assert before < core.stats.num_buckets
    deadline = time.monotonic() + 120
    while core.is_warming_up and time.monotonic() < deadline:
        core.advance_warm_up()
        time.sleep(0.05)
    assert core.stats.num_ready_buckets == core.stats.num_buckets
    assert serve(core) == expected
    assert core.stats.num_compilations == 0


def test_traffic_holds_background_warm_up_up(tiny_model: Path) -> None:
    core = EngineCore(config(tiny_model, warmup="background", bucketing=None))
    core.warm_up()
    ready = core.stats.num_ready_buckets
    core.add("a", COMMON, attrs.evolve(GREEDY, max_tokens=20))
    while core.has_work:
        core.advance_warm_up()
        core.step()
    assert core.stats.num_ready_buckets == ready


def test_a_warm_up_that_is_told_to_stop_does(tiny_model: Path) -> None:
    core = EngineCore(config(tiny_model, bucketing=None))
    asked = iter([False] * 4)
    report = core.warm_up(stop=lambda: next(asked, True))
    assert report is not None
    assert not report.complete
    assert len(report.executed) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup": "later"}, "warmup must be one of full, background, none, got 'later'"),
        ({"compile": True, "use_buckets": False}, "compile needs buckets"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **changes)


def test_a_cache_that_cannot_be_made_is_named(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = str(tmp_path / "file" / "cache")
    with pytest.raises(ConfigError, match=r"compile_cache .*file/cache cannot be used"):
        LLM(str(tiny_model), device="cpu", compile=True, compile_cache=cache)
