"""Switches the engine's model: by administrators and, with ``--auto-switch``, for requests.

The next model is prepared first. Until then the active one serves, sleeps and wakes up as before,
and the engine may switch to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Literal

import attrs

from trencadis.engine import (
    EngineError,
    EngineRestarting,
    EngineSleeping,
    EngineUnresponsive,
    SwitchFailedError,
    SwitchInProgressError,
    SwitchReport,
    UnknownModelError,
)
from trencadis.server.engine_protocol import SleepingEngine, SwitchingEngine
from trencadis.server.errors import ApiError
from trencadis.server.metrics.serving_metrics import SwitchMetrics
from trencadis.server.settings import ServerSettings
from trencadis.server.switching.idle_sleep import IdleSleep, check_idle_limits
from trencadis.server.switching.switch_queue import QueueFull, SwitchQueue, WaitingRequest

logger = logging.getLogger("trencadis.server")

DRAIN_SECONDS = 10.0
"""Seconds for running requests to finish before a switch that requests have asked for. Those that
are left are parked and go on when their model returns."""


class SwitchControl:
    """The only caller of `SwitchingEngine.switch_model` of an app: one switch at a time.

    With ``--auto-switch`` the engine sleeps while its model is idle, see `IdleSleep`.
    ``num_active`` counts the requests that run or wait, and ``clock`` seconds. It belongs to the
    event loop that serves the app. Raises `ConfigError` for a model with a ``ttl`` that nothing
    would wake up.
    """

    def __init__(
        self,
        engine: SwitchingEngine,
        settings: ServerSettings,
        metrics: SwitchMetrics,
        num_active: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._switches_for_requests = settings.auto_switch
        self._metrics = metrics
        self._clock = clock
        self._switching = asyncio.Lock()
        """Held during a switch, but not during its preparation."""
        self._ordering = asyncio.Lock()
        """Held during an administrator's order, also while its model is prepared."""
        self._changing = asyncio.Lock()
        """Held while the engine switches, sleeps or wakes up. A switch takes it last."""
        self._queue = SwitchQueue(
            engine.active,
            min_stay_s=settings.min_model_stay,
            max_waiting=settings.max_switch_waiting,
        )
        metrics.num_waiting = self._queue.count_by_model
        self._served: dict[WaitingRequest, asyncio.Future[None]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._preparations: dict[str, asyncio.Task[float]] = {}
        """Those of the models that requests wait for."""
        self._has_changed = asyncio.Event()
        self._order: asyncio.Future[SwitchReport] | None = None
        check_idle_limits([engine.entry_of(alias) for alias in engine.aliases], settings)
        self.idle = IdleSleep(
            engine,
            self._changing,
            lambda: not num_active() and not self._queue.is_waited_for,
            clock,
        )

    async def switch(
        self,
        alias: str,
        *,
        running: Literal["wait", "abort", "park"],
        drain_timeout_s: float,
        waits: bool,
    ) -> SwitchReport:
        """Carry out an administrator's order. The minimum stay does not bind administrators.

        A switch that has begun goes on when its caller is cancelled.
        Raises `UnknownModelError`, `SwitchInProgressError` where another switch is under way and
        the call does not wait for its end, and the errors of `SwitchingEngine.switch_model`.
        """
        if alias not in self._engine.aliases:
            listed = ", ".join(self._engine.aliases)
            raise UnknownModelError(f"there is no model {alias!r}: name one of {listed}")
        if not waits and (self._ordering.locked() or self._switching.locked()):
            raise SwitchInProgressError("another switch is under way: try again when it has ended")
        await self._ordering.acquire()
        # In a task, because the engine goes on without the caller: the queue must see the end.
        work = self._carry_out_order(alias, running, drain_timeout_s)
        order = self._order = asyncio.ensure_future(work)
        order.add_done_callback(_retrieve)
        return await asyncio.shield(order)

    async def wait_for(self, request: WaitingRequest) -> None:
        """Return when the model of a request is active, after a switch if need be.

        Raises `ApiError` where too many requests wait or the model cannot be loaded,
        `EngineSleeping` while the engine sleeps, and the error of a failed switch.
        """
        self.idle.start()
        self.idle.note_request()
        if self.idle.is_asleep and request.alias in (None, self._engine.active):
            await self.idle.wake_up()
        self._check_awake()
        self._check_loadable(request)
        try:
            if self._queue.arrive(request):
                return
        except QueueFull:
            wait_s = self._queue.retry_after_s(self._clock())
            raise ApiError(
                503,
                f"{len(self._queue)} requests wait for a switch of models: try again in {wait_s} s",
                code="engine_overloaded",
                headers={"Retry-After": str(wait_s)},
            ) from None
        served = self._served[request] = asyncio.get_running_loop().create_future()
        self._start_driver()
        try:
            await served
        except SwitchFailedError:
            self._check_loadable(request)
            raise
        finally:
            self._queue.leave(request)
            del self._served[request]
            self._has_changed.set()  # perhaps the last that waits for its model

    async def close(self) -> None:
        """End the tasks that switch for requests and that watch for idle models."""
        await self.idle.close()
        if self._driver is not None:
            self._driver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._driver

    def _start_driver(self) -> None:
        """The queue has changed: see whether a switch is due now."""
        if not self._switches_for_requests:
            return
        self._has_changed.set()
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive(), name="model-switches")

    async def _drive(self) -> None:
        """Switch as long as requests wait for another model."""
        try:
            while True:
                async with self._switching:  # an administrator's switch is over
                    self._has_changed.clear()
                    preparing = self._prepare_wanted()
                    wait_s = self._queue.next_switch_s(self._clock(), preparing)
                    if wait_s == 0:
                        await self._switch_for_requests(preparing)
                if wait_s is None and not preparing:
                    return
                # A model that failed may be tried in an hour; others are not to wait for that.
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._has_changed.wait(), wait_s)
        except BaseException:
            for served in self._served.values():
                if not served.done():
                    served.set_exception(SwitchInProgressError("the switch of models has ended"))
            raise
        finally:
            for alias in tuple(self._preparations):
                self._end_preparation(alias)

    def _prepare_wanted(self) -> set[str]:
        """Prepare each model that requests wait for, and no other; returns those not ready yet."""
        wanted = self._queue.wanted(self._clock())
        for alias in self._preparations.keys() - set(wanted):
            self._end_preparation(alias)  # no request waits for it any more
        for alias in wanted:
            if alias not in self._preparations:
                task = asyncio.create_task(self._prepare(alias), name=f"prepare-{alias}")
                task.add_done_callback(lambda _: self._has_changed.set())
                self._preparations[alias] = task
        preparing = set()
        for alias, task in tuple(self._preparations.items()):
            if not task.done():
                preparing.add(alias)
            elif (error := _error_of(task)) is not None:
                self._end_preparation(alias)
                self._give_up(alias, error)
        return preparing

    def _end_preparation(self, alias: str) -> None:
        task = self._preparations.pop(alias)
        task.cancel()
        task.add_done_callback(_retrieve)

    @property
    def _is_asleep(self) -> bool:
        return isinstance(self._engine, SleepingEngine) and self._engine.is_sleeping

    def _check_awake(self) -> None:
        """An administrator has released the device memory: no request may take it again."""
        if self._is_asleep and not self.idle.is_asleep:
            raise EngineSleeping("the engine sleeps: an administrator has to wake it up")

    def _check_loadable(self, request: WaitingRequest) -> None:
        """Reject a request for a model of which the last switch failed, for a while."""
        now_s = self._clock()
        failure = self._queue.failure_of(request.alias, now_s)
        if failure is not None:
            wait_s = math.ceil(failure.not_before_s - now_s)
            raise ApiError(
                503,
                f"the model {request.alias!r} cannot be loaded: {failure.reason}. It is tried "
                f"again in {wait_s} s",
                code="model_switch_failed",
                headers={"Retry-After": str(wait_s)},
            )

    async def _switch_for_requests(self, preparing: set[str]) -> None:
        alias = self._queue.next_model(self._clock(), preparing)
        if alias is None or alias not in self._preparations:
            return
        prepare_s = self._preparations[alias].result()
        try:
            async with self._changing:
                # Its requests may have left while the engine fell asleep or woke up.
                if self._queue.next_model(self._clock(), preparing) == alias:
                    await self._carry_out(alias, "park", DRAIN_SECONDS, prepare_s, may_wake=False)
        except Exception as error:  # those who wait get it; a dead task would leave them waiting
            self._give_up(alias, error)

    def _give_up(self, alias: str, error: Exception) -> None:
        is_fault = not isinstance(error, EngineError)
        logger.error(
            "The switch to %s failed: %s", alias, error, exc_info=error if is_fault else None
        )
        self._refuse(alias, error)

    async def _carry_out_order(
        self, alias: str, running: Literal["wait", "abort", "park"], drain_timeout_s: float
    ) -> SwitchReport:
        try:
            prepare_s = await self._prepare(alias)
            async with self._switching, self._changing:
                return await self._carry_out(alias, running, drain_timeout_s, prepare_s)
        except SwitchFailedError as error:
            if error.step != "drain":  # the model is as loadable as before
                self._refuse(alias, error)
            raise
        finally:
            self._ordering.release()
            self._start_driver()  # parked requests bring their model back

    def _refuse(self, alias: str, error: Exception) -> None:
        """End the requests that wait for a model with the error of its switch."""
        now_s = self._clock()
        if isinstance(error, SwitchFailedError):
            ended_core = error.step == "core"
            refused = self._queue.refuse(alias, now_s, str(error), ended_core=ended_core)
        elif isinstance(error, (EngineSleeping, EngineRestarting, EngineUnresponsive)):
            refused = self._queue.delay(alias, now_s)
        else:
            refused = self._queue.refuse(alias, now_s)
        for request in refused:
            if not (served := self._served[request]).done():
                served.set_exception(error)

    async def _prepare(self, alias: str) -> float:
        """Prepare a switch; returns the seconds."""
        try:
            return await self._engine.prepare_model(alias)
        except Exception:
            self._metrics.count_failure(alias)
            raise

    async def _carry_out(
        self,
        alias: str,
        running: Literal["wait", "abort", "park"],
        drain_timeout_s: float,
        prepare_s: float,
        *,
        may_wake: bool = True,
    ) -> SwitchReport:
        """Switch, and serve the requests that waited for the model that is active then."""
        parked, slept, has_loaded = None, self._is_asleep, False
        self._queue.begin(alias)
        try:
            if not may_wake:
                self._check_awake()
            report = await self._engine.switch_model(
                alias, running=running, drain_timeout_s=drain_timeout_s
            )
            report = attrs.evolve(
                report,
                prepare_s=report.prepare_s + prepare_s,
                total_s=report.total_s + prepare_s,
            )
            self._metrics.observe(report)
            parked = report.previous if report.parked else None
            has_loaded = report.previous != report.active
            return report
        except Exception as error:
            has_loaded = _has_loaded(error)
            self._metrics.count_failure(alias)
            if self._is_asleep and not slept:  # the previous model could not be started again
                self.idle.leave_to_requests()
            raise
        finally:
            self.idle.note_request()  # an administrator wants the model, without a request so far
            active = self._engine.active
            ended = self._queue.end(active, self._clock(), parked=parked, has_loaded=has_loaded)
            for request in ended:
                if not (served := self._served[request]).done():
                    served.set_result(None)


def _has_loaded(error: Exception) -> bool:
    """Whether a switch with this error had begun to take the previous model off the device."""
    if isinstance(error, SwitchFailedError):
        return error.step not in ("prepare", "drain", "deserialise")
    return not isinstance(error, EngineError)


def _error_of(task: asyncio.Task[float]) -> Exception | None:
    """The error of a task that is done."""
    if task.cancelled():
        return SwitchInProgressError("the preparation of the model was cancelled")
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Look at a task's error, so that none is reported as lost where no caller waits for it."""
    if not task.cancelled():
        task.exception()
