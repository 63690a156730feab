"""Graphs that are captured while requests are served, on the stand-in for a Gaudi in lazy mode."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from model_families import save_family

from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
SMALL = {
    "dtype": "float32",
    "device": "hpu",
    "max_model_len": 48,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "num_blocks": 13,
}


def started(model: Path, environ: dict[str, str], **changes: object) -> EngineCore:
    core = EngineCore(EngineConfig.from_env(environ, model=str(model), **{**SMALL, **changes}))
    core.warm_up()
    return core


def serve(core: EngineCore, *prompts: range) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        core.add(str(i), GenerateRequest(tuple(prompt), GREEDY))
    while core.has_work:
        for token in core.step():
            tokens.setdefault(token.key, []).append(token.token_id)
    return tokens


PROMPTS = (range(3), range(10, 30), range(10, 34))


def test_without_warm_up_the_buckets_that_traffic_uses_become_graphs(
    lazy_gaudi: object, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = serve(started(tiny_model, {}, device="cpu"), *PROMPTS)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        core = started(tiny_model, {"VLLM_SKIP_WARMUP": "true"})
        runner = core.executor.worker.runner
        assert runner.forward_runner.num_graphs == 0
        assert serve(core, *PROMPTS) == expected
        assert serve(core, *PROMPTS) == expected
    assert runner.forward_runner.num_graphs > 0
    assert "Graphs are captured while requests are served. Using " in caplog.text
    assert re.search(r"\[Warmup\]\[Graph/Prompt\]\[1/\d+\]", caplog.text)
    assert re.search(r"\[Warmup\]\[Graph/Decode\]\[1/\d+\]", caplog.text)
    graphs, cold = runner.forward_runner.num_graphs, core.stats.num_cold_forwards
    compiled = core.stats.num_compilations
    assert serve(core, *PROMPTS) == expected, "from the graphs"
    assert (runner.forward_runner.num_graphs, core.stats.num_cold_forwards) == (graphs, cold)
    assert core.stats.num_compilations == compiled


def test_the_core_says_that_it_is_busy_before_it_captures(
    lazy_gaudi: object, tiny_model: Path
) -> None:
    """A capture may take longer than a step may: a watchdog would end the core."""
    core = started(tiny_model, {"VLLM_SKIP_WARMUP": "true"})
    counts: list[int] = []
    for _ in range(2):
        core.add("0", GenerateRequest(tuple(PROMPTS[2]), GREEDY))
        while core.has_work:
            before, said = core.stats.num_graphs, []
            core.on_busy = lambda reason, _: said.append((core.stats.num_graphs, reason))  # noqa: B023
            core.step()
            if (num_captured := core.stats.num_graphs - before) > 0:
                assert said[0][0] == before
                assert said[0][1].startswith("the engine core compiles ")
                counts.append(num_captured)
    assert sum(counts) == core.stats.num_graphs > 2


@pytest.mark.parametrize("family", ["Mistral v0.1", "gpt-oss"])
def test_graphs_of_layers_with_windows_give_their_tokens(
    lazy_gaudi: object, tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_family(family, tmp_path)
    expected = serve(started(model, {}, device="cpu"), *PROMPTS)
    core = started(model, {"VLLM_SKIP_WARMUP": "true"})
    for _ in range(3):
        assert serve(core, *PROMPTS) == expected
    assert core.stats.num_graphs > 2
    assert "Capturing a graph failed" not in caplog.text


def test_in_the_background_every_bucket_becomes_a_graph(
    lazy_gaudi: object, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        core = started(tiny_model, {}, warmup="background")
        first = core.stats.num_graphs
        assert first > 0, "the buckets that are warmed up before the first request"
        tokens = serve(core, *PROMPTS)
        for _ in range(200):
            core.advance_warm_up()
        assert not core.executor.is_warming_up
    full = started(tiny_model, {})
    assert core.stats.num_graphs == full.executor.worker.runner.forward_runner.num_graphs > first
    assert re.search(r"Graph/Decode captured:\d+ \(100.0%\)", caplog.text)
    cold = core.stats.num_cold_forwards
    assert serve(core, *PROMPTS) == tokens == serve(full, *PROMPTS)
    assert core.stats.num_cold_forwards == cold


@pytest.mark.parametrize("warmup", ["none", "background"])
def test_the_budget_of_graphs_holds_while_requests_are_served(
    lazy_gaudi: object, tiny_model: Path, warmup: str
) -> None:
    # A share of the free memory that a few of the graphs fill.
    core = started(tiny_model, {"VLLM_GRAPH_RESERVED_MEM": "3e-6"}, warmup=warmup)
    core.executor.device.synchronize()
    budget = core.executor.worker._memory.graphs + 2 * core.executor.worker.block_bytes
    for _ in range(2):
        serve(core, *PROMPTS)
        for _ in range(200):
            core.advance_warm_up()
    graphs = core.executor.worker.runner.forward_runner._graphs
    before = core.executor.device.free_memory()
    num_graphs = len(graphs)
    for graph in graphs.values():
        graph.release()
    assert 0 < num_graphs < 2 * core.stats.num_buckets
    assert core.executor.device.free_memory() - before <= budget


def test_no_graphs_where_eager_execution_is_enforced_or_nothing_is_reserved(
    lazy_gaudi: object, tiny_model: Path
) -> None:
    core = started(tiny_model, {"VLLM_SKIP_WARMUP": "1", "VLLM_GRAPH_RESERVED_MEM": "0"})
    serve(core, *PROMPTS)
    serve(core, *PROMPTS)
    assert core.stats.num_graphs == 0


def test_a_capture_that_fails_is_the_last_and_requests_are_served(
    lazy_gaudi: object,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = started(tiny_model, {"VLLM_SKIP_WARMUP": "true"})

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(core.executor.device, "capture", fail)
    expected = serve(started(tiny_model, {}, device="cpu"), *PROMPTS)
    for _ in range(2):
        assert serve(core, *PROMPTS) == expected
    assert caplog.text.count("Capturing a graph failed; no more graphs are captured") == 1


def test_a_rank_passes_on_the_error_of_a_capture(
    lazy_gaudi: object, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait for the collective calls of the graph: the executor ends all of them."""
    expected = serve(started(tiny_model, {}, device="cpu"), PROMPTS[0])
    core = started(tiny_model, {"VLLM_SKIP_WARMUP": "true"})

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(core.executor.device, "capture", fail)
    monkeypatch.setattr(core.executor.worker.runner, "_divides_failed_batches", False)
    assert serve(core, PROMPTS[0]) == {}, "its second step captures a graph before it has a token"
    assert "capturing a graph failed: no memory" in str(core.take_failures())
    assert serve(core, PROMPTS[0]) == expected, "once: no more graphs are captured"
