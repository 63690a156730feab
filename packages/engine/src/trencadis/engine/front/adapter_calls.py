"""The adapters of an engine, loaded and unloaded while it serves, also after its core has died."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from trencadis.engine.api.inspection import AdapterInfo
from trencadis.engine.errors import AdapterError, EngineError
from trencadis.engine.front.core_supervisor import CoreSupervisor
from trencadis.engine.ipc.messages import AdaptersChanged, LoadAdapter, ToCore, UnloadAdapter

logger = logging.getLogger("trencadis.engine")

Ask = Callable[[Callable[[int], ToCore]], Awaitable[Any]]
"""Sends a message with a number to the core, and waits for its answer."""


class AdapterCalls:
    """Calls of the core, and what each model has because of them, by names.

    A core that is started again has the adapters of its settings alone: `restore` makes them those
    that it had.
    """

    def __init__(self, core: CoreSupervisor, ask: Ask) -> None:
        self._core = core
        self._ask = ask
        self._paths: dict[str, dict[str, str]] = {}
        """The directory of each adapter, by name, for each model whose adapters were changed."""

    @property
    def served(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests to the active model may name."""
        return self._core.ready.adapters

    async def load(self, name: str, path: str) -> None:
        """Load an adapter. Raises `AdapterError`, and nothing has changed then."""
        await self._change(lambda number: LoadAdapter(number, name, path))

    async def unload(self, name: str) -> None:
        """Unload an adapter. Raises `AdapterError` for one that is not loaded."""
        await self._change(lambda number: UnloadAdapter(number, name))

    def note(self, message: AdaptersChanged) -> None:
        """The core has changed its adapters."""
        self._core.ready = msgspec.structs.replace(self._core.ready, adapters=message.adapters)

    async def restore(self) -> None:
        """Give a core that was started again the adapters that its model had."""
        wanted = self._paths.get(self._core.config.name)
        if wanted is None:
            return
        for adapter in self.served:
            if wanted.get(adapter.name) != adapter.path:
                await self._try(partial(UnloadAdapter, name=adapter.name))
        served = {adapter.name for adapter in self.served}
        for name, path in tuple(wanted.items()):
            if name not in served:
                await self._try(partial(LoadAdapter, name=name, path=path))

    async def _try(self, message: Callable[[int], ToCore]) -> None:
        try:
            await self._ask(message)
        except EngineError as error:
            logger.warning("The adapters are not those from before the restart: %s", error)

    async def _change(self, message: Callable[[int], ToCore]) -> None:
        await self._ask(message)
        paths = {adapter.name: adapter.path for adapter in self.served}
        self._paths[self._core.config.name] = paths


def error_of(message: AdaptersChanged) -> AdapterError:
    """The error of a change that was rejected."""
    return AdapterError(message.error, message.field)
