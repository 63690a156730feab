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
    SwitchInProgressError,
)
from trencadis.engine.core.adapter_loads import AdapterLoads
from trencadis.engine.core.core_process import _handle
from trencadis.engine.core.engine_core import EngineCore
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.front.core_supervisor import CoreSupervisor
from trencadis.engine.front.model_changes import ModelChanges
from trencadis.engine.front.open_requests import OpenRequests
from trencadis.engine.front.request_stream import RequestStream
from trencadis.engine.front.tokenizer import Tokenizer
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


def test_while_models_are_switched_there_is_no_sleep_and_no_wake_up() -> None:
    async def body() -> None:
        core, changes = front()
        changes.switching = "from first to second"
        for change in (changes.sleep(1), changes.wake_up()):
            with pytest.raises(SwitchInProgressError, match="from first to second"):
                await change
        assert not core.messages

    asyncio.run(body())


def test_a_change_has_begun_once_the_core_is_busy_with_the_last_call() -> None:
    async def body() -> None:
        core, changes = front()
        changes.begin(None)
        assert not changes.has_begun
        changes.is_sleeping = True
        waking = asyncio.create_task(changes.wake_up())
        await asyncio.sleep(0)
        (wake_up,) = core.messages
        for number, has_begun in (
            (None, False),
            (wake_up.number - 1, False),
            (wake_up.number, True),
        ):
            changes.begin(number)
            assert changes.has_begun is has_begun
        changes.answer(Reconfigured(wake_up.number, READY))
        await waking

    asyncio.run(body())


def test_waiting_for_requests_ends_with_the_last_one_or_the_time(tiny_model: Any) -> None:
    async def body() -> None:
        supervisor = CoreSupervisor(EngineConfig(model="m"), Core(), READY, LogSettings())
        requests = OpenRequests(supervisor, itertools.count())
        assert await asyncio.wait_for(requests.drain(3600.0), 60) == 0
        request = GenerateRequest([1, 2], SamplingParams())
        tokenizer = Tokenizer.load(str(tiny_model))
        requests.begin("a", RequestStream("a", request, tokenizer, lambda _: None), asyncio.Queue())
        assert await asyncio.wait_for(requests.drain(0.0), 60) == 1

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

    _handle(
        core, Channel(), Add("a/1", GenerateRequest((5, 6), SamplingParams())), {}, AdapterLoads()
    )
    (rejected,) = answers
    assert isinstance(rejected, Rejected)
    supervisor = CoreSupervisor(config, Core(), READY, LogSettings())
    requests = OpenRequests(supervisor, itertools.count())
    queue: asyncio.Queue[Any] = asyncio.Queue()
    requests.begin("a/1", None, queue)
    requests.reject(rejected)
    assert isinstance(queue.get_nowait(), EngineSleeping)
