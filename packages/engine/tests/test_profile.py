"""The profiling run: the memory that the largest forward passes take is none of the cache's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from trencadis.engine import ConfigError, EngineConfig, EngineCore
from trencadis.engine.devices import CPUDevice, CUDADevice
from trencadis.engine.devices.cpu.attention import CPUAttention
from trencadis.engine.runner import shapes
from trencadis.engine.runner.grids import largest_prompts
from trencadis.engine.runner.shapes import PromptShape
from trencadis.engine.runner.worker import Worker
from trencadis.warmup import Phase

MIB = 1 << 20


def gaudi(model: Path, environ: dict[str, str] | None = None, **changes: object) -> EngineCore:
    settings = {
        "device": "hpu",
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        **changes,
    }
    return EngineCore(EngineConfig.from_env(environ or {}, model=str(model), **settings))


def test_the_largest_prompts_have_the_most_tokens_context_and_scores() -> None:
    tokens, context, scores = PromptShape(8, 32, 0), PromptShape(1, 1, 100), PromptShape(1, 128, 8)
    shapes = (PromptShape(1, 1, 0), scores, context, tokens, PromptShape(2, 64, 2))
    assert largest_prompts(shapes, 16) == [tokens, context, scores]


@pytest.mark.parametrize(
    "environ",
    [{}, {"VLLM_CONTIGUOUS_PA": "false", "VLLM_PROMPT_BS_BUCKET_MAX": "2"}],
    ids=["default", "lists of blocks"],
)
def test_no_forward_pass_of_a_warm_up_takes_more_than_the_profiling_run(
    lazy_gaudi: Any, tiny_model: Path, environ: dict[str, str]
) -> None:
    check_warm_up(lazy_gaudi, gaudi(tiny_model, environ))


def test_the_profiling_run_computes_adapters(lazy_gaudi: Any, tiny_model: Path) -> None:
    adapters = {"enable_lora": True, "max_loras": 8, "max_lora_rank": 64}
    check_warm_up(lazy_gaudi, gaudi(tiny_model, **adapters))


def check_warm_up(lazy_gaudi: Any, core: EngineCore) -> None:
    grids = core.executor.worker.grids
    buckets = {Phase.PROMPT: grids.prompt.buckets, Phase.DECODE: grids.decode.buckets}
    profiled = profiled_peak(core, lazy_gaudi)
    largest = largest_peak(core, buckets)
    assert largest <= 1.1 * profiled
    assert profiled <= 3 * largest, "and the cache does not lose much more"


def profiled_peak(core: EngineCore, bridge: Any) -> int:
    """Bytes of the largest forward pass of the profiling run."""
    worker = core.executor.worker
    core.executor.device.synchronize()
    without_run = bridge.memory.in_use - worker.limits.num_blocks * worker.block_bytes
    return bridge.memory.limit - worker._memory.free_after_profile - without_run


def largest_peak(core: EngineCore, buckets: dict[Phase, Any]) -> int:
    """Bytes of the largest forward pass of these buckets."""
    execute, peak = core.executor.worker.runner.execute, core.executor.device.peak_memory
    return max(
        peak(functools.partial(execute, phase, bucket))
        for phase, of_phase in buckets.items()
        for bucket in of_phase
    )


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("block_size", [8, 32], ids=["all can be shared", "a part can"])
def test_shared_blocks_that_many_sequences_score_are_profiled(
    stand_in: Any, mode: str, block_size: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of the first blocks for every sequence are more than the few blocks of the cache."""
    monkeypatch.setattr(shapes, "SHARED_TOKENS", 3200)
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": 256, "compile": False}
    with stand_in(mode) as bridge:
        core = gaudi(tiny_model, num_blocks=400, block_size=block_size, **settings)
        worker = core.executor.worker
        profiled = profiled_peak(core, bridge)
        largest = largest_peak(core, {Phase.DECODE: [worker.grids.decode.buckets[-1]]})
        (_, *with_shared) = worker.runner.buckets.shapes(
            Phase.DECODE, worker.grids.decode.buckets[-1]
        )
        assert {shape.shared for shape in with_shared} == {3200 // block_size}
        assert largest <= 1.1 * profiled
        assert profiled <= 2 * largest


def test_a_long_context_makes_the_cache_smaller(lazy_gaudi: Any, tiny_model: Path) -> None:
    def left(max_model_len: int) -> int:
        core = gaudi(tiny_model, max_model_len=max_model_len)
        return core.executor.worker._memory.free_after_profile

    assert left(256) < left(32)


def test_graphs_take_no_more_than_the_plan_reserves(lazy_gaudi: Any, tiny_model: Path) -> None:
    """The cache needs a thousandth of what is planned for it; the rest is not for graphs."""
    core = gaudi(tiny_model, {"VLLM_GRAPH_RESERVED_MEM": "1e-5"}, max_model_len=48, max_num_seqs=2)
    core.executor.device.synchronize()
    reserved = core.executor.worker._memory.graphs + 2 * core.executor.worker.block_bytes
    before = core.executor.device.free_memory()
    core.warm_up()
    core.executor.device.synchronize()
    num_graphs = core.stats.num_graphs
    assert before - core.executor.device.free_memory() <= reserved
    generous = gaudi(tiny_model, max_model_len=48, max_num_seqs=2)
    generous.warm_up()
    assert 0 < num_graphs < generous.stats.num_graphs, "some do not fit"


def test_the_peak_of_a_run_on_the_cpu_is_that_of_its_process() -> None:
    device = CPUDevice(num_threads=1)
    assert device.peak_memory(lambda: torch.ones(192 * MIB, dtype=torch.uint8)) > 160 * MIB
    taken = device.peak_memory(lambda: torch.ones(64 * MIB, dtype=torch.uint8))
    assert 32 * MIB < taken < 128 * MIB, "of this run, although nothing of it is left"


def on_cpu(model: Path, device: CPUDevice, **changes: object) -> EngineCore:
    settings = {
        "device": device,
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 2,
        "block_size": 8,
        **changes,
    }
    return EngineCore(EngineConfig(model=str(model), **settings))


def test_plain_weights_are_not_counted_as_taken_by_a_forward_pass(tmp_path: Path) -> None:
    """They are mapped files, of which a page is resident once it is read."""
    torch.manual_seed(0)
    family = LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2
    )
    AutoModelForCausalLM.from_config(family).save_pretrained(tmp_path)
    device = CPUDevice(num_threads=1)
    worker = Worker(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"), device)
    worker.load()
    assert worker.weight_bytes > 64 * MIB
    taken = device.peak_memory(lambda: [weights.sum() for weights in worker._model.parameters()])
    assert taken < 16 * MIB


def test_a_cache_that_is_too_small_is_refused_before_a_long_profiling_run(tiny_model: Path) -> None:
    class Impatient(CPUDevice):
        def peak_memory(self, run: Callable[[], object]) -> int:
            raise AssertionError(f"{run} would take minutes with a long context")

    with pytest.raises(ConfigError, match="or raise kv_cache_memory"):
        on_cpu(tiny_model, Impatient(), kv_cache_memory=1000)


@pytest.mark.parametrize("left", [1000, 30_000], ids=["no block", "few blocks"])
def test_a_batch_that_takes_all_memory_is_named(tiny_model: Path, left: int) -> None:
    class Full(CPUDevice):
        def free_memory(self) -> int:
            return 1 << 30

        def peak_memory(self, run: Callable[[], object]) -> int:
            del run
            return self.free_memory() - left

    with pytest.raises(ConfigError, match="the largest batch leaves") as refused:
        on_cpu(tiny_model, Full())
    assert "lower max_num_batched_tokens" in str(refused.value)
    assert "lower max_model_len" in str(refused.value) or "or max_model_len" in str(refused.value)


def test_a_profiling_run_on_the_cpu_computes_one_of_equal_layers(
    make_tiny_model: Any, tmp_path: Path
) -> None:
    """With a context of 131,072 tokens, a chunk takes minutes in all layers."""
    layers: list[int] = []

    class Noting(CPUAttention):
        def attend(self, query: Any, key: Any, value: Any, layer: int, *rest: Any) -> torch.Tensor:
            layers.append(layer)
            return super().attend(query, key, value, layer, *rest)

    class Noted(CPUDevice):
        def optimize(self, model: torch.nn.Module) -> None:
            self.attention = Noting()

    core = on_cpu(make_tiny_model(tmp_path, num_hidden_layers=3), Noted())
    assert set(layers) == {0}
    core.warm_up()
    assert set(layers) == {0, 1, 2}


def test_the_peak_on_a_gpu_is_that_of_its_tensors_and_what_libraries_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch keeps the memory of freed tensors, and `free_memory` counts it as free."""
    state = {"allocated": 100, "peak": 100, "free": 1000}
    answers = {
        "synchronize": lambda *_: None,
        "reset_peak_memory_stats": lambda *_: state.update(peak=state["allocated"]),
        "memory_allocated": lambda *_: state["allocated"],
        "max_memory_allocated": lambda *_: state["peak"],
        "memory_reserved": lambda *_: state["allocated"],
        "mem_get_info": lambda *_: (state["free"], 2000),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    device = CUDADevice.__new__(CUDADevice)  # there is no GPU to select
    device.torch_device = torch.device("cuda", 0)

    def run() -> None:
        """400 bytes of tensors, of which 50 are left, and a library's 30."""
        state.update(allocated=150, peak=500, free=1000 - 50 - 30)

    assert device.peak_memory(run) == 400 + 30
