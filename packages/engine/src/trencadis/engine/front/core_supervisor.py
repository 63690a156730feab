"""An engine core as its front has it: its process and the channel to it, and its restarts.

What a message means for a request or a call is left to who runs the supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing.process import BaseProcess
from typing import Any

import attrs
import psutil

from trencadis.engine.api.outputs import (
    EngineStats,
    ThermalStats,
    TierStats,
    plus_totals,
    with_totals,
)
from trencadis.engine.core.core_process import LogSettings, run_core
from trencadis.engine.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    EngineRestarting,
    EngineUnresponsive,
    ModelError,
)
from trencadis.engine.ipc.channel import FrontChannel
from trencadis.engine.ipc.messages import Busy, Failed, FromCore, Ready, StepDone, Stop, ToCore
from trencadis.engine.runner.limits import token_budget
from trencadis.engine.settings.engine_config import EngineConfig

logger = logging.getLogger("trencadis.engine")

_START_SECONDS = 3600.0
"""Longest start: a large model with every graph to compile takes tens of minutes on Gaudi."""

_POLL_SECONDS = 0.5
"""Period in which a silent core's process is checked."""

_STOP_SECONDS = 10.0
"""Time for the core to end by itself before its process is killed."""

_RECOVERY_POLL_SECONDS = 0.05
"""Period in which a caller checks whether the core has been restarted."""

_LONG_WARMUP_SECONDS = 10.0
"""Who waits for a restart is told of a warm-up that takes as long."""

_STALE_SECONDS = 5.0
"""Silence of the core after which its last temperatures are stale, as those of a sensor are
(`ReaderConfig.stale_after_s`)."""

_MAX_BACKOFF_SECONDS = 30.0
"""Longest wait before a restart of the core: 1 s before the first, then twice as long each time."""


_TIERS = tuple(name for name in attrs.fields_dict(EngineStats) if name.endswith("_tier"))


class CoreSupervisor:
    """A core that is restarted after its death, ``config.engine_restarts`` times in all.

    ``config`` is that of the model that it serves, with which it is restarted; ``ready`` is what it
    last reported of it. ``busy`` is its last message, if it says that what it
    does may take minutes, and ``restarting`` why it died, while it is being restarted. ``failure``
    says why no request can be served any more.
    """

    def __init__(
        self, config: EngineConfig, core: CoreClient, ready: Ready, log: LogSettings
    ) -> None:
        self.config = config
        self.ready = ready
        self.busy: Busy | None = None
        self.restarting = ""
        self.failure: str | None = None
        self._num_restarts = 0
        self._adapters: dict[str, dict[str, str]] = {}
        """The directories of the adapters that each model had last, by their names."""
        self._totals: dict[str, EngineStats] = {}
        """What each model's last message said, with the totals of the cores before."""
        self._of_earlier_cores: dict[str, EngineStats] = {}
        self._thermal: ThermalStats | None = None
        self._thermal_of_earlier_cores = ThermalStats()
        self._tiers: dict[str, TierStats] = {}
        self._tiers_of_earlier_cores: dict[str, TierStats] = {}
        self._stats = self._first_stats()
        self._core = core
        self._log = log
        self._last_message_s = time.monotonic()
        self._has_failed = asyncio.Event()

    async def run(
        self,
        on_message: Callable[[FromCore], Awaitable[None]],
        on_death: Callable[[EngineDead], None],
    ) -> None:
        """Read the core's messages until it dies for good; restart it before that.

        ``on_message`` gets each message. ``on_death`` gets the error with which all requests end,
        at each death: `EngineRestarting`, and `EngineDead` after the last.
        """
        try:
            await self._supervise(on_message, on_death)
        except Exception as error:  # nothing reads the core from here on: every caller must fail
            logger.exception("The engine stops serving: its core is no longer supervised")
            reason = f"the supervision of the engine core ended by {type(error).__name__}: {error}"
            on_death(self.fail(f"{reason}. Restart the server"))

    async def _supervise(
        self,
        on_message: Callable[[FromCore], Awaitable[None]],
        on_death: Callable[[EngineDead], None],
    ) -> None:
        while True:
            reason = await self._read(on_message)
            if self._num_restarts >= self.config.engine_restarts:
                break
            self.restarting = reason
            lost = f"{reason}: this request is lost. The core is restarted: send it again"
            on_death(EngineRestarting(lost))
            while self.restarting and self._num_restarts < self.config.engine_restarts:
                await self._restart()
            if self.restarting:
                reason = self.restarting
                break
        logger.error("The engine stops serving: %s", reason)
        on_death(self.fail(f"{reason}: restart the server"))

    def fail(self, reason: str) -> EngineDead:
        """No request can be served any more; returns the error that says why."""
        if self.failure is None:
            self.failure = reason
        self._has_failed.set()
        return EngineDead(self.failure)

    async def send(self, message: ToCore) -> None:
        """Queue a message for the core."""
        await self._core.send(message)

    async def stop(self) -> None:
        """Let the core end by itself, then end its process."""
        if self._core.is_alive:
            await self.send(Stop())
        await self._core.end(_STOP_SECONDS)

    async def kill(self) -> None:
        """End the core's process."""
        await self._core.end()

    def use_model(self, config: EngineConfig, ready: Ready) -> None:
        """The core serves the model of ``config`` now, also after a restart."""
        self._keep_adapters()
        self.config, self.ready = config, ready
        self._stats = self._first_stats()

    @property
    def stats(self) -> EngineStats:
        """What the core last reported, and for how long it has been silent since.

        Totals count since the start of the first core.
        """
        silence_s, thermal = self.silence_s, self._thermal
        if thermal is not None and thermal.sensor == "fresh" and silence_s > _STALE_SECONDS:
            fault = f"the engine core has reported no temperature for {silence_s:.0f} s"
            thermal = attrs.evolve(thermal, sensor="stale", fault=thermal.fault or fault)
        return attrs.evolve(
            self._stats,
            core_silence_s=silence_s,
            core_silence_limit_s=self._silence_limit_s,
            num_core_restarts=self._num_restarts,
            thermal=thermal,
        )

    def totals_of(self, model: str) -> EngineStats:
        """The totals of a model; 0 before it was active. Other values are those of no model."""
        known = self._totals.get(model, EngineStats())
        return with_totals(EngineStats(), known)

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        return self.failure is None and not self.restarting and self._core.is_alive

    @property
    def silence_s(self) -> float:
        """Seconds since the last message of the core. An idle core sends one each second."""
        return time.monotonic() - self._last_message_s

    async def wait_until_recovered(self) -> None:
        """Wait until a core that died has been restarted. Raises `EngineDead` where it is not."""
        while not self.is_alive:
            if self.failure is not None:
                raise EngineDead(self.failure)
            await asyncio.sleep(_RECOVERY_POLL_SECONDS)

    async def wait_until_failed(self) -> str:
        """Wait until no request can be served any more; returns why."""
        await self._has_failed.wait()
        return self.failure or ""

    def check_health(self) -> str | None:
        """As `AsyncEngine.check_health`."""
        if self.failure is not None:
            raise EngineDead(self.failure, is_refusal=True)
        if not self.is_alive:
            reason = self.restarting or "the engine core is gone"
            if self._num_restarts >= self.config.engine_restarts and not self.restarting:
                raise EngineDead(f"{reason}: restart the server", is_refusal=True)
            raise EngineRestarting(
                f"{reason}: it is being restarted, {self._restart_length()}", is_refusal=True
            )
        stopped_s = self._core.stopped_s
        if stopped_s > self.config.hang_timeout:
            raise EngineUnresponsive(
                f"the engine core's process has been stopped for {stopped_s:.0f} s, as by SIGSTOP: "
                "continue it with SIGCONT, or restart the server"
            )
        silence_s, limit_s = self.silence_s, self._silence_limit_s
        if silence_s > limit_s:
            what = "the engine core hangs" if self.busy is None else self.busy.reason
            raise EngineUnresponsive(
                f"{what}: no message for {silence_s:.0f} s, "
                f"more than {limit_s:.0f} s. Restart the server if it stays so"
            )
        if self.busy is None:
            return None
        return (
            f"{self.busy.reason}: no message for {silence_s:.0f} s, and up to {limit_s:.0f} s "
            "may pass without one"
        )

    def _restart_length(self) -> str:
        """How long a restart takes, as text. Requests are served after its warm-up."""
        if self.ready.warmup_seconds < _LONG_WARMUP_SECONDS:
            return "try again in some seconds"
        return (
            f"with a warm-up, which took {self.ready.warmup_seconds:.0f} s the last time: try "
            "again then"
        )

    async def _restart(self) -> None:
        """Start another core, after a wait. Where that fails, the reason is the new one."""
        await self._core.end()
        self._keep_totals()
        self._stats = self._first_stats()
        delay_s = min(2.0**self._num_restarts, _MAX_BACKOFF_SECONDS)
        self._num_restarts += 1
        logger.error(
            "%s: restart %d of %d in %.0f s",
            self.restarting,
            self._num_restarts,
            self.config.engine_restarts,
            delay_s,
        )
        await asyncio.sleep(delay_s)
        try:
            self._keep_adapters()
            self._core = CoreClient(self.config, self._log, self._adapters)
            self.ready = await self._core.wait_until_ready()
        except asyncio.CancelledError:  # the engine is stopped
            await self._core.end()
            raise
        except EngineError as error:
            self.restarting = str(error)
            return
        except Exception as error:  # such as no socket or process left: the next try may have one
            logger.exception("The engine core could not be started again")
            self.restarting = f"{type(error).__name__}: {error}"
            return
        self.restarting, self.busy = "", None
        self._last_message_s = time.monotonic()
        self._stats = self._first_stats()
        logger.info("The engine core serves again")

    async def _read(self, on_message: Callable[[FromCore], Awaitable[None]]) -> str:
        """Pass on each message of the core; returns why there are no more."""
        try:
            while True:
                message = await self._core.receive(self.patience_s, self._stopped_patience_s)
                self._last_message_s = time.monotonic()
                self.busy = message if isinstance(message, Busy) else None
                if isinstance(message, Failed):
                    raise EngineDead(message.message)
                if isinstance(message, StepDone) and message.stats is not None:
                    self._note_stats(message.stats)
                await on_message(message)
        except EngineError as error:
            return str(error)
        except Exception as error:
            # The core's messages are not read from here on, so every waiting caller must fail.
            logger.exception("The front cannot read the engine core's messages")
            return f"{type(error).__name__}: {error}"

    def _note_stats(self, reported: EngineStats) -> None:
        name = self.config.name
        earlier = self._of_earlier_cores.get(name, EngineStats())
        for tier in _TIERS:
            counted: TierStats | None = getattr(reported, tier)
            if counted is not None:
                of_earlier = self._tiers_of_earlier_cores.get(tier, TierStats())
                self._tiers[tier] = plus_totals(counted, of_earlier)
        tiers: Mapping[str, Any] = self._tiers
        reported = attrs.evolve(reported, **tiers)
        self._stats = self._totals[name] = plus_totals(reported, earlier)
        thermal, before = reported.thermal, self._thermal_of_earlier_cores
        self._thermal = None if thermal is None else plus_totals(thermal, before)

    def _keep_adapters(self) -> None:
        """Note what the model has now, for cores that are started later."""
        if self.config.enable_lora:
            paths = {adapter.name: adapter.path for adapter in self.ready.adapters}
            self._adapters[self.config.name] = paths

    def _keep_totals(self) -> None:
        """The next core counts from 0. Safe to call twice in a row."""
        self._of_earlier_cores = dict(self._totals)
        self._thermal_of_earlier_cores = self._thermal or self._thermal_of_earlier_cores
        self._tiers_of_earlier_cores = dict(self._tiers)

    @property
    def _silence_limit_s(self) -> float:
        """Seconds of silence after which the core is unhealthy."""
        return max(self.config.hang_timeout, self._busy_s)

    @property
    def patience_s(self) -> float | None:
        """Seconds of silence after which the core is killed; None: it never is."""
        patience_s = self._stopped_patience_s
        return None if patience_s is None else max(patience_s, self._busy_s)

    @property
    def _stopped_patience_s(self) -> float | None:
        """The same for a core whose process is stopped, whatever it has said that it does."""
        config = self.config
        if not config.hang_restart_timeout:
            return None
        return max(config.hang_restart_timeout, config.hang_timeout)

    @property
    def _busy_s(self) -> float:
        """Seconds for which the core has said that it may be silent; 0: it has said nothing."""
        return 0.0 if self.busy is None else self.busy.limit_s

    def _first_stats(self) -> EngineStats:
        """The stats before the core has sent its own."""
        stats = EngineStats(
            num_total_blocks=self.ready.num_blocks - 1,
            block_size=self.ready.block_size,
            max_model_len=self.ready.max_model_len,
            max_running_seqs=self.config.max_num_seqs,
            max_num_seqs=self.config.max_num_seqs,
            max_prefill_tokens=token_budget(self.config),
            max_num_batched_tokens=token_budget(self.config),
        )
        return with_totals(stats, self.totals_of(self.config.name))


class CoreClient:
    """Starts the core's process, exchanges messages with it, and ends it.

    ``adapters``: see `EngineCore`. Raises `ConfigError` for settings that cannot be sent to another
    process.
    """

    def __init__(
        self,
        config: EngineConfig,
        log: LogSettings,
        adapters: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.stopped_s = 0.0
        """Seconds for which the process has been seen stopped, as by SIGSTOP."""
        self._channel = FrontChannel()
        self.send = self._channel.send
        self._process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=run_core,
            args=(
                *(config, self._channel.to_core, self._channel.from_core),
                *(os.getpid(), log, adapters or {}),
            ),
            name="trencadis-core",
            daemon=True,
        )
        try:
            self._process.start()
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            self._channel.close()
            raise ConfigError(
                f"the settings cannot be sent to the core's process ({error}): use values that "
                "pickle can copy, and name a device of your own as module:Class"
            ) from error
        except BaseException:
            self._channel.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    async def wait_until_ready(self) -> Ready:
        """The core's first message, once it has loaded the model and warmed up.

        Raises `ConfigError` or `ModelError` where it cannot serve the model, else `EngineDead`.
        """
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            message = await self._channel.receive(_POLL_SECONDS)
            if isinstance(message, Ready):
                return message
            if isinstance(message, Failed):
                kinds = {"config": ConfigError, "model": ModelError}
                raise kinds.get(message.kind, EngineDead)(message.message)
            if message is None and not self.is_alive:
                raise EngineDead(
                    f"the engine core ended at start with exit code {self._process.exitcode}"
                )
        raise EngineDead(f"the engine core was not ready within {_START_SECONDS:.0f} s")

    async def receive(
        self, patience_s: float | None = None, stopped_patience_s: float | None = None
    ) -> FromCore:
        """The core's next message.

        Raises `EngineDead` once the process has ended, after ``patience_s`` seconds of silence, and
        after ``stopped_patience_s`` seconds in which it was stopped (None: however long). They are
        counted in polls, so a pause of this process is none of the core.
        """
        silent_s = 0.0
        while True:
            message = await self._channel.receive(_POLL_SECONDS)
            if message is not None:
                self.stopped_s = 0.0
                return message
            if not self.is_alive:
                raise EngineDead(f"the engine core ended with exit code {self._process.exitcode}")
            silent_s += _POLL_SECONDS
            self.stopped_s = self.stopped_s + _POLL_SECONDS if self._is_stopped() else 0.0
            if stopped_patience_s is not None and self.stopped_s >= stopped_patience_s:
                raise EngineDead(
                    f"the engine core's process has been stopped for {self.stopped_s:.0f} s"
                )
            if patience_s is not None and silent_s >= patience_s:
                raise EngineDead(f"the engine core hangs: no message for {silent_s:.0f} s")

    def _is_stopped(self) -> bool:
        """Whether a signal or a debugger keeps the process from running: it says nothing then."""
        try:
            status = psutil.Process(self._process.pid).status()
        except psutil.Error:  # it has ended, which is seen elsewhere
            return False
        return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    async def end(self, patience_seconds: float = 0.0) -> None:
        """Wait for the process to end by itself, then kill it and every process it started."""
        await asyncio.to_thread(self._process.join, patience_seconds)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.is_alive() and self._process.pid is not None:
                _signal_group(self._process.pid, number)
                await asyncio.to_thread(self._process.join, 2.0)
        self._channel.close()


def _signal_group(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)
    except ProcessLookupError:  # the process has not made its own group yet
        os.kill(leader, number)
