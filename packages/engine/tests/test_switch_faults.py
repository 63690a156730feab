"""A core that dies or hangs in a switch of models, and messages that no front has sent.

Whatever happens to the core: callers get a typed error, parked requests go on or end, and no call
waits for ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import msgspec
import pytest
from child_processes import core_process

from trencadis.engine import (
    CompletionDelta,
    EngineConfig,
    EngineDead,
    EngineRestarting,
    EngineUnresponsive,
    GenerateRequest,
    LogSettings,
    ModelEntry,
    MultiModelEngine,
    SamplingParams,
    SwitchFailedError,
    SwitchInProgressError,
)
from trencadis.engine.core.config_payload import MAX_PAYLOAD_BYTES, config_payload
from trencadis.engine.front import core_supervisor
from trencadis.engine.ipc.messages import Reconfigure, Sleep

pytestmark = pytest.mark.skipif(
    "TRENCADIS_TEST_DEVICE" in os.environ, reason="the core runs on a CPU that signals itself"
)

QUIET = LogSettings(level=logging.CRITICAL)
PROMPT = list(range(5, 25))
LONG = {"temperature": 0.0, "max_tokens": 220, "ignore_eos": True}
SHORT = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
STASH_BYTES = 1 << 30
CALL_SECONDS = 300.0
"""Time in which every call of an engine without a core must end."""


@pytest.fixture(scope="module")
def models(
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    make_tiny_model: Callable[..., Path],
) -> tuple[ModelEntry, ModelEntry]:
    other = make_tiny_model(tmp_path_factory.mktemp("other"), num_hidden_layers=3)
    first = EngineConfig(
        model=str(tiny_model),
        device="signalling_device:SignallingCPU",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        block_size=8,
        num_blocks=400,
        warmup="none",
        engine_restarts=50,
        hang_timeout=60.0,
        hang_restart_timeout=60.0,
    )
    second = attrs.evolve(first, model=str(other), block_size=16)
    return ModelEntry("first", first), ModelEntry("second", second)


@pytest.fixture
def signal_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "signal"
    monkeypatch.setenv("TRENCADIS_TEST_SIGNAL_FILE", str(file))
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(core_supervisor, "_MAX_BACKOFF_SECONDS", 0.01)
    return file


def patience(number: int) -> dict[str, float]:
    """Of a front whose core is sent this signal. No step takes as long on a busy machine."""
    return {"hang_timeout": 6.0, "hang_restart_timeout": 8.0} if number == signal.SIGSTOP else {}


def tell(file: Path, step: str, number: int) -> None:
    """Let the core signal itself, or fail with 0, before a step of the next switch."""
    file.write_text(f"{step} {int(number)}")


def was_followed(file: Path) -> bool:
    return not file.exists()


@asynccontextmanager
async def running(
    models: tuple[ModelEntry, ...], **changes: object
) -> AsyncIterator[MultiModelEngine]:
    changed = [attrs.evolve(m, config=attrs.evolve(m.config, **changes)) for m in models]
    engine = await MultiModelEngine.start(changed, log=QUIET)
    try:
        yield engine
    finally:
        await asyncio.wait_for(engine.stop(), 120)


def limited(body: Callable[[], Awaitable[None]], seconds: float = 900) -> None:
    asyncio.run(asyncio.wait_for(body(), seconds))


async def collect(engine: MultiModelEngine, **params: object) -> list[int]:
    deltas = [
        delta async for delta in engine.generate(GenerateRequest(PROMPT, SamplingParams(**params)))
    ]
    return tokens(deltas)


def tokens(deltas: list[CompletionDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def begun(engine: MultiModelEngine) -> asyncio.Task[list[int]]:
    """A long request that has generated a token."""
    has_begun = asyncio.Event()

    async def read() -> list[int]:
        deltas = []
        async for delta in engine.generate(GenerateRequest(PROMPT, SamplingParams(**LONG))):
            deltas.append(delta)
            has_begun.set()
        return tokens(deltas)

    task = asyncio.create_task(read())
    await has_begun.wait()
    return task


async def switched_while_parked(
    engine: MultiModelEngine, signal_file: Path, alias: str = "second", *, stops: bool = False
) -> tuple[asyncio.Task[list[int]], BaseException | object]:
    """A parked request, and what the caller of the switch gets."""
    parked = await begun(engine)
    switching = asyncio.create_task(engine.switch_model(alias, running="park", drain_timeout_s=0))
    while not (engine.is_switching and engine._changes.is_calling) and not switching.done():  # noqa: ASYNC110
        await asyncio.sleep(0)
    with pytest.raises(SwitchInProgressError):
        await engine.sleep()
    with pytest.raises(SwitchInProgressError):
        await collect(engine, **SHORT)
    while not engine._changes.has_begun and not switching.done():  # noqa: ASYNC110
        await asyncio.sleep(0)
    signal_file.with_name("begun").touch()
    if stops:  # however long the step may take that the core has announced
        with pytest.raises(EngineUnresponsive, match="process has been stopped"):
            while not switching.done():
                await engine.check_health()
                await asyncio.sleep(0.1)
        assert engine.stats.core_silence_s > engine.config.hang_timeout
    (outcome,) = await asyncio.gather(
        asyncio.wait_for(switching, CALL_SECONDS), return_exceptions=True
    )
    return parked, outcome


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_core_that_dies_or_hangs_in_any_step_is_replaced_and_parked_requests_go_on(
    models: tuple[ModelEntry, ModelEntry], signal_file: Path, number: signal.Signals
) -> None:
    async def body() -> None:
        async with running(models, **patience(number)) as engine:
            undisturbed = await collect(engine, **LONG)
            for step in ("sleep", "load", "resume"):
                tell(signal_file, step, number)
                parked, outcome = await switched_while_parked(
                    engine, signal_file, stops=number == signal.SIGSTOP
                )
                assert was_followed(signal_file), step
                assert isinstance(outcome, SwitchFailedError), (step, outcome)
                assert (outcome.step, outcome.active) == ("core", "first")
                assert engine.active == "first"
                assert not engine.is_switching
                assert await asyncio.wait_for(parked, CALL_SECONDS) == undisturbed
                assert await collect(engine, **SHORT) == undisturbed[: SHORT["max_tokens"]]
            assert (await engine.switch_model("second")).active == "second"
            assert await collect(engine, **SHORT) != undisturbed[: SHORT["max_tokens"]]

    limited(body, 1800)


STEPS = ("deserialise", "pause", "sleep", "unload", "load", "cache", "rebuild", "resume")
"""Of seed 004, numbered from 1 there."""


@pytest.mark.slow
def test_a_fault_in_any_step_is_told_and_the_previous_model_serves_on(
    models: tuple[ModelEntry, ModelEntry], signal_file: Path
) -> None:
    async def body() -> None:
        async with running(models) as engine:
            undisturbed = await collect(engine, **LONG)
            for step in STEPS:
                tell(signal_file, step, 0)
                parked, outcome = await switched_while_parked(engine, signal_file)
                assert was_followed(signal_file), step
                assert isinstance(outcome, SwitchFailedError), (step, outcome)
                assert (outcome.step, outcome.active) == (step, "first")
                assert f"first is still active: the switch to second failed in step {step}" in str(
                    outcome
                )
                assert await asyncio.wait_for(parked, CALL_SECONDS) == undisturbed
                assert await collect(engine, **SHORT) == undisturbed[: SHORT["max_tokens"]]
            assert engine.stats.num_core_restarts == 0
            assert (await engine.switch_model("second")).active == "second"

    limited(body)


@pytest.mark.slow
def test_without_a_core_every_call_ends_and_parked_requests_too(
    models: tuple[ModelEntry, ModelEntry], signal_file: Path
) -> None:
    async def body() -> None:
        async with running(models, engine_restarts=0) as engine:
            tell(signal_file, "load", signal.SIGKILL)
            parked, outcome = await switched_while_parked(engine, signal_file)
            assert isinstance(outcome, EngineDead)
            with pytest.raises(EngineDead):
                await asyncio.wait_for(parked, CALL_SECONDS)
            second = engine.entry_of("second").config
            for call in (
                engine.sleep,
                engine.wake_up,
                lambda: engine.switch_model("second"),
                lambda: engine._changes.reconfigure(second, engine.tokenizer, STASH_BYTES),
            ):
                with pytest.raises(EngineDead):
                    await asyncio.wait_for(call(), CALL_SECONDS)

    limited(body)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_call_to_a_core_that_is_gone_ends_and_the_next_one_works(
    models: tuple[ModelEntry, ModelEntry], signal_file: Path, number: signal.Signals
) -> None:
    async def body() -> None:
        async with running(models, **patience(number)) as engine:
            second = engine.entry_of("second").config
            for call in (
                engine.sleep,
                lambda: engine._changes.reconfigure(second, engine.tokenizer, STASH_BYTES),
            ):
                core_process().send_signal(number)
                with pytest.raises(EngineRestarting):
                    await asyncio.wait_for(call(), CALL_SECONDS)
                await asyncio.wait_for(engine.wait_until_recovered(), CALL_SECONDS)
                assert not engine.is_sleeping
                assert len(await collect(engine, **SHORT)) == SHORT["max_tokens"]
            await engine.sleep()
            await engine.wake_up()
            assert len(await collect(engine, **SHORT)) == SHORT["max_tokens"]

    limited(body)


# Messages at the core's socket, which only this user can reach.


@pytest.mark.slow
def test_messages_that_no_front_has_sent_change_nothing(
    models: tuple[ModelEntry, ModelEntry], signal_file: Path
) -> None:
    """Truncated, forged, oversized and repeated ones: the model stays, and the next call works."""

    async def body() -> None:
        async with running(models) as engine:
            answer = await collect(engine, **SHORT)
            send = engine._core._core._channel._outbox.send
            whole = msgspec.msgpack.encode(
                Reconfigure(10**6, config_payload(engine.entry_of("second").config), STASH_BYTES)
            )
            for cut in (1, len(whole) // 2, len(whole) - 1):
                await send(whole[:cut])
            for payload in (
                b"\x80\x04\x95" + b"cos\nsystem\n(S'touch pwned'\ntR.",  # a pickle
                b"",
                config_payload(engine.entry_of("second").config)[:-3],
                b"\x00" * (MAX_PAYLOAD_BYTES + 1),
                msgspec.msgpack.encode({"model": "m" * (MAX_PAYLOAD_BYTES + 1)}),
            ):
                number = next(engine._numbers)
                await send(msgspec.msgpack.encode(Reconfigure(number, payload, STASH_BYTES)))
            assert await collect(engine, **SHORT) == answer
            assert (await engine.switch_model("second")).active == "second"
            assert await collect(engine, **SHORT) != answer
            await engine.switch_model("first")
            # What the core has read once, or could have: a call of that number was answered.
            for message in (
                Reconfigure(0, config_payload(engine.entry_of("second").config), STASH_BYTES),
                Sleep(1, 2),
            ):
                await send(msgspec.msgpack.encode(message))
            assert await collect(engine, **SHORT) == answer
            assert engine.stats.num_core_restarts == 0

    limited(body)
