"""Shapes are made ready before traffic, behind it, or by it; the tokens are the same each time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import fx, nn
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    Olmo3Config,
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
    GenerateRequest,
    ModelError,
    SamplingParams,
)
from trencadis.engine.devices import CPUDevice
from trencadis.engine.devices.hpu.attention import RowAttention
from trencadis.engine.models import decoder_layers
from trencadis.engine.models.decoder_layers import DecoderLayers
from trencadis.engine.runner.forward_runner import ForwardOutput, ForwardRunner
from trencadis.engine.runner.model_input import ModelInput

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


def test_the_sampler_is_warmed_up_on_logits_of_the_models_own_head(tiny_model: Path) -> None:
    core = EngineCore(config(tiny_model, warmup="full"))
    rows: list[int] = []

    def record(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        (hidden,) = inputs
        if hidden.dim() == 2 and (not len(hidden) or hidden.abs().max() > 0):
            rows.append(len(hidden))

    core.executor.worker._model.get_output_embeddings().register_forward_pre_hook(record)
    core.warm_up()
    core.close()
    assert {0, 1, 4} <= set(rows), "dummy hidden states of each batch size"


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
    core.add("first", GenerateRequest(COMMON, GREEDY))
    drain(core, tokens)
    for i, prompt in enumerate(prompts()):
        core.add(str(i), GenerateRequest(prompt, GREEDY))
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
    ready = core.executor.device.num_compilations()
    assert ready == 1, "32 tokens of a prompt, and 4 of a decode"
    assert serve(core) == expected
    assert core.executor.device.num_compilations() == ready
    stats = core.stats
    assert (stats.num_compilations, stats.num_cold_forwards, stats.num_bucket_misses) == (0, 0, 0)
    assert stats.num_ready_buckets == stats.num_buckets == 2


@pytest.mark.slow
@pytest.mark.parametrize("layers_depend_on_tokens", [False, True])
def test_shapes_share_programs(
    tiny_model: Path,
    tmp_path: Path,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    layers_depend_on_tokens: bool,
) -> None:
    """Prompts with no, little and much context; 1 and 4 sequences with few and many blocks.

    Those of all numbers of tokens but 1 share one, or if layers depend on it, those of each number.
    """
    if layers_depend_on_tokens:
        monkeypatch.setattr(DecoderLayers, "trace_for_any_tokens", lambda *_: None)
    buckets = BucketingConfig(
        prompt_batch=AxisConfig(min=1, step=1, max=2),
        prompt_query=AxisConfig(min=16, step=16, max=32),
        prompt_context=AxisConfig(min=0, step=4, max=16),
        decode_batch=AxisConfig(min=1, step=4, max=4),
        decode_blocks=AxisConfig(min=20, step=20, max=60),
    )
    core = EngineCore(on_cpu(tiny_model, tmp_path / "empty", bucketing=buckets))
    core.warm_up()
    assert core.stats.num_ready_buckets > 12
    programs = {16, 32, 4, 1} if layers_depend_on_tokens else {"any number", 1}
    assert core.executor.device.num_compilations() == len(programs)
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


class Tracing(CPUDevice):
    """Compiles nothing: the program of a layer is what was traced of it."""

    def compiler_missing(self) -> None:
        return None

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._programs.compiled += 1
        return module


def smollm3(directory: Path, add_tokenizer: Callable[[Path], None], num_layers: int) -> Path:
    """A model of which every second layer has no rotary embedding."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 258}
    family = SmolLM3Config(
        no_rope_layer_interval=2, pad_token_id=0, initializer_range=0.6, **sizes, **heads
    )
    AutoModelForCausalLM.from_config(family).save_pretrained(directory)
    add_tokenizer(directory)
    return directory


@pytest.mark.parametrize(
    "device", [pytest.param(CPUDevice, marks=pytest.mark.slow), Tracing], ids=["compiled", "traced"]
)
def test_layers_of_two_kinds_have_a_program_each(
    tmp_path: Path, add_tokenizer: Callable[[Path], None], device: type[CPUDevice]
) -> None:
    model = smollm3(tmp_path / "model", add_tokenizer, num_layers=4)
    plain = EngineCore(config(model, device="cpu", compile=False))
    plain.warm_up()
    core = EngineCore(attrs.evolve(on_cpu(model, tmp_path / "cache"), device=device()))
    core.warm_up()
    assert core.executor.device.num_compilations() == 2, "for any number of tokens"
    assert serve(core) == serve(plain)
    assert core.stats.num_compilations == 0


@pytest.mark.slow
def test_a_gaudi_compiles_layers_of_two_kinds(
    eager_gaudi: object, tmp_path: Path, add_tokenizer: Callable[[Path], None]
) -> None:
    model = smollm3(tmp_path, add_tokenizer, num_layers=3)
    plain = EngineCore(config(model, device="cpu", compile=False))
    plain.warm_up()
    core = EngineCore(config(model, device="hpu", compile=True))
    core.warm_up()
    assert serve(core) == serve(plain)
    assert core.stats.num_compilations == 0


class TracingForward(Tracing):
    """Its programs are whole forward passes, as a Gaudi's."""

    compiles_forward = True

    def optimize(self, model: nn.Module) -> None:
        del model
        self.attention = RowAttention()


def test_layers_with_rotary_embeddings_of_their_own_are_compiled_with_theirs(
    tmp_path: Path, add_tokenizer: Callable[[Path], None]
) -> None:
    """Layers that all rotate as the first one does would give other tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 258}
    rotary = {
        kind: {"rope_type": "default", "rope_theta": theta}
        for kind, theta in (("full_attention", 1e4), ("sliding_attention", 10.0))
    }
    family = Olmo3Config(
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters=rotary,
        sliding_window=None,
        pad_token_id=0,
        **sizes,
        **heads,
    )
    AutoModelForCausalLM.from_config(family).save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    plain = EngineCore(config(tmp_path / "model", device="cpu", compile=False))
    core = EngineCore(
        attrs.evolve(on_cpu(tmp_path / "model", tmp_path / "cache"), device=TracingForward())
    )
    core.warm_up()
    assert serve(core) == serve(plain)


def test_layers_of_many_kinds_are_not_compiled(
    tmp_path: Path, add_tokenizer: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = smollm3(tmp_path, add_tokenizer, num_layers=2)
    monkeypatch.setattr(decoder_layers, "MAX_KINDS", 1)
    with pytest.raises(ModelError, match="the decoder layers are of 2 kinds, and 1 at most"):
        EngineCore(config(model, compile=True, device=Tracing()))


def test_warm_up_runs_each_program_once(
    tiny_model: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All buckets are ready with the two programs: of one token, and of any other number."""
    ran = []
    run = ForwardRunner._run

    def noted(runner: ForwardRunner, batch: ModelInput) -> ForwardOutput:
        ran.append(batch.shape.num_tokens)
        return run(runner, batch)

    core = EngineCore(config(tiny_model, compile=True, bucketing=None, device=Tracing()))
    monkeypatch.setattr(ForwardRunner, "_run", noted)
    core.warm_up()
    assert sorted(min(tokens, 2) for tokens in ran[:-1]) == [1, 2], "before the probe"
    assert core.stats.num_ready_buckets == core.stats.num_buckets > 2
    assert serve(core) == expected
    assert (core.stats.num_compilations, core.stats.num_cold_forwards) == (0, 0)


@pytest.mark.parametrize("who", ["the trace", "the compiler"])
def test_a_program_that_holds_for_some_sizes_is_not_shared(
    tiny_model: Path, expected: dict[str, list[int]], who: str
) -> None:
    """A guard on the number of tokens, of either, gives each number its own program."""
    sizes = []

    class Guarding(CPUDevice):
        def compiler_missing(self) -> None:
            return None

        def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            sizes.append(inputs[0].shape[1])
            if isinstance(sizes[-1], torch.SymInt):
                assert bool(sizes[-1] > 3)  # sets a guard
            return module

    core = EngineCore(config(tiny_model, compile=True, device=Guarding()))
    if who == "the trace":
        layers = core.executor.worker.runner.forward_runner._layers
        layer = layers._example

        def guarded(recording: object, kind: int) -> Callable[..., torch.Tensor]:
            run = layer(recording, kind)
            return lambda *given: run(*given) if given[0].shape[1] > 3 else given[0]

        layers._example = guarded
    core.warm_up()
    assert [size for size in sizes if not isinstance(size, torch.SymInt)] == [32, 4]
    assert len(sizes) == (2 if who == "the trace" else 3)
    assert serve(core) == expected


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
        assert core.executor.device.num_compilations() == damaged
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
    assert core.stats.num_cold_forwards == 1
    assert caplog.text.count("was not warmed up") == 1


def test_a_device_that_compiles_each_shape_runs_those_of_its_buckets(tiny_model: Path) -> None:
    """Programs that are shared do not help where the rest of a forward pass is compiled, too."""

    class Compiling(CPUDevice):
        dynamic_shapes = False

        def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return module

    core = EngineCore(config(tiny_model, compile=True, bucketing=None, device=Compiling()))
    forward_runner, sizes = core.executor.worker.runner.forward_runner, set()
    run = forward_runner._run

    def recording(batch: Any) -> Any:
        sizes.add(batch.shape.num_tokens)
        return run(batch)

    forward_runner._run = recording
    core.warm_up()
    warmed_up = set(sizes)
    serve(core)
    assert sizes == warmed_up


def test_a_miss_is_compiled_once_where_each_shape_must_be(
    tiny_model: Path, expected: dict[str, list[int]]
) -> None:
    """As on a Gaudi in eager mode: programs of three parts of a forward pass, for each shape."""

    class Compiling(TracingForward):
        dynamic_shapes = False

    few = attrs.evolve(FEW_BUCKETS, decode_blocks=AxisConfig(min=4, step=4, max=4))
    core = EngineCore(config(tiny_model, compile=True, bucketing=few, device=Compiling()))
    core.warm_up()
    seen = []
    for _ in range(2):
        tokens: dict[str, list[int]] = {}
        core.add("first", GenerateRequest(COMMON, GREEDY))
        drain(core, tokens)
        assert tokens["first"] == expected["first"]
        seen.append(core.stats)
    first, again = seen
    assert again.num_bucket_misses > first.num_bucket_misses > first.num_cold_forwards > 0
    assert first.num_compilations == 3 * first.num_cold_forwards
    assert again.num_cold_forwards == first.num_cold_forwards
    assert again.num_compilations == first.num_compilations


def test_without_a_compiler_the_layers_run_as_they_are(
    tiny_model: Path, expected: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    class Bare(CPUDevice):
        def compiler_missing(self) -> str:
            return "a C++ compiler"

    core = EngineCore(config(tiny_model, compile=True, device=Bare()))
    core.warm_up()
    assert serve(core) == expected
    assert "without --compile, which needs a C++ compiler" in caplog.text


def test_shapes_become_ready_behind_traffic(
    tiny_model: Path, expected: dict[str, list[int]]
) -> None:
    ended: list[int] = []

    class Noting(CPUDevice):
        def end_warm_up(self) -> None:
            ended.append(core.stats.num_ready_buckets)

    core = EngineCore(config(tiny_model, warmup="background", bucketing=None, device=Noting()))
    core.warm_up()
    first = core.stats
    assert 2 <= first.num_ready_buckets < first.num_buckets
    assert first.is_warming_up
    assert serve(core) == expected
    deadline = time.monotonic() + 60
    while core.executor.is_warming_up and time.monotonic() < deadline:
        core.advance_warm_up()
    core.executor.worker.background.wait()
    assert core.stats.num_ready_buckets == first.num_buckets
    assert not core.stats.is_warming_up
    assert ended == [first.num_buckets], "not before, and once"
    assert serve(core) == expected


@pytest.mark.slow
def test_requests_are_served_while_a_bucket_is_being_prepared(
    tiny_model: Path,
    compiled: tuple[EngineCore, Path],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, cache = compiled
    # Otherwise the first program makes all buckets ready.
    monkeypatch.setattr(DecoderLayers, "trace_for_any_tokens", lambda *_: None)
    buckets = attrs.evolve(FEW_BUCKETS, prompt_query=AxisConfig(min=16, step=16, max=32))
    core = EngineCore(on_cpu(tiny_model, cache, warmup="background", bucketing=buckets))
    core.warm_up()
    prepare, may_prepare = ForwardRunner.prepare, threading.Event()

    def held(runner: ForwardRunner, batch: ModelInput) -> None:
        assert may_prepare.wait(300)
        prepare(runner, batch)

    monkeypatch.setattr(ForwardRunner, "prepare", held)
    assert core.executor.is_warming_up
    core.advance_warm_up()
    try:
        assert serve(core) == expected
        assert core.stats.num_ready_buckets < core.stats.num_buckets
    finally:
        may_prepare.set()
    deadline = time.monotonic() + 120
    while core.executor.is_warming_up and time.monotonic() < deadline:
        core.advance_warm_up()
        time.sleep(0.05)
    assert core.stats.num_ready_buckets == core.stats.num_buckets
    assert serve(core) == expected
    assert core.stats.num_compilations == 0


def test_traffic_holds_background_warm_up_up(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(config(tiny_model, warmup="background", bucketing=None))
    core.warm_up()
    executed: list[object] = []
    monkeypatch.setattr(
        core.executor.worker.runner, "execute", lambda *bucket: executed.append(bucket)
    )
    core.add("a", GenerateRequest(COMMON, attrs.evolve(GREEDY, max_tokens=20)))
    while core.has_work:
        core.advance_warm_up()
        core.step()
    assert not executed
    assert core.executor.is_warming_up
    core.advance_warm_up()
    core.executor.worker.background.wait()
    assert executed, "it is idle"


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
