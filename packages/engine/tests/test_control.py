"""Orders through the front while requests run, and a core that has nothing to do but wait."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import attrs
import pytest
from child_processes import core_process
from slowed_device import SLOW_FILE

from trencadis.engine import (
    AsyncEngine,
    BatchControl,
    EngineConfig,
    EngineDead,
    EngineOverloaded,
    GenerateRequest,
    InvalidRequest,
    LogSettings,
    SamplingParams,
)
from trencadis.engine.core.engine_core import STALLED_SECONDS
from trencadis.engine.front import async_engine

LIMIT_SECONDS = 600.0
PARAMS = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=100, ignore_eos=True)

POLICY = """
from trencadis.scheduler.thermal import NoThermalPolicy

class Broken(NoThermalPolicy):
    def get_max_running_seqs(self, scheduler):
        raise RuntimeError("broken on purpose")
"""


@asynccontextmanager
async def running(model: Path, **changes: object) -> AsyncIterator[AsyncEngine]:
    settings = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "num_blocks": 120,
        "num_host_blocks": 120,
        "warmup": "none",
        **changes,
    }
    config = EngineConfig(model=str(model), **settings)
    engine = await AsyncEngine.start(config, LogSettings(level=logging.CRITICAL))
    try:
        yield engine
    finally:
        await engine.stop()


def limited(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), LIMIT_SECONDS))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(LIMIT_SECONDS / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


async def generate(engine: AsyncEngine, name: str) -> list[list[int]]:
    tokens: list[list[int]] = [[], [], []]
    async for delta in engine.generate(GenerateRequest([1, 2, 3], PARAMS, request_id=name)):
        tokens[delta.index].extend(delta.token_ids)
    return tokens


@contextmanager
def slow_steps() -> Iterator[None]:
    """Requests run meanwhile: they would end before the test has seen them."""
    file = Path(os.environ[SLOW_FILE])
    file.touch()
    try:
        yield
    finally:
        file.unlink()


@pytest.mark.slow
@pytest.mark.skipif("TRENCADIS_TEST_DEVICE" in os.environ, reason="the core runs on a slowed CPU")
def test_a_core_under_orders_and_in_heat(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_policy.py").write_text(POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(SLOW_FILE, str(tmp_path / "slow"))
    recording = tmp_path / "day.csv"
    recording.write_text("time_s,device,temperature_c,power_w\n0,0,71,300\n900,0,71,300\n")

    async def body() -> None:
        heat = {
            "temperature_source": f"recorded:{recording}",
            "thermal_policy": "broken_policy:Broken",
            "device": "slowed_device:SlowedCPU",
        }
        async with running(tiny_model, **heat) as engine:
            await heat_is_known_before_anything_is_served(engine)
            await a_broken_policy_is_known_and_requests_are_served(engine)
            await orders_are_carried_out_while_requests_run(engine)
            await requests_are_swapped_by_their_ids(engine)
            await orders_that_cannot_be_obeyed_are_refused(engine)
            await an_order_is_not_waited_for_without_end(engine, monkeypatch)
            await a_core_that_only_waits_does_not_spin(engine)
        with pytest.raises(EngineDead):
            await engine.control(BatchControl())

    limited(body)


async def heat_is_known_before_anything_is_served(engine: AsyncEngine) -> None:
    await until(lambda: engine.stats.thermal is not None)
    assert engine.stats.thermal is not None
    assert engine.stats.thermal.hottest_c == 71.0
    assert engine.stats.thermal.policy_active
    assert engine.stats.num_steps == 0


async def a_broken_policy_is_known_and_requests_are_served(engine: AsyncEngine) -> None:
    assert len((await generate(engine, "first"))[0]) == 100
    await until(lambda: not engine.stats.thermal.policy_active)
    thermal = engine.stats.thermal
    assert thermal is not None
    assert (thermal.policy, thermal.policy_active) == ("broken_policy:Broken", False)
    assert "broken on purpose" in thermal.fault


async def orders_are_carried_out_while_requests_run(engine: AsyncEngine) -> None:
    nothing = await engine.control(BatchControl())
    assert (nothing.previous_running, nothing.evicted_request_ids) == (0, ())
    calm = await generate(engine, "calm")
    with slow_steps():
        task = asyncio.create_task(generate(engine, "mine"))
        await until(lambda: engine.stats.num_running_seqs == 3)
        dry = await engine.control(BatchControl(force_evict=1, dry_run=True))
        assert (dry.previous_running, dry.new_running) == (3, 0)
        assert dry.evicted_request_ids == ("mine",)
        assert dry.estimated_watts_saved > 0
        assert engine.stats.num_preemptions == 0
        done = await engine.control(BatchControl(force_evict=1, max_num_seqs=4))
        assert done == attrs.evolve(dry, new_max_num_seqs=4)
    assert await task == calm
    await until(lambda: engine.stats.num_preemptions >= 1)
    assert engine.stats.max_running_seqs == 4
    before = engine.stats.max_prefill_tokens
    assert (await engine.control(BatchControl(max_prefill_tokens=2))).new_max_prefill_tokens == 2
    assert await generate(engine, "slow") == calm
    await until(lambda: engine.stats.max_prefill_tokens == 2)
    ended = await engine.control(BatchControl(max_prefill_tokens=before))
    assert ended.new_max_prefill_tokens == before > 2


async def requests_are_swapped_by_their_ids(engine: AsyncEngine) -> None:
    before = engine.stats.num_preemptions
    with slow_steps():
        task = asyncio.create_task(generate(engine, "mine"))
        await until(lambda: engine.stats.num_running_seqs == 3)
        assert await engine.abort_and_swap(["mine", "other"]) == ("mine",)
        await engine.control(BatchControl(max_num_seqs=4))
    assert len((await task)[0]) == 100
    await until(lambda: engine.stats.num_preemptions > before)
    assert await engine.abort_and_swap(["mine"]) == ()
    with pytest.raises(InvalidRequest, match="needs a list of request ids"):
        await engine.abort_and_swap("mine")


async def orders_that_cannot_be_obeyed_are_refused(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequest, match="max_num_seqs 9 is above 8") as caught:
        await engine.control(BatchControl(max_num_seqs=9))
    assert caught.value.field == "max_num_seqs"
    with pytest.raises(InvalidRequest, match="give force_evict, or leave hold_s out") as caught:
        await engine.control(BatchControl(hold_s=5))
    assert caught.value.field == "hold_s"


async def an_order_is_not_waited_for_without_end(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_process()
    core.suspend()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(async_engine, "_ORDER_SECONDS", 0.2)
            with pytest.raises(EngineOverloaded, match="will be when the step under way ends"):
                await engine.control(BatchControl(max_num_seqs=5))
    finally:
        core.resume()
    assert (await engine.control(BatchControl())).new_max_num_seqs == 5


async def a_core_that_only_waits_does_not_spin(engine: AsyncEngine) -> None:
    with slow_steps():
        task = asyncio.create_task(generate(engine, "mine"))
        await until(lambda: engine.stats.num_running_seqs == 3)
        began = time.monotonic()
        await engine.control(BatchControl(force_evict=3, hold_s=600))
    before = engine.stats.num_steps
    await asyncio.sleep(0.5)
    await until(lambda: engine.stats.num_swapped_reqs == 1)
    steps = engine.stats.num_steps - before
    assert steps <= (time.monotonic() - began) / STALLED_SECONDS + 2
    assert (await engine.control(BatchControl(dry_run=True))).new_running == 0, "orders wake it"
    task.cancel()
