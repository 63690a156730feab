"""Lets the engine sleep while its model has no request, and wakes it up for the next one.

What llama-swap calls ``ttl`` and Ollama ``keep_alive``: a model that is not used gives its device
memory back. Its weights stay in host memory, so that the next request waits for seconds at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Generator, Iterable

from trencadis.engine import (
    ConfigError,
    EngineDead,
    EngineError,
    EngineSleeping,
    ModelEntry,
    SwitchFailedError,
)
from trencadis.server.engine_protocol import SleepingEngine, SwitchingEngine
from trencadis.server.settings import ServerSettings

logger = logging.getLogger("trencadis.server")

_LONGEST_PERIOD_S = 1.0
"""Longest period in which the timer checks whether the model is idle."""

_AFTER_DEATH_S = 3600.0
"""Seconds until a model may sleep again whose sleep ended the core, for example because the host
lacks memory."""


def check_idle_limits(entries: Iterable[ModelEntry], settings: ServerSettings) -> None:
    """Raise `ConfigError` for a model with a ``ttl`` that no request would wake up."""
    limited = [entry.alias for entry in entries if entry.ttl]
    if limited and not settings.auto_switch:
        raise ConfigError(
            f"the model {limited[0]} has a ttl, and without --auto-switch no request would wake it "
            "up: give --auto-switch, or leave out ttl",
            "auto_switch",
        )


class IdleSleep:
    """The timer of ``ModelEntry.ttl``. Does nothing where no model has one.

    ``lock`` is held while the engine switches, sleeps or wakes up. ``is_idle`` tells that no
    request runs or waits; ``clock`` counts seconds. Raises `ConfigError` for an engine that cannot
    sleep, where a model has one.
    """

    def __init__(
        self,
        engine: SwitchingEngine,
        lock: asyncio.Lock,
        is_idle: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._lock = lock
        self._is_idle = is_idle
        self._clock = clock
        self._used_s = clock()
        self._is_own_sleep = False
        self._num_users = 0
        self._num_failed_wake_ups = 0
        self._not_before_s: dict[str, float] = {}
        self._timer: asyncio.Task[None] | None = None
        limits = [engine.entry_of(alias).ttl for alias in engine.aliases]
        self._shortest_ttl_s = min((limit for limit in limits if limit), default=0.0)
        if self._shortest_ttl_s and not isinstance(engine, SleepingEngine):
            raise ConfigError("a model has a ttl, and the engine cannot sleep: leave out ttl")

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps because it was idle, and not by an administrator's order."""
        engine = self._engine
        return self._is_own_sleep and isinstance(engine, SleepingEngine) and engine.is_sleeping

    def start(self) -> None:
        """Start the timer, unless it runs."""
        if self._shortest_ttl_s and self._timer is None:
            self._timer = asyncio.create_task(self._watch(), name="idle-sleep")

    def note_request(self) -> None:
        """The model is used now."""
        self._used_s = self._clock()

    @contextlib.contextmanager
    def in_use(self) -> Generator[None, None, None]:
        """Within this context the engine does not count as idle."""
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1

    def leave_to_operator(self) -> bool:
        """An administrator lets the engine sleep: no request wakes it up. Returns if one could."""
        could, self._is_own_sleep = self._is_own_sleep, False
        return could

    def leave_to_requests(self) -> None:
        """Requests wake the engine up again, such as after a model that could not be started."""
        self._is_own_sleep = True

    async def wake_up(self) -> None:
        """Return when the engine is awake.

        Raises `EngineSleeping` where it cannot be woken up now, and the other errors of
        `SleepingEngine.wake_up`.
        """
        engine, num_failures = self._engine, self._num_failed_wake_ups
        async with self._lock:
            if not self.is_asleep or not isinstance(engine, SleepingEngine):
                return
            if num_failures != self._num_failed_wake_ups:  # of the request before this
                raise EngineSleeping("the engine cannot wake up now: try again later")
            try:
                await engine.wake_up()
                self.note_request()
            except SwitchFailedError as error:  # such as too little free device memory
                self._num_failed_wake_ups += 1
                raise EngineSleeping(str(error)) from error

    async def close(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._timer

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(_LONGEST_PERIOD_S, self._shortest_ttl_s / 4))
            if self._is_due():
                async with self._lock:
                    if self._is_due():
                        await self._sleep()

    def _is_due(self) -> bool:
        if self._num_users or not self._is_idle():
            self.note_request()
        engine = self._engine
        ttl_s = engine.entry.ttl
        return (
            ttl_s > 0
            and isinstance(engine, SleepingEngine)
            and not engine.is_sleeping
            and self._clock() - self._used_s >= ttl_s
            and self._clock() >= self._not_before_s.get(engine.active, -math.inf)
        )

    async def _sleep(self) -> None:
        engine = self._engine
        if not isinstance(engine, SleepingEngine):
            return
        self._is_own_sleep = True  # before: a request that comes meanwhile waits, and wakes it up
        try:
            await engine.sleep(1)
        except EngineError as error:  # such as a core that is being restarted
            self._is_own_sleep = False
            self.note_request()
            if isinstance(error, EngineDead):  # restarts are counted: it might use them up
                self._not_before_s[engine.active] = self._clock() + _AFTER_DEATH_S
            logger.warning("The model %s is idle and cannot sleep: %s", engine.active, error)
        else:
            logger.info("The model %s sleeps: no request for %g s", engine.active, engine.entry.ttl)
