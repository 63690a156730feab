"""Tensor parallelism on the CPU: the tokens of one process, and what becomes of a rank that fails.

A rank that a test needs to fail in its own code does so by a signal: ``sitecustomize.py`` in a
directory of ``PYTHONPATH`` lets SIGUSR1 raise an error in whatever the rank does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import psutil
import pytest
import torch
from child_processes import children
from hypothesis import given
from hypothesis import strategies as st
from model_families import save_family
from request_mix import GREEDY, SMALL, WAYS, serve
from safetensors.torch import load_file
from test_packed_weights import FORMATS, quantize
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig

from trencadis.engine import (
    AsyncEngine,
    ConfigError,
    EngineConfig,
    EngineCore,
    EngineRestarting,
    GenerateRequest,
    LogSettings,
    ModelError,
    RankError,
    SamplingParams,
    StructuredOutput,
    SwitchFailedError,
)
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.devices import CPUDevice
from trencadis.engine.devices.cpu import device, tiled_linear
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.devices.cpu.tiled_linear import TiledLinear, load_linear_kernel
from trencadis.engine.front import core_supervisor
from trencadis.engine.models.loader import inspect_model, load_model
from trencadis.engine.models.packed_weight import PackedWeight
from trencadis.engine.models.rank_loading import divide
from trencadis.engine.models.rank_part import RankPart
from trencadis.engine.runner.in_process import InProcessExecutor
from trencadis.engine.runner.ranks.rank_executor import RankExecutor
from trencadis.engine.runner.ranks.rank_processes import RankProcesses
from trencadis.kvcache import DefragConfig

FORMS = [
    {"max_tokens": 12, "seed": 1, "structured_output": StructuredOutput(regex="[a-c]{9}")},
    {**GREEDY, "logprobs": 2, "prompt_logprobs": 2},
]
QUIET = LogSettings(level=100)
LIMIT_SECONDS = 240.0
"""Longest test of a failure, on a busy machine."""


class OtherDevice(CPUDevice):
    """A device of another name."""

    name = "other"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch, own_processes: None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def start(own_processes: None) -> Iterator[Callable[..., EngineCore]]:
    """Starts cores, and closes them after the test: no process is left."""
    cores: list[EngineCore] = []

    def make(model: Path, size: int = 2, **changes: object) -> EngineCore:
        config = EngineConfig(model=str(model), tensor_parallel_size=size, **SMALL | changes)
        cores.append(EngineCore(config))
        cores[-1].warm_up()
        return cores[-1]

    yield make
    for core in cores:
        core.close()
    assert not children(), "no rank is left behind"


def ways() -> list[list[dict[str, Any]]]:
    has_grammars = importlib.util.find_spec("llguidance") is not None
    return [*WAYS.values(), FORMS if has_grammars else FORMS[1:]]


def assert_equal(found: Any, expected: Any) -> None:
    """The same tokens, and log-probabilities within 1e-4: sums have another order."""
    assert found.keys() == expected.keys()
    for key, tokens in expected.items():
        same = found[key]
        assert [(t.index, t.token_id) for t in same] == [(t.index, t.token_id) for t in tokens]
        for here, there in zip(same, tokens, strict=True):
            np.testing.assert_allclose(_numbers(here), _numbers(there), atol=1e-4, rtol=0)


def _numbers(token: Any) -> list[float]:
    """Log-probabilities of a token and, with the first one, the scores of the prompt."""
    chosen, scores = token.logprobs, token.prompt_logprobs
    of_token = [] if chosen is None else [e.logprob for e in (chosen.chosen, *chosen.top)]
    return [*of_token, *np.frombuffer(b"" if scores is None else scores, np.float32)]


@pytest.mark.slow
def test_two_ranks_serve_what_one_process_serves(
    tmp_path: Path, make_tiny_model: Callable[..., Path], start: Callable[..., EngineCore]
) -> None:
    """One start of the ranks for all of this, since it takes seconds.

    The token of padding is in the part of rank 1.
    """
    model = make_tiny_model(tmp_path, pad_token_id=257)
    changes = {"num_blocks": 24, "num_host_blocks": 64, "async_scheduling": True}
    alone, core = (start(model, size, **changes) for size in (1, 2))
    for params in ways():
        assert_equal(serve(core, params), serve(alone, params))
    assert core.stats.num_preemptions > 0
    for stats in (core.stats, alone.stats):  # how often depends on what both were measured to cost
        assert stats.num_swap_out_bytes > 0
        assert stats.num_swap_out_bytes % alone.facts.block_bytes == 0

    # The cache is that of one process, in two halves, and a step is one message to each rank.
    assert core.facts == _as_facts(core, alone)
    processes, steps = core.executor.processes, core.stats.num_steps
    messages = processes.num_messages
    serve(core, [GREEDY])
    assert processes.num_messages - messages == core.stats.num_steps - steps
    assert processes.num_bytes / processes.num_messages < 4096

    # Sleep and wake, another model and back, and what is not possible leaves the model as it is.
    switcher = ModelSwitcher(core)
    switcher.sleep(1)
    switcher.wake_up()
    expected = serve(alone, [GREEDY])
    assert_equal(serve(core, [GREEDY]), expected)
    first = core.config
    other = make_tiny_model(tmp_path / "other", vocab_size=321, num_key_value_heads=6)
    second = attrs.evolve(first, model=str(other), block_size=16)
    missing = attrs.evolve(second, model=str(tmp_path / "missing"))
    whole = EngineCore(attrs.evolve(second, tensor_parallel_size=1))
    whole.warm_up()
    for is_in_memory in (False, True):
        assert _switched(switcher, second).from_stash is is_in_memory
        assert_equal(serve(core, [GREEDY]), serve(whole, [GREEDY]))
        with pytest.raises(SwitchFailedError, match="there is no directory") as caught:
            _switched(switcher, missing)
        assert (caught.value.step, caught.value.active) == ("load", second.name)
        assert _switched(switcher, first).from_stash
        assert_equal(serve(core, [GREEDY]), expected)

    # A rank that ends while nothing is served is noticed, and no other is left.
    ranks = [psutil.Process(pid) for pid in processes.pids]
    ranks[1].kill()
    assert "rank 1 has ended with exit code -9: all ranks were ended" in _error_of_stats(core)
    assert not any(rank.is_running() for rank in ranks)
    with pytest.raises(RankError, match="all ranks were ended"):
        core.executor.probe()


def _switched(switcher: ModelSwitcher, config: EngineConfig, stash_bytes: int = 1 << 30) -> Any:
    return switcher.reconfigure_engine(config_payload(config), stash_bytes)


def _error_of_stats(core: EngineCore) -> str:
    """The error of an idle core's next stats, once the kernel has ended the process."""
    for _ in range(2000):
        try:
            _ = core.stats
        except RankError as error:
            return str(error)
        time.sleep(0.01)
    return ""


def _as_facts(core: EngineCore, alone: EngineCore) -> Any:
    return attrs.evolve(alone.facts, config=core.config, spec=core.spec)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("warmup", "background"),
        ("device", "test_ranks:OtherDevice"),
    ],
)
def test_what_ranks_cannot_do_yet_is_rejected_by_its_name(
    tiny_model: Path, field: str, value: object
) -> None:
    settings = {**SMALL, "tensor_parallel_size": 2, field: value}
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 does not work with") as caught:
        EngineCore(EngineConfig(model=str(tiny_model), **settings))
    assert caught.value.field == field


class Unreadable:
    """A pickle that no process can read."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


@pytest.mark.slow
def test_a_rank_that_cannot_read_a_call_ends(
    tiny_model: Path, start: Callable[..., EngineCore], capfd: pytest.CaptureFixture[str]
) -> None:
    """It would answer no later one either."""
    executor = start(tiny_model).executor
    assert isinstance(executor, RankExecutor)
    with pytest.raises(RankError, match=r"\(exit code 1\) has ended"):
        executor.processes.call("probe", Unreadable(), limit_s=LIMIT_SECONDS)
    assert "A call cannot be read" in capfd.readouterr().err


def test_one_process_alone_never_takes_the_setting(tiny_model: Path) -> None:
    config = EngineConfig(model=str(tiny_model), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="only for serving requests"):
        InProcessExecutor(config, records=False)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["Llama", "Qwen 3", "Gemma 3 (text)", "Mixtral"])
def test_families_get_the_tokens_of_one_process(
    tmp_path: Path,
    add_tokenizer: Callable[[Path], None],
    start: Callable[..., EngineCore],
    family: str,
    size: int,
) -> None:
    """48 prompts, each with another kind of request beside it in the batches.

    Four attention heads and two key-value heads: with four ranks, two have the same one.
    """
    model = save_family(family, tmp_path)
    add_tokenizer(model)
    has_groups = family.startswith("Gemma 3")  # of which decode reads no prefix
    changes = {
        **{"num_blocks": 40 if has_groups else 24, "num_host_blocks": 64},
        **{"defrag": DefragConfig(enabled=True, threshold=1)},
    }
    alone, core = (start(model, each, **changes) for each in (1, size))
    mixed = [params for way in ways() for params in way]
    assert_equal(serve(core, mixed, 48), serve(alone, mixed, 48))
    for stats in (core.stats, alone.stats):
        assert stats.num_preemptions > 0
        assert stats.num_swap_in_bytes > 0
        assert (stats.num_defragmented_blocks > 0) != has_groups


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "largest"), [("int8", 127), ("int4", 8)])
def test_each_rank_rounds_its_part_of_the_weights(
    tmp_path: Path,
    make_tiny_model: Callable[..., Path],
    start: Callable[..., EngineCore],
    monkeypatch: pytest.MonkeyPatch,
    quantization: str,
    largest: int,
) -> None:
    """Weights that rounding leaves as they are: steps of one size, the largest in each group.

    Of a rank, the layers with 4 bits have as many outputs as those that end their network.
    Without a compiler no kernel rounds the inputs of int8 layers too.
    """
    if quantization == "int8":
        monkeypatch.setenv("CXX", "no-such-compiler")
    path = make_tiny_model(tmp_path, hidden_size=192, intermediate_size=384)
    model = AutoModelForCausalLM.from_pretrained(path)
    layers = [(name, each) for name, each in model.named_modules() if type(each) is nn.Linear]
    for number, (name, layer) in enumerate(layers):
        # The others are rounded to 8 bits: both layers of the model are outer ones.
        most = largest if name.endswith(("gate_proj", "up_proj")) else 127
        random = torch.Generator().manual_seed(number)
        steps = torch.randint(1 - most, most, layer.weight.shape, generator=random)
        steps[:, ::32] = -most
        layer.weight.data = steps * 0.5 ** (most.bit_length() + 2)
    model.save_pretrained(path)
    plain, rounded = (
        start(path, dtype="bfloat16", quantization=each) for each in ("none", quantization)
    )
    ways = [{**GREEDY, "logprobs": 1}]
    assert_equal(serve(rounded, ways, 3), serve(plain, ways, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("awq", 2), ("gptq of 4 bits", 2), ("int-quantized", 4), ("fp8 by channel", 2)),
        *(("pack-quantized, 4 bits, zeros True, reorders False", 4), ("gptq of 8 bits", 4)),
    ],
)
def test_ranks_divide_packed_weights(
    tmp_path: Path,
    make_tiny_model: Callable[..., Path],
    start: Callable[..., EngineCore],
    name: str,
    size: int,
) -> None:
    """In bf16 sums of parts would round otherwise. With four ranks, two have the same KV head."""
    model = _packed(tmp_path, make_tiny_model, name)
    alone, core = (start(model, each) for each in (1, size))
    ways = [{**GREEDY, "logprobs": 1}]
    assert_equal(serve(core, ways, 3), serve(alone, ways, 3))
    assert alone.executor.worker.spec.packing is not None
    held, whole = core.executor._call("models_in_memory", limit_s=60.0), alone.config.model
    assert [models[0].model for models in held] == [whole] * size


def _packed(directory: Path, make_tiny_model: Callable[..., Path], name: str, **sizes: int) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8} | sizes
    model = make_tiny_model(directory / "plain", **sizes)
    (directory / "to").mkdir()
    return quantize(model, directory / "to", *FORMATS[name])


@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [
        ("gptq of 4 bits in another order", {}, r"inputs in any order \(desc_act\)"),
        ("awq", {"intermediate_size": 80}, "40 of 80 inputs are not groups of 16"),
        ("int-quantized", {"intermediate_size": 97}, "97 .*puts are not 2 equal parts"),
    ],
)
def test_packed_weights_that_cannot_be_divided_are_named(
    tmp_path: Path, make_tiny_model: Callable[..., Path], name: str, sizes: Any, reason: str
) -> None:
    spec = inspect_model(str(_packed(tmp_path, make_tiny_model, name, **sizes)))
    assert spec.packing is not None
    divided = divide(spec.config, spec.layers, "tiny", RankPart(0, 2))
    files = load_file(Path(spec.source) / "model.safetensors")
    layer = "model.layers.0.mlp.down_proj"
    tensors = {each.removeprefix(f"{layer}."): own for each, own in files.items() if layer in each}
    with pytest.raises(ModelError, match=f"{layer} cannot be divided between 2 ranks: .*{reason}"):
        divided.packed_part(layer, spec.packing.read(tensors), None)


@given(
    st.sampled_from([torch.int8, torch.uint8]), st.sampled_from([1, 2, 4]), st.booleans(), st.data()
)
def test_parts_of_a_packed_weight_are_those_of_what_it_means(
    dtype: torch.dtype, groups: int, has_zeros: bool, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    columns = 16 // (2 if dtype is torch.uint8 else 1)
    weight = PackedWeight(
        torch.randint(0, 127, (6, columns)).to(dtype),
        torch.rand(6, groups),
        torch.randint(0, 9, (6, groups), dtype=torch.int16) if has_zeros else None,
    )
    whole = weight.unpacked()
    first, end = sorted(data.draw(st.sets(st.integers(0, 6), min_size=2, max_size=2)))
    rows = weight.of_outputs(range(first, end))
    assert torch.equal(rows.unpacked(), whole[first:end])
    unit = 16 // groups if groups > 1 else 2
    bounds = st.integers(0, 16 // unit)
    first, end = sorted(data.draw(st.sets(bounds, min_size=2, max_size=2)))
    part = weight.of_inputs(range(first * unit, end * unit))
    assert torch.equal(part.unpacked(), whole[:, first * unit : end * unit])
    held = sum(each.untyped_storage().nbytes() for each in (part.steps, part.scales))
    assert held == part.steps.nbytes + part.scales.nbytes, "no view of the whole"


def test_a_warm_up_of_ranks_may_take_as_long_as_the_start_of_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Gaudis it compiles every bucket."""
    limits: dict[str, float] = {}

    def call(_: RankExecutor, name: str, *given: object, limit_s: float, **named: object) -> Any:
        limits[name] = limit_s
        return [None]

    monkeypatch.setattr(RankExecutor, "_call", call)
    monkeypatch.setattr(RankExecutor, "_ask_first", lambda *_: None)
    RankExecutor.__new__(RankExecutor).warm_up()
    assert limits == {"warm_up": core_supervisor._START_SECONDS}


@pytest.mark.slow
def test_what_ranks_have_counted_goes_on_after_a_sleep(
    tiny_model: Path, start: Callable[..., EngineCore]
) -> None:
    """The runner that follows a sleep of level 2 begins at 0."""
    core = start(tiny_model, use_buckets=True)
    serve(core, [GREEDY], 2)
    first = core.stats.num_padded_tokens
    switcher = ModelSwitcher(core)
    switcher.sleep(2)
    switcher.wake_up()
    assert core.stats.num_padded_tokens == first > 0
    core.blocks.reset_prefix_cache()
    serve(core, [GREEDY], 2)
    assert core.stats.num_padded_tokens == 2 * first


def test_norms_with_weights_of_each_head_are_rejected() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 8}
    for use_qk_norm, expected in ((True, "normalizes each head"), (False, "")):
        config = CohereConfig(**sizes, use_qk_norm=use_qk_norm)
        with pytest.raises(ModelError, match=expected) if expected else contextlib.nullcontext():
            divide(config, [], "tiny", RankPart(0, 2))


@pytest.mark.parametrize("agreed", [-1, 0, 1], ids=["no kernel", "pairs", "widened"])
def test_ranks_multiply_alike_what_each_computes_whole(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, agreed: int
) -> None:
    monkeypatch.setattr(tiled_linear, "_KERNELS", {})
    try:
        if agreed >= 0:
            load_linear_kernel(widens=bool(agreed))
        own = load_linear_kernel(widens=agreed != 1)
    except NoKernel as error:
        pytest.skip(str(error))
    asked: list[int] = []
    monkeypatch.setattr(device, "least_over_ranks", lambda own: asked.append(own) or agreed)
    model = load_model(inspect_model(str(tiny_model)), torch.device("cpu"), torch.bfloat16, 64)
    CPUDevice(num_ranks=2).optimize(model)
    assert asked == [own]
    has_kernel = any(isinstance(module, TiledLinear) for module in model.modules())
    assert has_kernel == (agreed >= 0)
    assert agreed < 0 or tiled_linear._KERNELS[torch.bfloat16].widens is bool(agreed)


@pytest.mark.slow
def test_a_model_that_ranks_cannot_serve_is_rejected_before_a_switch(
    tiny_model: Path, tmp_path: Path, start: Callable[..., EngineCore]
) -> None:
    core = start(tiny_model)
    switcher = ModelSwitcher(core)
    for family, size, reason in (
        ("Phi-3", 2, "its plan divides modules in ways that are not supported"),
        ("Llama", 3, "tensor_parallel_size is 3 for .* and 2 for"),
    ):
        changes = {"model": str(save_family(family, tmp_path / family))}
        other = attrs.evolve(core.config, **changes, tensor_parallel_size=size)
        with pytest.raises((ConfigError, ModelError), match=reason):
            switcher.check(config_payload(other))
    assert not core.is_asleep
    assert serve(core, [GREEDY], 1)


@pytest.mark.slow
def test_all_ranks_keep_the_weights_or_none_does(
    tmp_path: Path, make_tiny_model: Callable[..., Path], start: Callable[..., EngineCore]
) -> None:
    """An odd vocabulary: rank 0 has a row more, so a limit may be between the sizes of both."""
    models = [make_tiny_model(tmp_path / name, vocab_size=259) for name in "ab"]
    core = start(models[0])
    first, switcher = core.config, ModelSwitcher(core)
    second = attrs.evolve(first, model=str(models[1]))
    dropped, kept, row = 0, 1 << 20, 48 * 4
    while kept - dropped > 2 * row:
        of_rank = (dropped + kept) // 2
        _switched(switcher, second, 2 * of_rank)
        if _switched(switcher, first, 2 * of_rank).from_stash:
            kept = of_rank
        else:
            dropped = of_rank
    assert dropped > 0
    assert kept < 1 << 20
    assert serve(core, [GREEDY], 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "reason"),
    [("DeepSeek V3", "its plan"), ("GPT-2", "no plan"), ("Phi-3", "its plan")],
)
def test_a_model_that_cannot_be_divided_is_rejected(
    tmp_path: Path,
    start: Callable[..., EngineCore],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    reason: str,
) -> None:
    """Before processes are started, each of which takes seconds."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(RankProcesses, "_start_process", started)
    with pytest.raises(ModelError, match=f"tensor_parallel_size 2: .*{reason}"):
        start(save_family(family, tmp_path), 2)
    with pytest.raises(ModelError, match="does not divide its 4 attention heads"):
        start(save_family("Llama", tmp_path / "llama"), 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "number"),
    [(0, signal.SIGKILL), (1, signal.SIGSTOP), (1, signal.SIGUSR1)],
    ids=["rank 0 is killed", "rank 1 is stopped", "rank 1 raises"],
)
def test_a_rank_that_fails_in_a_step_is_recovered_from(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    number: signal.Signals,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import signal\n"
        "def fail(*_): raise RuntimeError('planted')\n"
        "signal.signal(signal.SIGUSR1, fail)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    settings = {**SMALL, "max_model_len": 256, "tensor_parallel_size": 2}
    config = EngineConfig(
        model=str(tiny_model), **settings, hang_timeout=20.0, hang_restart_timeout=20.0
    )

    async def body() -> None:
        engine = await AsyncEngine.start(config, QUIET)
        try:
            expected = await _tokens(engine, 8)
            ranks = _ranks()
            lost = asyncio.create_task(_tokens(engine, 200))
            await _until(lambda: engine.stats.num_running_reqs)
            ranks[rank].send_signal(number)
            with pytest.raises(EngineRestarting, match="this request is lost"):
                await lost
            await _until(lambda: engine.is_alive)
            assert await _tokens(engine, 8) == expected
            assert not any(each.is_running() for each in ranks)
        finally:
            await engine.stop()
        assert not children()

    _limited(body)


async def _tokens(engine: AsyncEngine, count: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    tokens: list[int] = []
    async for delta in engine.generate(GenerateRequest((1, 2, 3), params)):
        tokens += delta.token_ids
    return tokens


def _ranks() -> list[psutil.Process]:
    """The processes of the ranks, in their order, which is that of their start."""
    found = [each for each in children() if "rank_process" in " ".join(each.cmdline())]
    return sorted(found, key=lambda each: each.pid)


async def _until(condition: Callable[[], object]) -> None:
    for _ in range(int(LIMIT_SECONDS / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def _limited(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), LIMIT_SECONDS))
