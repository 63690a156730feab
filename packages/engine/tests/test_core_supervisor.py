"""A core that cannot be started again: the engine ends, and no caller waits for ever."""

from __future__ import annotations

import asyncio
import errno
import re
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from trencadis.engine import (
    EngineConfig,
    EngineDead,
    EngineRestarting,
    EngineStats,
    EngineUnresponsive,
    LogSettings,
    ThermalStats,
)
from trencadis.engine.front import core_supervisor
from trencadis.engine.front.core_supervisor import CoreClient, CoreSupervisor
from trencadis.engine.ipc import channel
from trencadis.engine.ipc.messages import Busy, Ready, StepDone

READY = Ready(
    max_model_len=64,
    num_blocks=9,
    block_size=8,
    dtype="float32",
    device="cpu",
    num_buckets=0,
    warmup_seconds=0.0,
)
NO_FILES = zmq.ZMQError(errno.EMFILE)


class DeadCore:
    """A core whose process has ended."""

    is_alive = False

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault

    async def receive(self, patience_s: float | None = None) -> Any:
        raise EngineDead("the engine core ended with exit code -9")

    async def end(self, patience_seconds: float = 0.0) -> None:
        if self.fault is not None:
            raise self.fault


def unstartable(*_: Any) -> CoreClient:
    raise NO_FILES


@pytest.mark.parametrize(
    "core", [DeadCore(), DeadCore(PermissionError("no permission"))], ids=["start", "end"]
)
def test_a_core_that_cannot_be_started_again_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, core: Any
) -> None:
    monkeypatch.setattr(core_supervisor, "_MAX_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(core_supervisor, "CoreClient", unstartable)
    deaths: list[EngineDead] = []

    async def ignore(_: Any) -> None: ...

    async def body() -> None:
        config = EngineConfig(model="m", engine_restarts=3)
        supervisor = CoreSupervisor(config, core, READY, LogSettings())
        reading = asyncio.create_task(supervisor.run(ignore, deaths.append))
        with pytest.raises(EngineDead, match=r"Too many|no permission"):
            await supervisor.wait_until_recovered()
        await reading
        assert await supervisor.wait_until_failed()
        with pytest.raises(EngineDead):
            supervisor.check_health()

    asyncio.run(asyncio.wait_for(body(), 60))
    assert [type(error) for error in deaths] == [EngineRestarting, EngineDead]


@pytest.mark.parametrize(
    ("warmup_s", "words"),
    [(0.4, "try again in some seconds"), (312.4, "a warm-up, which took 312 s the last time")],
)
def test_who_asks_during_a_restart_is_told_how_long_it_takes(warmup_s: float, words: str) -> None:
    ready = msgspec.structs.replace(READY, warmup_seconds=warmup_s)
    core: Any = DeadCore()
    supervisor = CoreSupervisor(EngineConfig(model="m"), core, ready, LogSettings())
    supervisor.restarting = "the engine core ended with exit code -9"
    with pytest.raises(EngineRestarting, match=rf"exit code -9: it is being restarted, .*{words}"):
        supervisor.check_health()


@pytest.mark.parametrize("part", ["socket", "process"])
def test_a_core_that_cannot_be_started_leaves_no_directory_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    def fail(*_: Any) -> Any:
        raise NO_FILES

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if part == "socket":
        monkeypatch.setattr(channel, "_bind", fail)
    else:
        monkeypatch.setattr(BaseProcess, "start", fail)

    async def body() -> None:
        CoreClient(EngineConfig(model="m"), LogSettings())

    with pytest.raises(zmq.ZMQError):
        asyncio.run(body())
    assert not list(tmp_path.iterdir())


class SilentCore(DeadCore):
    """A core that sends what it is given, and then nothing more."""

    is_alive = True
    stopped_s = 0.0

    def __init__(self, *messages: Any) -> None:
        super().__init__()
        self.messages = list(messages)

    async def receive(self, *_: Any) -> Any:
        if self.messages:
            return self.messages.pop(0)
        await asyncio.sleep(3600)
        return None


def test_temperatures_of_a_silent_core_are_stale_and_outlive_a_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An alert must neither take them for current nor begin again with the next model."""
    reported = ThermalStats(hottest_c=71.0, num_policy_faults=2)
    core: Any = SilentCore(StepDone((), EngineStats(num_steps=5, thermal=reported)))

    async def ignore(_: Any) -> None: ...

    async def body() -> None:
        supervisor = CoreSupervisor(EngineConfig(model="m"), core, READY, LogSettings())
        reading = asyncio.create_task(supervisor.run(ignore, lambda _: None))
        while not supervisor.stats.num_steps:  # noqa: ASYNC110 - it is not an event
            await asyncio.sleep(0.001)
        monkeypatch.setattr(core_supervisor, "_STALE_SECONDS", 3600.0)
        assert supervisor.stats.thermal == reported
        supervisor.use_model(EngineConfig(model="other"), READY)
        assert (supervisor.stats.thermal, supervisor.stats.num_steps) == (reported, 0)
        assert supervisor.totals_of("m").num_steps == 5
        monkeypatch.setattr(core_supervisor, "_STALE_SECONDS", 0.0)
        thermal = supervisor.stats.thermal
        assert thermal is not None
        assert (thermal.sensor, thermal.hottest_c, thermal.num_policy_faults) == ("stale", 71.0, 2)
        assert "has reported no temperature for" in thermal.fault
        reading.cancel()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_core_that_hangs_while_it_is_busy_is_seen_and_unhealthy_in_the_end() -> None:
    """Its process runs: nothing but its silence tells that it hangs."""
    core: Any = SilentCore(StepDone((), EngineStats(num_steps=5)), Busy("it compiles", 900.0))

    async def ignore(_: Any) -> None: ...

    async def body() -> None:
        config = EngineConfig(model="m", hang_timeout=40.0, hang_restart_timeout=90.0)
        supervisor = CoreSupervisor(config, core, READY, LogSettings())
        assert supervisor.check_health() is None
        first = supervisor.stats
        assert first.core_silence_limit_s == 40.0
        assert (first.num_total_blocks, first.block_size) == (8, 8)
        assert first.max_model_len == READY.max_model_len > 0
        assert (first.max_running_seqs, first.num_steps) == (config.max_num_seqs, 0)
        reading = asyncio.create_task(supervisor.run(ignore, lambda _: None))
        while supervisor.busy is None:  # noqa: ASYNC110 - it is not an event
            await asyncio.sleep(0.001)
        supervisor._last_message_s -= 600.0
        assert 600.0 <= supervisor.stats.core_silence_s < 900.0
        assert supervisor.stats.core_silence_limit_s == supervisor.patience_s == 900.0
        text = supervisor.check_health()
        assert text is not None
        assert re.fullmatch(
            r"it compiles: no message for 6\d\d s, and up to 900 s may pass without one", text
        )
        supervisor._last_message_s -= 300.0
        with pytest.raises(EngineUnresponsive, match=r"it compiles: no message .* than 900 s"):
            supervisor.check_health()
        reading.cancel()

    asyncio.run(asyncio.wait_for(body(), 60))
