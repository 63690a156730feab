"""What an administrator sees of the core: the map of KV blocks, state and hits of buckets."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from child_processes import core_process
from hypothesis import given
from hypothesis import strategies as st

from trencadis.bucketing import BucketGrid
from trencadis.engine import (
    AsyncEngine,
    EngineConfig,
    EngineCore,
    EngineInspection,
    EngineRestarting,
    GenerateRequest,
    GridUsage,
    LogSettings,
    RequestFailed,
    SamplingParams,
)
from trencadis.engine.api.inspection import MAX_GRID_SIZES
from trencadis.engine.core.adapter_loads import AdapterLoads
from trencadis.engine.core.core_process import _handle
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.ipc.messages import Inspect, Inspected
from trencadis.engine.runner.bucket_usage import BucketUsage
from trencadis.engine.runner.grids import Grids
from trencadis.engine.runner.shapes import DecodeRead
from trencadis.warmup import Phase, WarmupConfig

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
SMALL = {
    "dtype": "float32",
    "max_model_len": 48,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "num_blocks": 13,
}


def config(model: Path, **changes: object) -> EngineConfig:
    return EngineConfig(model=str(model), **{**SMALL, **changes})


def serve(core: EngineCore, *prompts: range) -> None:
    for i, prompt in enumerate(prompts):
        core.add(str(i), GenerateRequest(tuple(prompt), GREEDY))
    while core.has_work:
        core.step()


def cell(usage: GridUsage, row: int, column: int) -> int:
    """The cell of the smallest row and column that hold these sizes."""
    i = next(i for i, size in enumerate(usage.rows) if size >= row)
    j = next(j for j, size in enumerate(usage.columns) if size >= column)
    return i * len(usage.columns) + j


def test_buckets_are_cold_warm_and_captured_and_count_their_forward_passes(
    lazy_gaudi: object, tiny_model: Path
) -> None:
    core = EngineCore(config(tiny_model, device="hpu", warmup="none"))
    core.warm_up()
    runner, grids = core.executor.worker.runner, core.executor.worker.grids
    prefill, decode = core.inspect().grids
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert prefill.is_padded and decode.is_padded
    assert sum(prefill.num_buckets) == len(grids.prompt)
    assert sum(decode.num_buckets) == len(grids.decode)
    for nothing in (decode.num_warm, decode.num_captured, decode.num_hits):
        assert not any(nothing)

    warm, captured = grids.decode.buckets[:2]
    runner.execute(Phase.DECODE, warm)
    runner.capture(Phase.DECODE, captured)
    decode = core.inspect().grids[1]
    expected = sorted(cell(decode, *bucket.shape) for bucket in (warm, captured))
    shown = [i for i, num_warm in enumerate(decode.num_warm) for _ in range(num_warm)]
    assert shown == expected
    assert [i for i, num in enumerate(decode.num_captured) if num] == [
        cell(decode, *captured.shape)
    ]
    runner.capture(Phase.DECODE, warm)
    runner.release(Phase.DECODE, captured)
    assert [i for i, num in enumerate(core.inspect().grids[1].num_captured) if num] == [
        cell(decode, *warm.shape)
    ]
    runner.forward_runner.release_all()  # as when the device memory is released
    assert sum(core.inspect().grids[1].num_captured) == 1, "a graph holds no weights"
    runner.forward_runner.release_graphs()
    assert not any(core.inspect().grids[1].num_captured)

    serve(core, range(3))
    prefill, decode = core.inspect().grids
    assert sum(prefill.num_hits) == 1
    assert prefill.num_hits[cell(prefill, 1, 3)] == 1
    assert sum(decode.num_hits) == 4  # the prefill gives the first of five tokens
    assert core.stats.num_bucket_misses == 0


def test_a_hit_counts_for_the_bucket_that_ran_not_for_the_cold_one_it_stands_in_for(
    lazy_gaudi: object, tiny_model: Path
) -> None:
    core = EngineCore(config(tiny_model, device="hpu", warmup="none"))
    core.warm_up()
    runner, grid = core.executor.worker.runner, core.executor.worker.grids.decode
    misses: list[object] = []
    runner.buckets.prefer_ready(lambda _, bucket: misses.append(bucket))
    cold, warm = next(
        (small, large)
        for small, large in itertools.permutations(grid.buckets, 2)
        if small.shape[1:] == large.shape[1:] and 2 * small.shape[0] == large.shape[0]
    )
    runner.execute(Phase.DECODE, warm)
    assert runner.buckets.find(Phase.DECODE, cold.shape) == warm.shape
    assert misses == [cold]
    usage = core.inspect().grids[1]
    assert [i for i, hits in enumerate(usage.num_hits) if hits] == [cell(usage, *warm.shape)]


def test_a_bucket_that_traffic_has_compiled_is_warm_until_its_programs_are_released(
    lazy_gaudi: object, tiny_model: Path
) -> None:
    core = EngineCore(config(tiny_model, device="hpu", warmup="none"))
    core.warm_up()
    switcher = ModelSwitcher(core)

    def num_ready() -> int:
        prefill, decode = core.inspect().grids
        assert sum(prefill.num_warm) + sum(decode.num_warm) == core.stats.num_ready_buckets
        return core.stats.num_ready_buckets

    assert num_ready() == 0
    for takes_tensors, level in ((False, 1), (True, 1), (True, 2)):
        core.executor.device.graphs_take_tensors = takes_tensors
        serve(core, range(20))
        assert num_ready() == 3, "16 tokens, some with a context, and a decode of one sequence"
        switcher.sleep(level)
        kept = 3 if takes_tensors and level == 1 else 0
        assert num_ready() == kept, "graphs that hold no weights are kept, if the weights are"
        if level == 1:
            switcher.wake_up()
            assert num_ready() == kept
    core.close()


def test_a_bucket_of_two_shapes_is_warm_when_both_have_run(
    lazy_gaudi: object, tiny_model: Path
) -> None:
    """A decode of several sequences runs with shared blocks or without."""
    no_graphs = WarmupConfig(graph_reserved_mem=0.0)
    core = EngineCore(config(tiny_model, device="hpu", warmup="none", graphs=no_graphs))
    core.warm_up()
    serve(core, range(3), range(4, 7))
    decode = core.inspect().grids[1]
    (used,) = (i for i, hits in enumerate(decode.num_hits) if hits)
    assert used == cell(decode, 2, 3)
    assert not any(decode.num_warm)
    bucket = next(
        b for b in core.executor.worker.grids.decode.buckets if cell(decode, *b.shape) == used
    )
    core.executor.worker.runner.execute(Phase.DECODE, bucket)
    assert [i for i, num in enumerate(core.inspect().grids[1].num_warm) if num] == [used]
    core.close()


def test_a_device_without_padding_shows_the_sizes_that_occurred(tiny_model: Path) -> None:
    core = EngineCore(config(tiny_model, device="cpu", warmup="none"))
    core.warm_up()
    serve(core, range(3), range(7))
    prefill, decode = core.inspect().grids
    assert not prefill.is_padded
    assert not decode.is_padded
    assert prefill.num_hits[cell(prefill, 2, 10)] == 1
    assert (prefill.rows, prefill.columns) == ((2,), (16,))
    assert sum(decode.num_hits) == 4
    assert not any(decode.num_warm)


def test_the_map_shows_the_blocks_of_requests_and_of_cached_prefixes(tiny_model: Path) -> None:
    large = EngineCore(config(tiny_model, device="cpu", warmup="none", num_blocks=514))
    large.warm_up()
    assert large.inspect().blocks.num_blocks == 513
    assert len(large.inspect().blocks.used) <= 512
    core = EngineCore(config(tiny_model, device="cpu", warmup="none"))
    core.warm_up()
    empty = core.inspect().blocks
    assert (empty.num_blocks, empty.num_used_runs, sum(empty.used)) == (12, 0, 0)
    core.add(
        "a",
        GenerateRequest(
            tuple(range(20)), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        ),
    )
    core.step()
    core.step()
    used = core.inspect().blocks
    assert sum(used.used) == core.stats.num_used_blocks == 3
    assert used.used[:4] == (1, 1, 1, 0)
    while core.has_work:
        core.step()
    cached = core.inspect().blocks
    assert not any(cached.used)
    assert sum(cached.cached) == core.blocks.pool.num_cached_blocks > 0


SIZES = st.sets(st.integers(1, 5000), min_size=1, max_size=60).map(sorted)


@given(rows=SIZES, columns=SIZES, context=st.sampled_from([(0,), (0, 4, 8)]), seed=st.randoms())
def test_a_grid_of_any_size_has_a_table_of_bounded_size_that_forgets_nothing(
    rows: list[int], columns: list[int], context: tuple[int, ...], seed: object
) -> None:
    prompt = BucketGrid({"batch": rows, "query": columns, "context_blocks": context})
    usage = BucketUsage(
        Grids(prompt, BucketGrid({"batch": (1,), "blocks": (8,)})), DecodeRead.PREFIX
    )
    ready = [(Phase.PROMPT, bucket) for bucket in prompt.buckets if seed.random() < 0.5]
    captured = ready[: len(ready) // 2]
    for _, bucket in captured:
        usage.count(Phase.PROMPT, bucket.shape)
    table, _ = usage.tables(ready, captured, is_padded=True)
    assert max(len(table.rows), len(table.columns)) <= MAX_GRID_SIZES == 24
    assert (table.rows[-1], table.columns[-1]) == (rows[-1], columns[-1])
    for counts, expected in (
        (table.num_buckets, prompt.buckets),
        (table.num_warm, ready),
        (table.num_captured, captured),
        (table.num_hits, captured),
    ):
        assert len(counts) == len(table.rows) * len(table.columns)
        assert sum(counts) == len(expected)
    for _, bucket in captured:
        assert table.num_hits[cell(table, *bucket.shape[:2])] > 0


def test_a_core_that_cannot_be_inspected_answers_with_an_error_and_lives_on(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core = EngineCore(config(tiny_model, device="cpu", warmup="none"))
    core.warm_up()
    sent: list[object] = []
    core.blocks.pool = None
    _handle(core, SimpleNamespace(send=sent.append), Inspect(7), {}, AdapterLoads())
    assert [(answer.number, answer.inspection) for answer in sent] == [(7, None)]
    assert "block_map" in sent[0].error
    assert "could not be inspected" in caplog.text


@pytest.mark.slow
def test_the_front_raises_the_error_of_an_inspection(tiny_model: Path) -> None:
    async def body() -> None:
        settings = config(tiny_model, device="cpu", warmup="none")
        engine = await AsyncEngine.start(settings, LogSettings(level=logging.CRITICAL))
        try:
            number = next(engine._numbers) + 1
            asked = asyncio.create_task(engine.inspect())
            await asyncio.sleep(0)  # it has sent its question
            await engine._handle(Inspected(number, None, "AttributeError: no pool"))
            with pytest.raises(RequestFailed, match="no pool"):
                await asked
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(body(), 600))


@pytest.mark.slow
@pytest.mark.usefixtures("own_processes")
def test_a_front_gets_the_inspection_of_its_core_and_an_error_when_the_core_dies(
    tiny_model: Path,
) -> None:
    async def body() -> None:
        settings = config(tiny_model, device="cpu", warmup="none", hang_timeout=60.0)
        engine = await AsyncEngine.start(settings, LogSettings(level=logging.CRITICAL))
        try:
            async for _ in engine.generate(GenerateRequest(range(3), GREEDY)):
                pass
            seen = await engine.inspect()
            assert isinstance(seen, EngineInspection)
            assert seen.blocks.num_blocks == 12
            assert sum(seen.grids[1].num_hits) == 4
            core = core_process()
            os.kill(core.pid, signal.SIGSTOP)
            waiting = asyncio.ensure_future(engine.inspect())
            await asyncio.sleep(0.1)
            assert not waiting.done()
            os.kill(core.pid, signal.SIGKILL)
            with pytest.raises(EngineRestarting):
                await waiting
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(body(), 600))
