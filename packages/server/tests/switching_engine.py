"""A stand-in for an engine of several models. Each has a tokenizer of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from stand_in_engine import ByteTokenizer, StandInEngine

from trencadis.engine import (
    CompletionDelta,
    EngineConfig,
    EngineRequest,
    EngineSleeping,
    EngineStats,
    ModelEntry,
    ModelNotActiveError,
    SwitchFailedError,
    SwitchInProgressError,
    SwitchReport,
    UnknownModelError,
)


class SwitchingStandIn(StandInEngine):
    """Models ``a``, ``b`` and ``c``. Tests set how a switch goes on."""

    def __init__(self, **entries: dict[str, Any]) -> None:
        super().__init__()
        self.entries = {
            alias: ModelEntry(alias, EngineConfig(model=alias), **entries.get(alias, {}))
            for alias in ("a", "b", "c")
        }
        self.aliases = tuple(self.entries)
        self.tokenizers = {alias: ByteTokenizer() for alias in self.aliases}
        self.active = "a"
        self.is_switching = False
        self.is_sleeping = False
        self.levels: list[int] = []
        self.may_switch = asyncio.Event()
        self.may_switch.set()
        self.prepared: list[str] = []
        self.prepare_s = 0.0
        self.may_prepare = asyncio.Event()
        self.may_prepare.set()
        self.downloads: dict[str, asyncio.Event] = {}
        self.ended_downloads: list[str] = []
        self.prepare_fault: Exception | None = None
        self.failing: set[str] = set()
        self.fault: Exception | None = None
        self.faulty: str | None = None
        self.sleeps_after_failure = False
        self.sleep_fault: Exception | None = None
        self.wake_fault: Exception | None = None
        self.parks = 0
        self.totals: dict[str, EngineStats] = {}
        """Those of models that are not active."""
        self.switches: list[tuple[str, str, float]] = []
        self.served: list[str] = []

    @property
    def tokenizer(self) -> ByteTokenizer:
        return self.tokenizers[self.active]

    @tokenizer.setter
    def tokenizer(self, _: ByteTokenizer) -> None: ...

    @property
    def model_name(self) -> str:
        return self.active

    @model_name.setter
    def model_name(self, _: str) -> None: ...

    @property
    def embedding_size(self) -> int:
        return 8 if self.entry.config.runner == "pooling" else 0

    @embedding_size.setter
    def embedding_size(self, _: int) -> None: ...

    @property
    def entry(self) -> ModelEntry:
        return self.entries[self.active]

    def totals_of(self, alias: str) -> EngineStats:
        return self.stats if alias == self.active else self.totals.get(alias, EngineStats())

    def entry_of(self, alias: str) -> ModelEntry:
        return self.entries[alias]

    async def tokenizer_of(self, alias: str) -> ByteTokenizer:
        return self.tokenizers[alias]

    async def prepare_model(self, alias: str) -> float:
        self.prepared.append(alias)
        await self.may_prepare.wait()
        try:
            if alias in self.downloads:
                await self.downloads[alias].wait()
        except asyncio.CancelledError:
            self.ended_downloads.append(alias)
            raise
        if self.prepare_fault is not None:
            fault, self.prepare_fault = self.prepare_fault, None
            raise fault
        return self.prepare_s

    async def switch_model(
        self,
        alias: str,
        *,
        running: str = "wait",
        drain_timeout_s: float = 60.0,
        wait_for_turn: bool = True,
    ) -> SwitchReport:
        if alias not in self.aliases:
            raise UnknownModelError(f"there is no model {alias!r}: there are a, b, c")
        assert not self.is_switching
        self.switches.append((alias, running, drain_timeout_s))
        previous = self.active
        self.is_switching = True
        try:
            await self.may_switch.wait()
            if self.fault is not None and self.faulty in (None, alias):
                fault, self.fault = self.fault, None
                raise fault
            if alias in self.failing:
                self.is_sleeping = self.sleeps_after_failure
                raise SwitchFailedError(f"step load: no {alias}; a serves", "load", previous)
            self.active = alias
            self.is_sleeping = False
        finally:
            self.is_switching = False
        parked = self.parks if running == "park" else 0
        return SwitchReport(previous=previous, active=alias, parked=parked, total_s=1.5)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[CompletionDelta, None]:
        if self.is_sleeping:
            raise EngineSleeping("the engine sleeps: POST /wake_up first")
        if self.is_switching:
            raise SwitchInProgressError("the model is being switched: try again later")
        if request.model not in (None, self.active):
            raise ModelNotActiveError(f"{request.model} is not active")
        self.served.append(self.active)
        async for delta in super().generate(request):
            yield delta

    async def sleep(self, level: int = 1) -> int:
        self.levels.append(level)
        if self.sleep_fault is not None:
            fault, self.sleep_fault = self.sleep_fault, None
            raise fault
        self.is_sleeping = True
        return 4096

    async def wake_up(self) -> None:
        if self.wake_fault is not None:
            fault, self.wake_fault = self.wake_fault, None
            raise fault
        self.is_sleeping = False
