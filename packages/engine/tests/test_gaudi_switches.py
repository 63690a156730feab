"""Models that differ in every dimension, switched under load on the stand-in for a Gaudi.

Its memory is accounted: a switch and a sleep give back all that they say, and nothing grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from switch_load import SwitchLoad, running
from trained_model import PROMPTS, save_trained_model

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import (
    EngineConfig,
    ModelEntry,
    SamplingParams,
)

LIMIT_SECONDS = 1800
TEXTS = sorted(PROMPTS, key=len)[:3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def new_load() -> SwitchLoad:
    return SwitchLoad(TEXTS, GREEDY, max_prompt_tokens=40)


def grid(**sizes: int) -> BucketingConfig:
    """One bucket for each phase: a batch has the same shape in any company, also in bf16."""
    return BucketingConfig(
        **{axis: AxisConfig(min=size, step=size, max=size) for axis, size in sizes.items()}
    )


@pytest.fixture
def entries(tiny_model: Path, tmp_path: Path) -> tuple[ModelEntry, ModelEntry]:
    same = {"device": "hpu", "warmup": "full", "swap_space": 0.0}
    small = EngineConfig(
        model=str(tiny_model),
        dtype="float32",
        block_size=8,
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_blocks=60,
        bucketing=grid(
            prompt_batch=4, prompt_query=64, prompt_context=12, decode_batch=4, decode_blocks=60
        ),
        **same,
    )
    trained = EngineConfig(
        model=str(save_trained_model(tmp_path / "trained")),
        dtype="bfloat16",
        block_size=16,
        max_model_len=128,
        max_num_seqs=3,
        max_num_batched_tokens=96,
        num_blocks=40,
        bucketing=grid(
            prompt_batch=3, prompt_query=96, prompt_context=8, decode_batch=3, decode_blocks=40
        ),
        **same,
    )
    return ModelEntry("small", small), ModelEntry("trained", trained)


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        pytest.param("lazy", "bfloat16", marks=pytest.mark.soak),
        pytest.param("lazy", "float32", marks=pytest.mark.slow),
        pytest.param("eager", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_switches_under_load_change_no_token_and_no_byte_on_a_gaudi(
    stand_in_for_cores: Callable[..., Any],
    entries: tuple[ModelEntry, ModelEntry],
    mode: str,
    dtype: str,
) -> None:
    """In bf16 requests end before their model leaves: a parked one is recomputed in other sums."""
    with stand_in_for_cores(mode):
        asyncio.run(asyncio.wait_for(switch_under_load(entries, dtype, 6), LIMIT_SECONDS))


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_many_switches_under_load_change_no_token_and_no_byte_on_a_gaudi(
    stand_in_for_cores: Callable[..., Any], entries: tuple[ModelEntry, ModelEntry], mode: str
) -> None:
    with stand_in_for_cores(mode):
        asyncio.run(asyncio.wait_for(switch_under_load(entries, "float32", 50), 3000))


async def switch_under_load(
    entries: tuple[ModelEntry, ModelEntry], dtype: str, num_switches: int
) -> None:
    small, trained = entries
    trained = attrs.evolve(trained, config=attrs.evolve(trained.config, dtype=dtype))
    load = new_load()
    alone = {}
    async with running(trained) as engine:
        alone["trained"] = await load.alone(engine)
    async with running(small, trained) as engine:
        alone["small"] = await load.alone(engine)
        load.start(engine, alone)
        in_use: dict[str, set[int]] = {alias: set() for alias in alone}
        num_parked = 0
        for _ in range(num_switches):
            target = "trained" if engine.active == "small" else "small"
            parks = dtype == "float32" or target == "trained"
            ways = {"running": "park", "drain_timeout_s": 0} if parks else {"running": "wait"}
            report = await engine.switch_model(target, **ways)
            in_use[target].add(report.memory_after_bytes)
            num_parked += report.parked
            before = dict(load.answered)
            while load.answered == before:  # noqa: ASYNC110 - a count is not an event
                await asyncio.sleep(0.02)
        await load.end(engine)
        assert num_parked >= num_switches // 2
        assert all(len(sizes) == 1 for sizes in in_use.values()), in_use


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("lazy", marks=pytest.mark.soak),
        pytest.param("eager", marks=pytest.mark.slow),
    ],
)
def test_a_gaudi_that_sleeps_gives_back_what_it_says_and_wakes_up_with_as_much(
    stand_in_for_cores: Callable[..., Any], entries: tuple[ModelEntry, ModelEntry], mode: str
) -> None:
    async def body() -> None:
        async with running(*entries) as engine:
            load = new_load()
            alone = await load.alone(engine)
            await engine.switch_model("trained")
            in_use = (await engine.switch_model("small")).memory_after_bytes
            for level in (1, 2):
                freed = await engine.sleep(level)
                assert freed > 0.9 * in_use
                await engine.wake_up()
                assert await load.alone(engine) == alone
                freed = await engine.sleep(level)
                report = await engine.switch_model("trained")
                assert report.memory_before_bytes == in_use - freed
                report = await engine.switch_model("small")
                assert report.memory_after_bytes == in_use
                assert await load.alone(engine) == alone

    with stand_in_for_cores(mode):
        asyncio.run(asyncio.wait_for(body(), LIMIT_SECONDS))
