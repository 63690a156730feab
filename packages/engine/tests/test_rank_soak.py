"""Two ranks serve random requests for a while: nothing is lost, wrong, or left behind."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
import psutil
import pytest
from child_processes import children
from test_rank_faults import LIMIT_SECONDS, limited, ranks, running

from trencadis.engine import (
    EngineConfig,
    GenerateRequest,
    LogSettings,
    ModelEntry,
    MultiModelEngine,
    SamplingParams,
)

PHASES, REQUESTS, AT_ONCE = 6, 50, 12
PROBE = GenerateRequest(
    tuple(range(5, 40)), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
)
MOST_GROWTH = 32 << 20
"""Bytes that a rank may take more after the second phase; each has seen all shapes by then."""


@pytest.mark.slow
def test_random_requests_switches_and_sleep_leave_nothing_behind(
    tmp_path: Path,
    make_tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    own_processes: None,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    rng = random.Random(7)
    config = EngineConfig(
        model=str(make_tiny_model(tmp_path / "one")),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=8,
        num_blocks=60,
        num_host_blocks=40,
        kv_tiers="host:0.001",
        warmup="none",
        tensor_parallel_size=2,
    )
    second = make_tiny_model(tmp_path / "two", initializer_range=1.0)
    other = attrs.evolve(config, model=str(second))
    models = ModelEntry("one", config), ModelEntry("two", other)

    async def body() -> None:
        log = LogSettings(level=logging.CRITICAL)
        async with running(MultiModelEngine.start(models, log=log)) as engine:
            assert isinstance(engine, MultiModelEngine)
            expected: dict[str, list[int]] = {}
            sizes: list[list[tuple[int, int]]] = []
            for phase in range(PHASES):
                gate = asyncio.Semaphore(AT_ONCE)
                requests = [
                    serve(engine, gate, random.Random(rng.random())) for _ in range(REQUESTS)
                ]
                counts = await asyncio.wait_for(asyncio.gather(*requests), LIMIT_SECONDS)
                assert sum(counts) > 0
                probe = [
                    token async for delta in engine.generate(PROBE) for token in delta.token_ids
                ]
                assert probe == expected.setdefault(engine.active, probe)
                stats = engine.stats
                assert (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0)
                if phase % 2:
                    await engine.sleep(1 + phase % 4 // 2)
                    await engine.wake_up()
                await engine.switch_model("two" if engine.active == "one" else "one")
                sizes.append([(each.num_fds(), each.memory_info().rss) for each in ranks()])
            assert expected["one"] != expected["two"]
            assert engine.stats.num_core_restarts == 0
            for early, late in zip(sizes[1], sizes[-1], strict=True):
                assert late[0] <= early[0]
                assert late[1] - early[1] < MOST_GROWTH

    limited(body)
    assert not list(tmp_path.glob("trencadis-ranks-*"))
    assert not [each for each in children() if each.status() != psutil.STATUS_ZOMBIE]


async def serve(engine: MultiModelEngine, gate: asyncio.Semaphore, rng: random.Random) -> int:
    """Serve a random request, or abort it after some tokens; returns how many tokens there were."""
    shared = tuple(range(50, 50 + 8 * rng.randrange(4)))
    prompt = (*shared, *(rng.randrange(250) for _ in range(rng.randint(1, 40))))
    count = rng.randint(1, 3)
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.8]) if count == 1 else 0.8,
        seed=rng.choice([None, rng.randrange(100)]),
        n=count,
        max_tokens=rng.randint(1, 24),
        ignore_eos=True,
        logprobs=rng.choice([None, None, 2]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        top_k=rng.choice([0, 5]),
    )
    most = rng.randint(0, 10) if rng.random() < 0.25 else params.max_tokens * count
    async with gate:
        found = 0
        stream = engine.generate(GenerateRequest(prompt, params))
        async for delta in stream:
            found += len(delta.token_ids)
            if found > most:
                await stream.aclose()  # which aborts it
                break
        else:
            assert found == params.max_tokens * count
        return found
