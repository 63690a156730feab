"""Several models in one engine: one of them is active, and `switch_model` activates another."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import attrs

from trencadis.engine.api.outputs import EngineStats
from trencadis.engine.core.core_process import LogSettings
from trencadis.engine.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    ModelError,
    SwitchFailedError,
    SwitchInProgressError,
)
from trencadis.engine.front.async_engine import EngineFront, start_core
from trencadis.engine.front.core_supervisor import CoreSupervisor
from trencadis.engine.front.multi_model_config import ModelEntry
from trencadis.engine.front.open_requests import OpenRequest
from trencadis.engine.front.prepared_models import PreparedModels
from trencadis.engine.validators import number, one_of

if TYPE_CHECKING:
    from trencadis.engine.front.tokenizer import Tokenizer
    from trencadis.engine.ipc.messages import Reconfigured

Running = Literal["wait", "abort", "park"]
"""What happens to requests that still run when the drain limit has passed."""

_MAX_DRAIN_SECONDS = 86_400.0

_MAX_STASH_GIB = 1 << 20


@attrs.frozen(kw_only=True)
class SwitchReport:
    """What a switch did.

    - ``parked``, ``aborted``: requests of the previous model that were kept, and ended.
    - ``resumed``: parked requests of the new model that go on.
    - ``prepare_s``: seconds in which the previous model was served as before: the download or the
      conversion of a checkpoint, its tokenizer. About 0 for a model that was active before.
    - ``drain_s``, ``unload_s``, ``load_s``, ``warmup_s``, ``total_s``: seconds.
    - ``memory_before_bytes``, ``memory_after_bytes``: device memory in use (on the CPU, resident
      memory of the core's process).
    - ``from_stash``: whether the weights came from host memory instead of a file.
    """

    previous: str
    active: str
    parked: int = 0
    aborted: int = 0
    resumed: int = 0
    prepare_s: float = 0.0
    drain_s: float = 0.0
    unload_s: float = 0.0
    load_s: float = 0.0
    warmup_s: float = 0.0
    total_s: float = 0.0
    memory_before_bytes: int = 0
    memory_after_bytes: int = 0
    from_stash: bool = False


class MultiModelEngine(EngineFront):
    """Serves the active one of several models. Create it with `start`, end it with `stop`.

    What it shares with `AsyncEngine` is that of the active model.
    """

    def __init__(
        self, tokenizer: Tokenizer, core: CoreSupervisor, models: PreparedModels, stash_bytes: int
    ) -> None:
        super().__init__(tokenizer, core)
        self._models = models
        self._stash_bytes = stash_bytes
        self._lock = asyncio.Lock()
        self._parked: dict[str, list[OpenRequest]] = {}

    @classmethod
    async def start(
        cls,
        models: Sequence[ModelEntry],
        *,
        active: str | None = None,
        model_stash_gib: float = 16.0,
        log: LogSettings | None = None,
    ) -> MultiModelEngine:
        """Start the core with the active model; returns when requests can be served.

        ``active`` is the alias of the first active model, by default that of the first entry.
        ``model_stash_gib``: most host memory, in GiB, for the weights of models that are not
        active; a switch to one of these is quick. Raises `ConfigError` for models that one engine
        cannot serve, `UnknownModelError` for an ``active`` that is none of them, and the errors of
        `AsyncEngine.start`.
        """
        prepared = PreparedModels(models)
        stash_gib = number(0, _MAX_STASH_GIB).checked("model_stash_gib", model_stash_gib)
        first = models[0].alias if active is None else prepared.entry_of(active).alias
        tokenizer, core = await start_core(prepared.config_of(first), log)
        prepared.add(first, tokenizer)
        return cls(tokenizer, core, prepared, int(stash_gib * (1 << 30)))

    async def stop(self) -> None:
        """End the core. Requests that still run, or are parked, end with `EngineDead`."""
        await super().stop()
        self._models.close()

    @property
    def active(self) -> str:
        """The alias of the active model."""
        # The engine's own name: it changes in the same instant as tokenizer and longest sequence.
        return self.model_name

    @property
    def aliases(self) -> tuple[str, ...]:
        """The aliases of all models, in their order."""
        return self._models.aliases

    @property
    def entry(self) -> ModelEntry:
        """The active model's entry."""
        return self._models.entry_of(self.active)

    def entry_of(self, alias: str) -> ModelEntry:
        """The entry of a model. Raises `UnknownModelError`, which names those that there are."""
        return self._models.entry_of(alias)

    def totals_of(self, alias: str) -> EngineStats:
        """The totals of a model since the start, active or not; its other values have no meaning.

        Raises `UnknownModelError`.
        """
        return self._core.totals_of(self.entry_of(alias).alias)

    @property
    def is_switching(self) -> bool:
        """Whether a switch has begun to drain. New requests are rejected with
        `SwitchInProgressError`."""
        return bool(self._changes.switching)

    async def prepare_model(self, alias: str) -> float:
        """Prepare a switch to ``alias`` while the active model is served; returns the seconds.

        The checkpoint is downloaded or converted, and its tokenizer loaded, in the first call.
        Raises `UnknownModelError`, and `SwitchFailedError` with the step ``prepare``.
        """
        began = time.monotonic()
        with self._preparing():
            await self._models.prepare(alias)
        return time.monotonic() - began

    async def switch_model(
        self,
        alias: str,
        *,
        running: Running = "wait",
        drain_timeout_s: float = 60.0,
        wait_for_turn: bool = True,
    ) -> SwitchReport:
        """Make ``alias`` the active model; returns when it serves.

        First the model is prepared, see `prepare_model`, and checked: the active one is served
        meanwhile, and stays where settings and files already tell that the other cannot be. Then
        requests that run may end within ``drain_timeout_s`` seconds; new ones are rejected with
        `SwitchInProgressError`. ``running`` says what happens to those that are left then:

        - ``wait``: nothing, the switch fails.
        - ``abort``: they end with the reason ``abort``.
        - ``park``: they are kept by their tokens and go on when their model is active again.
          In fp32, greedy and seeded requests give the tokens that they would have given
          undisturbed; in bf16 a token may differ where two logits are nearly equal, as it may in
          another batch.

        One switch runs at a time; a second one waits for it, or without ``wait_for_turn`` raises
        `SwitchInProgressError`. A switch that has begun goes on when its caller is cancelled. For
        the active model nothing happens.

        Raises `UnknownModelError`, `InvalidRequest` for a wrong argument, `SwitchFailedError` once
        the previous model serves again, and the errors of `AsyncEngine.check_health`.
        """
        self.entry_of(alias)
        _check_arguments(running, drain_timeout_s)
        if self._lock.locked() and not wait_for_turn:
            raise SwitchInProgressError("another switch of models is under way: try again later")
        await self._lock.acquire()
        task = asyncio.ensure_future(self._switch_and_release(alias, running, drain_timeout_s))
        task.add_done_callback(_retrieve)
        return await asyncio.shield(task)

    async def _switch_and_release(
        self, alias: str, running: Running, drain_timeout_s: float
    ) -> SwitchReport:
        try:
            if alias == self.active:
                return SwitchReport(previous=alias, active=alias)
            began = time.monotonic()
            await self.check_health()
            with self._preparing():
                tokenizer = await self._models.prepare(alias)
                await self._changes.check(self._models.config_of(alias))
                await asyncio.to_thread(tokenizer.start_renderer)
            await self.check_health()
            self._changes.switching = (
                f"the engine switches from {self.active} to {alias}: try again in some seconds"
            )
            prepare_s = time.monotonic() - began
            report = await self._switch(alias, tokenizer, running, drain_timeout_s)
            return attrs.evolve(report, prepare_s=prepare_s, total_s=time.monotonic() - began)
        finally:
            self._changes.switching = ""
            try:
                self._models.release_all_but(self.active)
            finally:
                self._lock.release()

    async def _switch(
        self, alias: str, tokenizer: Tokenizer, running: Running, drain_timeout_s: float
    ) -> SwitchReport:
        """The caller's side of a switch, in the order of seed 004, once the model is prepared."""
        began, previous, requests = time.monotonic(), self.active, self._requests
        num_left = await requests.drain(drain_timeout_s)
        drain_s = time.monotonic() - began
        if num_left and running == "wait":
            raise SwitchFailedError(
                f"{num_left} requests still run after {drain_timeout_s:g} s: wait longer, or say "
                "running='abort' or 'park'",
                "drain",
                previous,
            )
        aborted = await requests.abort_all() if running == "abort" else 0
        # A core that has died before this did not die because of the new model.
        await self.check_health()
        parked = requests.park() if running == "park" else []
        try:
            done = await self._reconfigure(alias, tokenizer)
        except Exception:
            if self.is_sleeping:  # it could not be woken up now
                self._parked.setdefault(previous, []).extend(parked)
            else:
                await requests.resume(parked)  # `previous` is active, or they end with an error
            raise
        self._parked.setdefault(previous, []).extend(parked)
        resumed = await requests.resume(self._parked.pop(alias, []))
        return SwitchReport(
            previous=previous,
            active=alias,
            parked=len(parked),
            aborted=aborted,
            resumed=resumed,
            drain_s=drain_s,
            unload_s=done.unload_s,
            load_s=done.load_s,
            warmup_s=done.warmup_s,
            memory_before_bytes=done.memory_before_bytes,
            memory_after_bytes=done.memory_after_bytes,
            from_stash=done.from_stash,
        )

    async def _reconfigure(self, alias: str, tokenizer: Tokenizer) -> Reconfigured:
        """Let the core switch. Raises `SwitchFailedError` once the previous model serves again.

        `EngineRestarting`, then, too, where the core died before it began the switch.
        """
        previous, config = self.active, self._models.config_of(alias)
        try:
            return await self._changes.reconfigure(config, tokenizer, self._stash_bytes)
        except SwitchFailedError as error:
            state = "sleeps" if error.step == "wake" else "is still active"
            raise SwitchFailedError(
                f"{previous} {state}: the switch to {alias} failed in step {error.step}: {error}",
                error.step,
                previous,
            ) from None
        except EngineDead as error:
            has_begun = self._changes.has_begun
            await self.wait_until_recovered()
            if not has_begun:
                raise
            raise SwitchFailedError(
                f"{previous} is active again: the engine core died in the switch to {alias} "
                f"({error})",
                "core",
                previous,
            ) from error

    async def tokenizer_of(self, alias: str) -> Tokenizer:
        """The tokenizer of a model, active or not; loaded with the first call.

        Raises `UnknownModelError`, `ConfigError` for a chat template that cannot be used, and
        `ModelError`.
        """
        return await self._models.tokenizer_of(alias)

    @contextlib.contextmanager
    def _preparing(self) -> Generator[None, None, None]:
        """Turn errors into `SwitchFailedError`: nothing has changed."""
        try:
            yield
        except (ConfigError, ModelError, OSError) as error:
            raise SwitchFailedError(
                f"{self.active} is still active: {error}", "prepare", self.active
            ) from error

    async def wake_up(self) -> None:
        """As `AsyncEngine.wake_up`. A switch to another model wakes the engine up, too."""
        await super().wake_up()
        if not self.is_sleeping:
            await self._requests.resume(self._parked.pop(self.active, []))

    def _check_active(self, model: str | None) -> None:
        """Raises `UnknownModelError`, too."""
        super()._check_active(None if model is None else self.entry_of(model).alias)


def _check_arguments(running: Running, drain_timeout_s: float) -> None:
    one_of(get_args(Running), error=InvalidRequest).checked("running", running)
    limit = number(0, _MAX_DRAIN_SECONDS, error=InvalidRequest)
    limit.checked("drain_timeout_s", drain_timeout_s)


def _retrieve(task: asyncio.Future[SwitchReport]) -> None:
    """Look at a task's error, so that none is reported as lost where the caller was cancelled."""
    if not task.cancelled():
        task.exception()
