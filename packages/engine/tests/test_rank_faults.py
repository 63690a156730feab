"""A rank that is killed, stopped or raises, in a step, in the warm-up, in each step of a switch.

Whatever happens: callers get a typed error, parked requests go on, no process is left, and no rank
waits for ever for another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import psutil
import pytest
import signalling_ranks
from child_processes import children

from trencadis.engine import (
    AsyncEngine,
    EngineConfig,
    EngineError,
    EngineRestarting,
    GenerateRequest,
    LogSettings,
    ModelEntry,
    MultiModelEngine,
    SamplingParams,
    SwitchFailedError,
)
from trencadis.engine.front import core_supervisor

pytestmark = pytest.mark.slow

QUIET = LogSettings(level=logging.CRITICAL)
PROMPT = tuple(range(5, 25))
LONG, SHORT = 120, 6
LIMIT_SECONDS = 300.0
"""Longest recovery, on a busy machine."""

FAULTS = [signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1]
NAMES = ["killed", "stopped", "raises"]


@pytest.fixture
def signal_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_processes: None) -> Path:
    signalling_ranks.plant(tmp_path)
    file = tmp_path / "signal"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv(signalling_ranks.SIGNAL_FILE, str(file))
    monkeypatch.setattr(core_supervisor, "run_core", signalling_ranks.run_core)
    monkeypatch.setattr(core_supervisor, "_MAX_BACKOFF_SECONDS", 0.01)
    return file


@pytest.fixture
def config(tiny_model: Path) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        block_size=8,
        num_blocks=400,
        warmup="none",
        tensor_parallel_size=2,
        engine_restarts=1000,
        hang_timeout=8.0,
        hang_restart_timeout=10.0,
    )


@pytest.fixture
def models(
    config: EngineConfig, tmp_path: Path, make_tiny_model: Callable[..., Path]
) -> tuple[ModelEntry, ModelEntry]:
    other = make_tiny_model(tmp_path / "other", num_hidden_layers=3)
    second = attrs.evolve(config, model=str(other), block_size=16)
    return ModelEntry("first", config), ModelEntry("second", second)


def tell(file: Path, step: str, number: signal.Signals, rank: int) -> None:
    """Let the core send a signal to a rank before a step of the next switch or warm-up."""
    file.write_text(f"{step} {int(number)} {rank}")


def disagree(file: Path, what: str, rank: psutil.Process) -> None:
    """Let a rank compute something else than the core has sent, from its next step on."""
    file.write_text(what)
    rank.send_signal(signal.SIGUSR2)


def was_followed(file: Path) -> bool:
    return not file.exists()


def limited(body: Callable[[], Awaitable[None]], seconds: float = 3000.0) -> None:
    asyncio.run(asyncio.wait_for(body(), seconds))
    assert not children(), "no process is left"


@asynccontextmanager
async def running(start: Awaitable[AsyncEngine]) -> AsyncIterator[AsyncEngine]:
    engine = await start
    try:
        yield engine
    finally:
        await asyncio.wait_for(engine.stop(), LIMIT_SECONDS)


async def collect(engine: AsyncEngine, count: int = SHORT) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    tokens: list[int] = []
    async for delta in engine.generate(GenerateRequest(PROMPT, params)):
        tokens += delta.token_ids
    return tokens


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def ranks() -> list[psutil.Process]:
    """The processes of the ranks, in their order, which is that of their start."""
    found = [each for each in children() if "rank_process" in " ".join(each.cmdline())]
    return sorted(found, key=lambda each: each.pid)


STEPS = ("deserialise", "pause", "sleep", "unload", "load", "cache", "rebuild", "resume")


@pytest.mark.parametrize("number", FAULTS, ids=NAMES)
def test_a_rank_that_fails_in_any_step_of_a_switch_is_recovered_from(
    models: tuple[ModelEntry, ModelEntry], signal_file: Path, number: signal.Signals
) -> None:
    """All ranks serve the previous model again, and a parked request goes on."""

    async def body() -> None:
        async with running(MultiModelEngine.start(models, log=QUIET)) as engine:
            undisturbed = await collect(engine, LONG)
            for turn, step in enumerate(STEPS):
                before = ranks()
                parked = asyncio.create_task(collect(engine, LONG))
                await until(lambda: engine.stats.num_running_reqs)
                tell(signal_file, step, number, turn % 2)
                switching = engine.switch_model("second", running="park", drain_timeout_s=0)
                with pytest.raises(SwitchFailedError) as caught:
                    await asyncio.wait_for(switching, LIMIT_SECONDS)
                assert was_followed(signal_file), step
                assert (caught.value.step, caught.value.active) == ("core", "first")
                assert engine.active == "first"
                assert await asyncio.wait_for(parked, LIMIT_SECONDS) == undisturbed
                assert await collect(engine) == undisturbed[:SHORT]
                assert not any(each.is_running() for each in before)
                assert len(ranks()) == 2
            assert (await engine.switch_model("second")).active == "second"
            assert await collect(engine) != undisturbed[:SHORT]

    limited(body)


@pytest.mark.parametrize("number", FAULTS, ids=NAMES)
def test_a_rank_that_fails_in_the_warm_up_is_recovered_from(
    config: EngineConfig, signal_file: Path, number: signal.Signals
) -> None:
    """A first start fails, as that of a core that dies; a restart is tried again."""

    async def body() -> None:
        tell(signal_file, "warm-up", number, 1)
        warm = attrs.evolve(config, warmup="full")
        with pytest.raises(EngineError, match=r"rank [01]"):
            await asyncio.wait_for(AsyncEngine.start(warm, QUIET), LIMIT_SECONDS)
        assert was_followed(signal_file)
        assert not children()
        async with running(AsyncEngine.start(warm, QUIET)) as engine:
            expected = await collect(engine)
            tell(signal_file, "warm-up", number, 0)
            ranks()[1].kill()
            await until(lambda: not engine.is_alive)
            await until(lambda: engine.is_alive)
            assert was_followed(signal_file), "the restart failed once, too"
            assert await collect(engine) == expected
            assert engine.stats.num_core_restarts == 2

    limited(body)


def test_a_rank_that_computes_something_else_is_recovered_from(
    config: EngineConfig, signal_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It samples another token, or executes another plan, or a step of another number."""

    async def body() -> None:
        async with running(AsyncEngine.start(config, LogSettings(level=logging.ERROR))) as engine:
            expected = await collect(engine, LONG)
            for turn, what in enumerate(("token", "plan", "number")):
                before = ranks()
                # A second request, so that there is more than one sequence in a step.
                requests = [asyncio.create_task(collect(engine, LONG)) for _ in range(2)]
                await until(lambda: engine.stats.num_running_reqs)
                disagree(signal_file, what, before[1])
                for request in requests:
                    with pytest.raises(EngineRestarting, match="this request is lost"):
                        await asyncio.wait_for(request, LIMIT_SECONDS)
                await until(lambda: engine.is_alive)
                assert "rank 1 has other results of step" in capfd.readouterr().err, what
                assert not any(each.is_running() for each in before)
                assert len(ranks()) == 2
                assert await collect(engine, LONG) == expected
                assert engine.stats.num_core_restarts == 1 + turn

    limited(body)


def test_ranks_that_fail_at_random_moments_are_recovered_from(
    config: EngineConfig, signal_file: Path
) -> None:
    """20 rounds. A request gets all its tokens, or is told that it is lost."""
    rng = random.Random(5)

    async def body() -> None:
        async with running(AsyncEngine.start(config, QUIET)) as engine:
            expected = await collect(engine, LONG)
            lost = 0
            for turn in range(20):
                before = ranks()
                requests = [asyncio.create_task(collect(engine, LONG)) for _ in range(4)]
                await asyncio.sleep(rng.uniform(0.0, 0.4))
                before[turn % 2].send_signal(FAULTS[turn % 3])
                for outcome in await asyncio.gather(*requests, return_exceptions=True):
                    lost += isinstance(outcome, EngineRestarting)
                    assert isinstance(outcome, EngineRestarting) or outcome == expected
                while (await outcome_of(engine)) != expected[:SHORT]:
                    await until(lambda: engine.is_alive)
                assert not any(each.is_running() for each in before), turn
                assert len(ranks()) == 2
            assert lost

    limited(body)


async def outcome_of(engine: AsyncEngine) -> list[int] | None:
    """The tokens of a request; None where it is lost."""
    try:
        return await asyncio.wait_for(collect(engine), LIMIT_SECONDS)
    except EngineRestarting:
        return None
