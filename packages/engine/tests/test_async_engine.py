"""The front and its core process: streams, aborts, refusals, and a core that dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import attrs
import psutil
import pytest
from child_processes import children, core_process

from trencadis.engine import (
    AsyncEngine,
    BatchControl,
    CompletionDelta,
    ConfigError,
    EngineConfig,
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineRestarting,
    EngineStats,
    EngineUnresponsive,
    GenerateRequest,
    InvalidRequest,
    LogSettings,
    ModelError,
    ModelNotActiveError,
    PoolingRequest,
    SamplingParams,
)
from trencadis.engine.core import core_process as core_process_module
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.core_process import _loop, run_core
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.front import core_supervisor
from trencadis.engine.ipc.messages import (
    Busy,
    CheckModel,
    Failed,
    ModelChecked,
    Ready,
    StepDone,
    Stop,
)

pytestmark = pytest.mark.usefixtures("own_processes")

QUIET = LogSettings(level=logging.CRITICAL)
LIMIT_SECONDS = 600


def config(model: Path | str, **changes: object) -> EngineConfig:
    settings = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "num_blocks": 80,
        "warmup": "none",
        **changes,
    }
    return EngineConfig(model=str(model), **settings)


@asynccontextmanager
async def running(
    model: Path, log: LogSettings = QUIET, **changes: object
) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(config(model, **changes), log)
    try:
        yield engine
    finally:
        await engine.stop()
        assert not children(), "no process is left behind"


def limited(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), LIMIT_SECONDS))


async def collect(engine: AsyncEngine, prompt: list[int], **params) -> list[CompletionDelta]:
    return [
        delta async for delta in engine.generate(GenerateRequest(prompt, SamplingParams(**params)))
    ]


async def until(condition: Callable[[], object]) -> None:
    for _ in range(int(LIMIT_SECONDS / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def settled(engine: AsyncEngine) -> None:
    """Wait, for a bounded time, until the core has nothing left to serve."""
    for _ in range(2000):
        stats = engine.stats
        if stats.num_running_seqs == stats.num_waiting_reqs == stats.num_used_blocks == 0:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still busy: {engine.stats}")


LENGTH = 4000


@pytest.fixture(scope="module")
def long_model(
    make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A model for `LENGTH` tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("long"), max_position_embeddings=LENGTH)


ENDLESS = {"max_model_len": LENGTH, "num_blocks": 2100}
"""Settings of an engine for `endless`."""


async def endless(engine: AsyncEngine) -> list[CompletionDelta]:
    """A request that runs for longer than a test needs to end its core."""
    return await collect(engine, [1, 2, 3], max_tokens=LENGTH - 3, ignore_eos=True, n=4)


@pytest.mark.slow
def test_prompts_that_come_together_are_prefilled_together(tiny_model: Path) -> None:
    """Three prompts of one API request run in one bucket of batch 4, as seed 002 says."""

    async def body() -> None:
        settings = {"bucket_grid": "seq", "max_num_batched_tokens": 64}
        async with running(tiny_model, **settings) as engine:
            for i in range(9):
                prompts = [list(range(3 * i + k, 3 * i + k + 12)) for k in range(3)]
                await asyncio.gather(*(collect(engine, p, max_tokens=1) for p in prompts))
            prefill = (await engine.inspect()).grids[0]
            hits = zip(
                itertools.product(prefill.rows, prefill.columns), prefill.num_hits, strict=True
            )
            assert {shape: count for shape, count in hits if count} == {(4, 16): 9}

    limited(body)


def test_life_of_an_engine(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = LogSettings(format="%(asctime)s core: %(message)s", datefmt="at noon")

    async def body() -> None:
        async with running(tiny_model, log) as engine:
            assert engine.is_alive
            assert engine.max_model_len == 128
            await streams_join_to_the_same_text(engine)
            await samples_interleave_and_all_end(engine)
            await closing_a_stream_frees_its_blocks(engine)
            await abort_ends_the_stream(engine)
            await stop_string_ends_the_stream_and_the_core_hears_of_it(engine)
            await bad_requests_are_refused_and_serving_goes_on(engine)
            await a_flood_of_one_client_does_not_delay_another(engine)
            await a_request_to_another_model_is_refused(engine)
        with pytest.raises(EngineDead):
            await collect(engine, [1, 2])

    limited(body)
    assert re.search("at noon core: # [CH]PU blocks", capfd.readouterr().err)


async def streams_join_to_the_same_text(engine: AsyncEngine) -> None:
    prompt = engine.tokenizer.encode("some text")
    first, second = await asyncio.gather(
        *(collect(engine, prompt, temperature=0.0, max_tokens=9) for _ in range(2))
    )
    assert "".join(d.text for d in first) == "".join(d.text for d in second)
    assert sum(len(d.token_ids) for d in first) <= 9
    assert [d.finish_reason for d in first[:-1]] == [None] * (len(first) - 1)
    assert first[-1].finish_reason in ("stop", "length")
    assert first[-1].num_prompt_tokens == len(prompt)


async def a_request_to_another_model_is_refused(engine: AsyncEngine) -> None:
    params = SamplingParams(max_tokens=2)
    for call in (
        lambda: anext(engine.generate(GenerateRequest((1, 2), params, model="other"))),
        lambda: engine.embed(PoolingRequest((1, 2), model="other")),
        lambda: engine.score("a", "b", model="other"),
    ):
        with pytest.raises(ModelNotActiveError, match=f"other is not active, {engine.model_name}"):
            await call()
    own = GenerateRequest((1, 2), params, model=engine.model_name)
    assert [delta async for delta in engine.generate(own)]


async def a_flood_of_one_client_does_not_delay_another(engine: AsyncEngine) -> None:
    ended: list[str] = []

    async def send(client: str) -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        async for _ in engine.generate(GenerateRequest([5, 6, 7], params, client=client)):
            pass
        ended.append(client)

    # The core reads of none of them before all are sent, so that it alone decides their order.
    core = core_process()
    core.suspend()
    try:
        tasks = [asyncio.create_task(send(client)) for client in [*["flood"] * 60, "trickle"]]
        await until(lambda: len(engine._requests.unfinished()) == 61)
        await asyncio.sleep(0.1)  # for the thread that sends
    finally:
        core.resume()
    await asyncio.gather(*tasks)
    # First come first served would end it last. At most 4 run at a time; those that run before it
    # is read end before it, and those of its own step.
    assert ended.index("trickle") <= 30


async def samples_interleave_and_all_end(engine: AsyncEngine) -> None:
    deltas = await collect(engine, [5, 6, 7], n=3, max_tokens=5, ignore_eos=True)
    assert sorted(d.index for d in deltas if d.finish_reason) == [0, 1, 2]
    assert len(deltas) == 15


async def closing_a_stream_frees_its_blocks(engine: AsyncEngine) -> None:
    stream = engine.generate(
        GenerateRequest([1, 2, 3], SamplingParams(max_tokens=100, n=2, ignore_eos=True))
    )
    async for _ in stream:
        break
    await stream.aclose()
    await settled(engine)


async def abort_ends_the_stream(engine: AsyncEngine) -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    reasons = []
    while "abort" not in reasons and len(reasons) < 20:  # a front that is late finds it ended
        deltas = []
        async for delta in engine.generate(GenerateRequest([1, 2, 3], params, request_id="mine")):
            deltas.append(delta)
            if len(deltas) == 3:
                await engine.abort("mine")
        reasons.append(deltas[-1].finish_reason)
    assert reasons[-1] == "abort"
    await settled(engine)


async def stop_string_ends_the_stream_and_the_core_hears_of_it(engine: AsyncEngine) -> None:
    prompt = engine.tokenizer.encode("hello")
    free = await collect(engine, prompt, temperature=0.0, max_tokens=40)
    text = "".join(d.text for d in free)
    stop = text[6:8]
    deltas = await collect(engine, prompt, temperature=0.0, max_tokens=40, stop=(stop,))
    assert "".join(d.text for d in deltas) == text[: text.find(stop)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    await settled(engine)


async def bad_requests_are_refused_and_serving_goes_on(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await collect(engine, [1] * 500)
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest):
        await collect(engine, [1] * 120, max_tokens=100)
    assert len(await collect(engine, [1], max_tokens=3, ignore_eos=True)) == 3


@pytest.mark.slow
def test_full_queue_is_refused(tiny_model: Path) -> None:
    async def body() -> None:
        async with running(tiny_model, max_waiting=1, max_num_seqs=1) as engine:
            results = await asyncio.gather(
                *(collect(engine, [1, 2], max_tokens=60, ignore_eos=True) for _ in range(12)),
                return_exceptions=True,
            )
            refused = [one for one in results if isinstance(one, EngineOverloaded)]
            served = [one for one in results if isinstance(one, list)]
            assert len(refused) + len(served) == 12
            assert refused
            assert all(len(one) == 60 for one in served)
            await settled(engine)

    limited(body)


def test_killed_core_ends_every_stream_with_an_error(long_model: Path) -> None:
    async def body() -> None:
        async with running(long_model, engine_restarts=0, **ENDLESS) as engine:
            task = asyncio.create_task(endless(engine))
            await until(lambda: engine.stats.num_running_seqs > 0)
            os.kill(core_process().pid, signal.SIGKILL)
            with pytest.raises(EngineDead, match="exit code") as lost:
                await task
            assert not lost.value.is_refusal
            assert not engine.is_alive
            with pytest.raises(EngineDead) as refused:
                await engine.check_health()
            assert refused.value.is_refusal

    limited(body)


@pytest.mark.slow
def test_a_core_that_dies_is_restarted_and_the_requests_that_it_loses_are_told(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_supervisor, "_MAX_BACKOFF_SECONDS", 0.2)

    async def body() -> None:
        async with running(long_model, engine_restarts=1, **ENDLESS) as engine:
            calm = await collect(engine, [1, 2, 3], max_tokens=9, temperature=0.0)
            failed = asyncio.create_task(engine.wait_until_failed())
            await kill_while_serving(engine, EngineRestarting, "this request is lost")
            with pytest.raises(EngineRestarting, match="is being restarted") as refused:
                await engine.check_health()
            assert refused.value.is_refusal
            with pytest.raises(EngineRestarting):
                await engine.control(BatchControl())
            await until(lambda: engine.is_alive)
            await engine.check_health()
            assert engine.stats.num_core_restarts == 1
            again = await collect(engine, [1, 2, 3], max_tokens=9, temperature=0.0)
            assert [delta.text for delta in again] == [delta.text for delta in calm]
            assert not failed.done()
            await kill_while_serving(engine, EngineDead, "exit code -9: restart the server")
            assert "exit code -9" in await failed
            with pytest.raises(EngineDead, match="restart the server"):
                await engine.check_health()

    limited(body)


async def kill_while_serving(engine: AsyncEngine, error: type[Exception], message: str) -> None:
    task = asyncio.create_task(endless(engine))
    await until(lambda: engine.stats.num_running_seqs > 0)
    os.kill(core_process().pid, signal.SIGKILL)
    with pytest.raises(error, match=message) as caught:
        await task
    assert type(caught.value) is error


@pytest.mark.slow
def test_an_engine_is_stopped_while_its_core_is_restarted(tiny_model: Path) -> None:
    async def body() -> None:
        async with running(tiny_model) as engine:
            os.kill(core_process().pid, signal.SIGKILL)
            await until(lambda: engine._core.restarting)
            await asyncio.sleep(1.5)  # it has waited, and starts the process
        with pytest.raises(EngineDead, match="was stopped"):
            await engine.check_health()

    limited(body)


@pytest.mark.slow
def test_a_core_that_hangs_is_unhealthy_until_it_goes_on(tiny_model: Path) -> None:
    async def body() -> None:
        async with running(tiny_model, hang_timeout=3.0) as engine:
            core = core_process()
            core.suspend()
            with pytest.raises(EngineUnresponsive, match="the engine core hangs: no message for"):
                while True:  # it is healthy until then
                    await engine.check_health()
                    await asyncio.sleep(0.01)
            assert engine.silence_s > 3.0
            with pytest.raises(EngineUnresponsive):
                await collect(engine, [1, 2])
            engine._core.busy = Busy("the engine core compiles a shape")
            await engine.check_health()
            core.resume()
            await until(lambda: engine.silence_s < 1.0)
            await engine.check_health()
            assert len(await collect(engine, [1, 2], max_tokens=3, ignore_eos=True)) == 3

    limited(body)


@pytest.mark.slow
def test_a_core_that_hangs_for_long_is_killed_and_restarted(long_model: Path) -> None:
    async def body() -> None:
        settings = {"hang_timeout": 3.0, "hang_restart_timeout": 5.0, **ENDLESS}
        async with running(long_model, engine_restarts=1, **settings) as engine:
            calm = await collect(engine, [1, 2, 3], max_tokens=9, temperature=0.0)
            core = core_process()
            task = asyncio.create_task(endless(engine))
            await until(lambda: engine.stats.num_running_seqs > 0)
            core.suspend()
            with pytest.raises(EngineRestarting, match="has been stopped for 5 s: this request"):
                await task
            await until(lambda: engine.is_alive)
            assert not core.is_running()
            assert engine.stats.num_core_restarts == 1
            again = await collect(engine, [1, 2, 3], max_tokens=9, temperature=0.0)
            assert [delta.text for delta in again] == [delta.text for delta in calm]

    limited(body)


@pytest.mark.slow
def test_a_core_that_is_stopped_is_unhealthy_whatever_it_has_announced(tiny_model: Path) -> None:
    async def body() -> None:
        async with running(tiny_model, hang_timeout=2.0, hang_restart_timeout=0.0) as engine:
            core = core_process()
            core.suspend()
            try:
                await asyncio.sleep(0.1)  # its last messages are read
                engine._core.busy = Busy("the engine core loads a model")
                with pytest.raises(EngineUnresponsive, match=r"stopped .* SIGSTOP"):
                    for _ in range(1200):  # at least a minute
                        await engine.check_health()
                        await asyncio.sleep(0.05)
                assert engine.stats.core_silence_s > 2.0
            finally:
                core.resume()
            await until(lambda: engine.stats.core_silence_s < 2.0)
            await engine.check_health()

    limited(body)


@pytest.mark.slow
def test_a_core_that_compiles_or_may_hang_is_not_killed(tiny_model: Path) -> None:
    async def body() -> None:
        timeouts = {"hang_timeout": 2.0, "hang_restart_timeout": 5.0}
        async with running(tiny_model, **timeouts) as engine:
            assert engine._core.patience_s == 5.0
            engine._core.busy = Busy("the engine core compiles a shape")
            assert engine._core.patience_s == 1800.0
            engine._core.busy = Busy("the engine core switches models: pause", 0.0)
            assert engine._core.patience_s == 5.0
            engine._core.busy = None
            engine._core.config = attrs.evolve(engine.config, hang_restart_timeout=1.0)
            assert engine._core.patience_s == 2.0, "it counts as hung before it is killed"
            engine._core.config = attrs.evolve(engine.config, hang_restart_timeout=0)
            assert engine._core.patience_s is None

    limited(body)


class Channel:
    """The core's end of a channel, which stops the core after some rounds."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.num_rounds = 0

    def send(self, message: object) -> None:
        self.sent.append(message)

    def receive(self, timeout_seconds: float) -> list[object]:
        self.num_rounds += 1
        return [Stop()] if self.num_rounds > 3 else []


class WarmingCore:
    """As much of a core as an idle round needs, with buckets left to warm up."""

    executor = SimpleNamespace(is_warming_up=True)
    has_work = False
    stats = EngineStats()

    def advance_warm_up(self) -> None:
        """Takes minutes in which the core sends nothing."""

    def take_failures(self) -> list[object]:
        return []


def test_a_core_says_that_it_warms_up_before_it_falls_silent() -> None:
    channel = Channel()
    _loop(WarmingCore(), channel, os.getppid(), ModelSwitcher(WarmingCore()))
    assert [type(message) for message in channel.sent] == [StepDone, *[Busy, StepDone] * 3]


class CoreEnd(Channel):
    """The core's end of a channel, which gives one message, and stops the core after its answer."""

    def __init__(self, message: object = None) -> None:
        super().__init__()
        self.messages = [] if message is None else [message]

    def receive(self, timeout_seconds: float) -> list[object]:
        messages, self.messages = self.messages, []
        is_answered = any(isinstance(sent, ModelChecked) for sent in self.sent)
        return [Stop()] if is_answered else messages

    def close(self) -> None:
        self.sent.append("closed")


@pytest.mark.slow
def test_a_core_whose_front_has_ended_before_it_began_ends(tiny_model: Path) -> None:
    """By SIGKILL, say, of a server that has just started."""
    code = """
import os, sys
from trencadis.engine import EngineConfig, LogSettings
from trencadis.engine.front.core_supervisor import CoreClient

if __name__ == "__main__":
    config = EngineConfig(model=sys.argv[1], dtype="float32", warmup="none", num_blocks=80)
    core = CoreClient(config, LogSettings())
    print(core._process.pid, flush=True)
    os._exit(0)
"""
    command = [sys.executable, "-c", code, str(tiny_model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front:
        core = psutil.Process(int(front.stdout.readline()))
    gone, _ = psutil.wait_procs([core], LIMIT_SECONDS)
    if not gone:
        core.kill()
    assert gone


def test_a_core_says_why_it_cannot_serve_and_checks_other_models_while_it_does(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no weights")

    def serve(model: Path, message: object = None, **changes: object) -> list[object]:
        end = CoreEnd(message)
        monkeypatch.setattr(core_process_module, "CoreChannel", lambda *_: end)
        run_core(config(model, **changes), "to", "from", os.getppid(), QUIET, {})
        assert end.sent.pop() == "closed"
        return end.sent

    monkeypatch.setattr(os, "setpgid", lambda *_: None)
    handler = signal.getsignal(signal.SIGINT)
    try:
        for model, error in ((tiny_model, ""), (tmp_path / "gone", "gone is no directory")):
            sent = serve(tiny_model, CheckModel(7, config_payload(config(model))))
            ready = sent[0]
            assert isinstance(ready, Ready)
            assert ready == Ready(128, 80, 8, "float32", ready.device, ready.num_buckets, 0.0)
            assert ready.num_buckets
            (checked,) = [message for message in sent if isinstance(message, ModelChecked)]
            assert checked.number == 7
            assert (checked.error == "") == (error == "")
            assert str(model) in checked.error or not error
        for model, changes, kind in (
            (tmp_path / "broken", {}, "model"),
            (tiny_model, {"num_blocks": 3}, "config"),
        ):
            *_, failed = serve(model, **changes)
            assert isinstance(failed, Failed)
            assert failed.kind == kind
            assert {"model": "broken", "config": "max_model_len"}[kind] in failed.message
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_blocks": 3}, ConfigError),
        ({"max_model_len": 100_000}, ConfigError),
    ],
)
def test_failed_start_says_why_and_leaves_no_process(
    tiny_model: Path, changes: dict[str, object], error: type[Exception]
) -> None:
    async def body() -> None:
        with pytest.raises(error, match="max_model_len"):
            await AsyncEngine.start(config(tiny_model, **changes), QUIET)
        assert not children()

    limited(body)


def test_missing_model_fails_before_a_process_is_started() -> None:
    async def body() -> None:
        with pytest.raises(ModelError, match="no directory"):
            await AsyncEngine.start(config("/no/such/model"), QUIET)

    limited(body)


@pytest.mark.slow
def test_an_engine_belongs_to_its_event_loop(tiny_model: Path) -> None:
    engine = asyncio.run(AsyncEngine.start(config(tiny_model), QUIET))

    async def elsewhere() -> None:
        with pytest.raises(EngineError, match="another event loop"):
            await collect(engine, [1, 2])
        with pytest.raises(EngineError, match="another event loop"):
            await engine.control(BatchControl())
        for change in (engine.sleep(), engine.wake_up()):
            with pytest.raises(EngineError, match="another event loop"):
                await change
        await engine.stop()
        await engine.stop()

    limited(elsewhere)
    assert not children()


def test_settings_of_a_wrong_type_are_refused_before_a_process_is_started(tiny_model: Path) -> None:
    async def body() -> None:
        with pytest.raises(ConfigError, match="must be an EngineConfig"):
            await AsyncEngine.start(str(tiny_model))  # type: ignore[arg-type]
        unsendable = config(tiny_model, thermal_policy_config={"key": lambda: None})
        with pytest.raises(ConfigError, match="cannot be sent to the core's process"):
            await AsyncEngine.start(unsendable, QUIET)
        assert not children()

    limited(body)
