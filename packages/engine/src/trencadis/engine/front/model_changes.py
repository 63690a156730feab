"""Changes of the model that a core serves: sleep, wake up, and another model (seed 004).

Each is a call to the core, which it answers after its steps. Owns whether requests are accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.errors import (
    EngineDead,
    EngineError,
    EngineSleeping,
    InvalidRequest,
    ModelError,
    SwitchFailedError,
    SwitchInProgressError,
)
from trencadis.engine.front.core_supervisor import CoreSupervisor
from trencadis.engine.front.open_requests import OpenRequests
from trencadis.engine.ipc.messages import (
    CheckModel,
    ModelChecked,
    Reconfigure,
    Reconfigured,
    ReconfigureFailed,
    Sleep,
    Slept,
    ToCore,
    WakeUp,
)
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.engine.validators import integer

if TYPE_CHECKING:
    from trencadis.engine.front.tokenizer import Tokenizer


_CHECK_SECONDS = 600.0
"""Longest check of a model: of a GGUF file it reads every byte."""


@attrs.frozen(eq=False)
class _Call:
    """A call that waits for its answer; ``config`` and ``tokenizer`` of the model that it loads.

    ``sleeps``: the core sleeps after it.
    """

    answer: asyncio.Future[Any]
    sleeps: bool
    config: EngineConfig | None
    tokenizer: Tokenizer | None


class ModelChanges:
    """Lets a core sleep, wake up, and serve another model.

    ``use_tokenizer`` is called with the tokenizer of a new model, in the task that reads the core's
    messages. ``switching`` says why no request is accepted, while models are switched;
    ``num_models`` counts the models that were served so far. ``has_begun``: whether the core has
    begun what it was called for last.
    """

    def __init__(
        self,
        core: CoreSupervisor,
        requests: OpenRequests,
        numbers: Iterator[int],
        use_tokenizer: Callable[[Tokenizer], None],
    ) -> None:
        self._core = core
        self._requests = requests
        self._numbers = numbers
        self._use_tokenizer = use_tokenizer
        self._calls: dict[int, _Call] = {}
        self.switching = ""
        self.num_models = 0
        self.is_sleeping = False
        self.has_begun = False
        self._num_falling_asleep = 0

    @property
    def is_calling(self) -> bool:
        """Whether the core has been called and has not answered."""
        return bool(self._calls)

    def check_switching(self) -> None:
        """Raise `SwitchInProgressError` while models are switched."""
        if self.switching:
            raise SwitchInProgressError(self.switching)

    def check_admission(self) -> None:
        """Raise an error while no request is accepted, although the core lives."""
        self.check_switching()
        if self.is_sleeping:
            raise EngineSleeping("the engine sleeps: wake it up, then send the request again")

    async def sleep(self, level: int) -> int:
        """See `AsyncEngine.sleep`."""
        level = integer(1, 2, error=InvalidRequest).checked("level", level)
        self.check_switching()
        self.is_sleeping = True
        try:
            self._num_falling_asleep += 1
            try:
                await self._requests.abort_all()
            finally:
                self._num_falling_asleep -= 1
            slept: Slept = await self._call(lambda number: Sleep(number, 1 if level == 1 else 2))
        except EngineError:
            self.is_sleeping = False
            raise
        return slept.freed_bytes

    async def wake_up(self) -> None:
        """See `AsyncEngine.wake_up`."""
        self.check_switching()
        if self.is_sleeping:
            await self._call(WakeUp)

    async def check(self, config: EngineConfig) -> None:
        """Raise `ModelError` where the core cannot serve the model of ``config``.

        As far as that is known before anything is loaded; requests are served meanwhile. Raises
        `ConfigError` for a configuration that cannot be sent, and the errors of
        `AsyncEngine.check_health`.
        """
        payload = config_payload(config)
        checking = self._call(lambda number: CheckModel(number, payload))
        try:
            checked: ModelChecked = await asyncio.wait_for(checking, _CHECK_SECONDS)
        except asyncio.TimeoutError:
            raise ModelError(
                f"{config.model} could not be read within {_CHECK_SECONDS:.0f} s: check its disk, "
                "or the network"
            ) from None
        if checked.error:
            raise ModelError(checked.error)

    async def reconfigure(
        self, config: EngineConfig, tokenizer: Tokenizer, stash_bytes: int
    ) -> Reconfigured:
        """Serve the model of ``config``. Drain, abort or park the requests before.

        ``stash_bytes``: host memory for the weights of models that are not served. Raises
        `SwitchFailedError` where the previous model serves again, `ConfigError` for a configuration
        that cannot be sent, and the errors of `AsyncEngine.check_health`.
        """
        payload = config_payload(config)
        done: Reconfigured = await self._call(
            lambda number: Reconfigure(number, payload, stash_bytes), config, tokenizer
        )
        return done

    async def _call(
        self,
        message: Callable[[int], ToCore],
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Any:
        """Send a call to the core and wait for its answer. A cancelled wait does not undo it."""
        # Nothing else runs until the call is in the table, where a core that dies ends it.
        self._core.check_health()
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        call = message(number)
        self._calls[number] = _Call(answer, isinstance(call, Sleep), config, tokenizer)
        self.has_begun = False
        await self._core.send(call)
        return await asyncio.shield(answer)

    def begin(self, number: int | None) -> None:
        """The core is busy with the call of this number, if it is one."""
        if number is not None and number == max(self._calls, default=None):
            self.has_begun = True

    def answer(self, message: Reconfigured | ReconfigureFailed | ModelChecked | Slept) -> None:
        """End the call that a message of the core answers."""
        call = self._calls.pop(message.number, None)
        if call is None:
            return
        if isinstance(message, ReconfigureFailed):
            self.is_sleeping = message.step == "wake" or self._will_sleep
            error = SwitchFailedError(message.message, message.step, self._core.config.name)
            end_future(call.answer, error)
            return
        if isinstance(message, Reconfigured):
            # Here, and not by the caller: a core that dies now must restart with this model.
            self.is_sleeping = self._will_sleep
            self._core.use_model(call.config or self._core.config, message.ready)
            if call.tokenizer is not None:
                self.num_models += 1
                self._use_tokenizer(call.tokenizer)
        if isinstance(message, Slept):  # a wake-up may have been answered since the call
            self.is_sleeping = True
        if not call.answer.done():
            call.answer.set_result(message)

    def refuse(self, number: int, error: EngineError) -> None:
        """End a call that the core could not decode."""
        call = self._calls.pop(number, None)
        if call is not None:
            end_future(call.answer, error)

    def end_all(self, error: EngineDead) -> None:
        """End every call, because the core is gone. The one that follows it is awake."""
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            end_future(call.answer, type(error)(*error.args))
        self.is_sleeping = False

    @property
    def _will_sleep(self) -> bool:
        """Whether the core has still to read that it sleeps: what it answers now came before."""
        return self._num_falling_asleep > 0 or any(call.sleeps for call in self._calls.values())


def end_future(future: asyncio.Future[Any], error: EngineError) -> None:
    """Set the error of a future, unless it is done, as after its caller was cancelled."""
    if not future.done():
        future.set_exception(error)
