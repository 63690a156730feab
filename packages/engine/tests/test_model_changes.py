"""What a front says of a core that sleeps, wakes up and serves another model."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from trencadis.engine import (
    EngineConfig,
    EngineSleeping,
    GenerateRequest,
    LogSettings,
    SamplingParams,
    SwitchFailedError,
)
from trencadis.engine.core.core_process import _handle
from trencadis.engine.core.engine_core import EngineCore
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.front.core_supervisor import CoreSupervisor
from trencadis.engine.front.model_changes import ModelChanges
from trencadis.engine.front.open_requests import OpenRequests
from trencadis.engine.ipc.messages import (
    Add,
    Ready,
    Reconfigured,
    ReconfigureFailed,
    Rejected,
    Sleep,
    Slept,
    WakeUp,
)

READY = Ready(64, 9, 8, "float32", "cpu", 0, 0.0)


class Core:
    """Keeps what it is sent; a test gives the answers."""

    is_alive = True
    stopped_s = 0.0

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def send(self, message: Any) -> None:
        self.messages.append(message)


def front() -> tuple[Core, ModelChanges]:
    core = Core()
    supervisor = CoreSupervisor(EngineConfig(model="m"), core, READY, LogSettings())
    numbers = itertools.count()
    return core, ModelChanges(supervisor, OpenRequests(supervisor, numbers), numbers, lambda _: ...)


def test_a_sleep_that_waits_for_a_wake_up_refuses_requests_all_the_time() -> None:
    async def body() -> None:
        core, changes = front()
        changes.is_sleeping = True
        waking = asyncio.create_task(changes.wake_up())
        falling_asleep = asyncio.create_task(changes.sleep(1))
        await asyncio.sleep(0.01)
        wake_up, sleep = core.messages
        assert (type(wake_up), type(sleep)) == (WakeUp, Sleep)
        changes.answer(Reconfigured(wake_up.number, READY))
        await waking
        with pytest.raises(EngineSleeping):
            changes.check_admission()
        changes.answer(Slept(sleep.number, 7))
        assert await falling_asleep == 7
        with pytest.raises(EngineSleeping):
            changes.check_admission()

    asyncio.run(body())


def test_an_engine_that_could_not_wake_up_sleeps_and_can_be_asked_again() -> None:
    async def body() -> None:
        core, changes = front()
        changes.is_sleeping = True
        waking = asyncio.create_task(changes.wake_up())
        await asyncio.sleep(0)
        changes.answer(ReconfigureFailed(core.messages[0].number, "wake", "no memory"))
        with pytest.raises(SwitchFailedError, match="no memory"):
            await waking
        assert changes.is_sleeping
        again = asyncio.create_task(changes.wake_up())
        await asyncio.sleep(0)
        changes.answer(Reconfigured(core.messages[1].number, READY))
        await again
        changes.check_admission()

    asyncio.run(body())


def test_a_request_that_reaches_a_sleeping_core_is_told_so(tiny_model: Any) -> None:
    """And not that something is wrong with it: a server answers 503, and 400 otherwise."""
    config = EngineConfig(
        model=str(tiny_model), dtype="float32", max_model_len=64, num_blocks=40, block_size=8
    )
    core = EngineCore(config)
    ModelSwitcher(core).sleep(1)
    answers: list[Any] = []

    class Channel:
        send = staticmethod(answers.append)

    _handle(core, Channel(), Add("a/1", GenerateRequest((5, 6), SamplingParams())), {})
    (rejected,) = answers
    assert isinstance(rejected, Rejected)
    supervisor = CoreSupervisor(config, Core(), READY, LogSettings())
    requests = OpenRequests(supervisor, itertools.count())
    queue: asyncio.Queue[Any] = asyncio.Queue()
    requests.begin("a/1", None, queue)
    requests.reject(rejected)
    assert isinstance(queue.get_nowait(), EngineSleeping)
