"""The adapters of an engine, loaded and unloaded while it serves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from trencadis.engine.api.inspection import AdapterInfo
from trencadis.engine.errors import AdapterError, EngineError, RequestFailed
from trencadis.engine.front.core_supervisor import CoreSupervisor
from trencadis.engine.ipc.messages import AdaptersChanged, LoadAdapter, ToCore, UnloadAdapter

Ask = Callable[[Callable[[int], ToCore]], Awaitable[Any]]
"""Sends a message with a number to the core, and waits for its answer."""


class AdapterCalls:
    """Calls of the core. One that is started again has the adapters that the core before had."""

    def __init__(self, core: CoreSupervisor, ask: Ask) -> None:
        self._core = core
        self._ask = ask

    @property
    def served(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests to the active model may name."""
        return self._core.ready.adapters

    async def load(self, name: str, path: str, within: tuple[str, ...]) -> None:
        """Load an adapter. Raises `AdapterError`, or `RequestFailed` for what is not the caller's
        error; nothing has changed then."""
        await self._ask(lambda number: LoadAdapter(number, name, path, within))

    async def unload(self, name: str) -> None:
        """Unload an adapter. Raises `AdapterError` for one that is not loaded."""
        await self._ask(lambda number: UnloadAdapter(number, name))

    def note(self, message: AdaptersChanged) -> None:
        """The core has changed its adapters."""
        self._core.ready = msgspec.structs.replace(self._core.ready, adapters=message.adapters)


def error_of(message: AdaptersChanged) -> EngineError:
    """The error of a change that was rejected, or that failed."""
    if message.is_internal:
        return RequestFailed(message.error)
    return AdapterError(message.error, message.field)
