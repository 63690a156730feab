"""The front's handle of the engine core: its process and the channel to it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import time
from multiprocessing.process import BaseProcess

from trencadis.engine.core.core_process import LogSettings, run_core
from trencadis.engine.errors import ConfigError, EngineDead, ModelError
from trencadis.engine.ipc.channel import FrontChannel
from trencadis.engine.ipc.messages import Failed, FromCore, Ready, ToCore
from trencadis.engine.settings.engine_config import EngineConfig

_START_SECONDS = 3600.0
"""Longest start: a large model with every graph to compile takes tens of minutes on Gaudi."""

_POLL_SECONDS = 0.5
"""Period in which a silent core's process is checked."""


class CoreClient:
    """Starts the core's process, exchanges messages with it, and ends it.

    Raises `ConfigError` for settings that cannot be sent to another process.
    """

    def __init__(self, config: EngineConfig, log: LogSettings) -> None:
        self._channel = FrontChannel()
        self._process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=run_core,
            args=(config, self._channel.to_core, self._channel.from_core, log),
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

    async def send(self, message: ToCore) -> None:
        """Queue a message for the core."""
        await self._channel.send(message)

    async def receive(self, patience_s: float | None = None) -> FromCore:
        """The core's next message.

        Raises `EngineDead` once the process has ended, or after ``patience_s`` seconds of silence
        (None: however long). They are counted in polls, so a pause of this process is none of the
        core.
        """
        silent_s = 0.0
        while True:
            message = await self._channel.receive(_POLL_SECONDS)
            if message is not None:
                return message
            if not self.is_alive:
                raise EngineDead(f"the engine core ended with exit code {self._process.exitcode}")
            silent_s += _POLL_SECONDS
            if patience_s is not None and silent_s >= patience_s:
                raise EngineDead(f"the engine core hangs: no message for {silent_s:.0f} s")

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
