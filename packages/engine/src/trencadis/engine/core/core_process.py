"""The engine core's process: receives messages, runs steps, sends tokens, until told to stop."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import attrs
from typing_extensions import assert_never

from trencadis.engine.core.adapter_loads import AdapterLoad, AdapterLoads
from trencadis.engine.errors import (
    AdapterError,
    ConfigError,
    EngineOverloaded,
    InvalidRequest,
    ModelError,
    SwitchFailedError,
    shown,
)
from trencadis.engine.ipc.channel import CoreChannel, Undecodable
from trencadis.engine.ipc.messages import (
    Abort,
    AdaptersChanged,
    Add,
    AddPooling,
    Busy,
    CheckModel,
    Control,
    Controlled,
    Failed,
    Finish,
    Inspect,
    Inspected,
    LoadAdapter,
    ModelChecked,
    Preempt,
    Preempted,
    Ready,
    Reconfigure,
    Reconfigured,
    ReconfigureFailed,
    Rejected,
    RequestError,
    Sleep,
    Slept,
    StepDone,
    Stop,
    UnloadAdapter,
    WakeUp,
)
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.scheduler import BatchControlResult, ControlError

if TYPE_CHECKING:
    from trencadis.engine.core.engine_core import EngineCore
    from trencadis.engine.core.reconfigure import ModelSwitcher

logger = logging.getLogger("trencadis.engine")

_IDLE_SECONDS = 1.0
"""Period in which an idle core checks that its front is alive and sends its stats."""

_STATS_SECONDS = 0.1
"""Period in which a busy core sends its stats."""

_WARMING_SECONDS = 0.1
"""Period in which an idle core checks whether the next bucket can be warmed up."""

_CHECKING_SECONDS = 0.02
"""Period in which an idle core looks for what threads have checked or read."""


@attrs.frozen
class LogSettings:
    """Log level and format of the core's process, taken from the front."""

    level: int = logging.INFO
    format: str = "%(levelname)s %(asctime)s %(name)s] %(message)s"
    datefmt: str = "%m-%d %H:%M:%S"


Adapters = Mapping[str, Mapping[str, str]]
"""The directories of the adapters of models by their names, see `EngineCore`."""


def run_core(
    config: EngineConfig,
    to_core: str,
    from_core: str,
    front: int,
    log: LogSettings,
    adapters: Adapters,
) -> None:
    """Entry point of the process. Sends `Ready` or `Failed` before anything else.

    ``front``: the process that has started this one, which ends once that has ended. It may have by
    now, so that the parent of this process is another one.
    """
    # Its own process group: Ctrl-C in a terminal does not reach the core, because the front decides
    # when it ends, and killing the group also ends the compilers that the core has started.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=log.level, format=log.format, datefmt=log.datefmt)
    channel = CoreChannel(to_core, from_core)
    try:
        _serve(config, channel, front, adapters)
    except ConfigError as error:
        channel.send(Failed("config", str(error)))
    except ModelError as error:
        channel.send(Failed("model", str(error)))
    except Exception as error:
        logger.exception("The engine core stops")
        channel.send(Failed("internal", f"{type(error).__name__}: {error}"))
    finally:
        channel.close()


def _serve(config: EngineConfig, channel: CoreChannel, front: int, adapters: Adapters) -> None:
    # Imported here because the front imports this module and must not wait for PyTorch.
    from trencadis.engine.core.engine_core import EngineCore  # noqa: PLC0415
    from trencadis.engine.core.reconfigure import ModelSwitcher  # noqa: PLC0415

    core = EngineCore(config, adapters=adapters)
    try:
        core.on_busy = lambda reason, limit_s: channel.send(Busy(reason, limit_s))
        report = core.warm_up(stop=lambda: os.getppid() != front)
        channel.send(_ready(core, report.seconds if report is not None else 0.0))
        _loop(core, channel, front, ModelSwitcher(core, lambda: os.getppid() != front))
    finally:
        core.close()


def _ready(core: EngineCore, warmup_seconds: float) -> Ready:
    return Ready(
        max_model_len=core.max_model_len,
        num_blocks=core.facts.limits.num_blocks,
        block_size=core.config.block_size,
        dtype=core.facts.dtype,
        device=core.executor.device_facts.name,
        num_buckets=core.facts.num_buckets,
        warmup_seconds=warmup_seconds,
        embedding_size=core.facts.embedding_size,
        scoring=core.spec.scoring,
        text_prompts=core.spec.text_prompts,
        adapters=tuple(adapter.info for adapter in core.adapters),
    )


def _loop(core: EngineCore, channel: CoreChannel, front: int, switcher: ModelSwitcher) -> None:
    orders: _Orders = {}
    checks: _Checks = {}
    loads = AdapterLoads()
    last_call = -1
    channel.send(StepDone((), core.stats))
    stats_due_s = 0.0
    while os.getppid() == front:
        for message in channel.receive(_receive_timeout(core, polls=bool(checks or loads.names))):
            if isinstance(message, Stop):
                return
            if isinstance(message, (Reconfigure, Sleep, WakeUp)):
                if message.number <= last_call:  # the front numbers its calls upwards
                    logger.warning("Call %d was received twice and is ignored", message.number)
                    continue
                last_call = message.number
                _refuse_orders(channel, orders)
                _refuse_loads(channel, loads)
                channel.send(StepDone((), core.stats))  # the last totals of this model, if it goes
                channel.send(Busy("the engine core changes its model", number=message.number))
                channel.send(_change_model(core, switcher, message))
            elif isinstance(message, CheckModel):
                checks[message.number] = _begin_check(switcher, message)
            else:
                _handle(core, channel, message, orders, loads)
        if checks or loads.names:
            _send_checked(checks, channel)
            _add_loaded(core, channel, loads)
        if core.executor.is_warming_up:
            channel.send(Busy("the engine core warms up"))
            core.advance_warm_up()
        tokens = core.step() if core.has_work else []
        for failure in core.take_failures():
            channel.send(failure)
        if orders:
            _send_results(orders, channel)
            stats_due_s = 0.0  # what the orders changed shows at once
        now_s = time.monotonic()
        stats = None
        if now_s >= stats_due_s or not core.has_work:
            stats, stats_due_s = core.stats, now_s + _STATS_SECONDS
        channel.send(StepDone(tuple(tokens), stats))
    logger.warning("The front process has ended: the engine core stops")


def _receive_timeout(core: EngineCore, *, polls: bool) -> float:
    """Seconds to wait for the next message. ``polls``: a thread may have a result."""
    if core.has_work:
        return core.pause_s
    if polls:
        return _CHECKING_SECONDS
    return _WARMING_SECONDS if core.executor.is_warming_up else _IDLE_SECONDS


_Orders = dict[int, Future[BatchControlResult]]
"""Results of orders that were not sent yet, by order number."""


_Checks = dict[int, "Future[str]"]
"""Errors of models that are checked, by the numbers of the calls."""


def _begin_check(switcher: ModelSwitcher, message: CheckModel) -> Future[str]:
    """Check a model beside the steps: reading a checkpoint's files may take seconds."""
    result: Future[str] = Future()

    def check() -> None:
        try:
            switcher.check(message.config)
        except (ConfigError, ModelError) as error:
            result.set_result(str(error))
        except Exception as error:
            logger.exception("A model could not be checked")
            result.set_result(f"{type(error).__name__}: {error}")
        else:
            result.set_result("")

    # A daemon, since what it reads may be on a file system that no longer answers.
    threading.Thread(target=check, name="check-model", daemon=True).start()
    return result


def _send_checked(checks: _Checks, channel: CoreChannel) -> None:
    for number, result in tuple(checks.items()):
        if result.done():
            del checks[number]
            channel.send(ModelChecked(number, result.result()))


def _handle(
    core: EngineCore,
    channel: CoreChannel,
    message: Add
    | AddPooling
    | Abort
    | Finish
    | Control
    | Preempt
    | Inspect
    | LoadAdapter
    | UnloadAdapter
    | Undecodable,
    orders: _Orders,
    loads: AdapterLoads,
) -> None:
    if isinstance(message, Undecodable):
        _refuse(channel, message)
    elif isinstance(message, (Add, AddPooling)):
        _add(core, channel, message)
    elif isinstance(message, Abort):
        for key in message.keys:
            core.abort(key)
    elif isinstance(message, Finish):
        core.finish(message.key, message.index)
    elif isinstance(message, Preempt):
        channel.send(Preempted(message.number, core.abort_and_swap(message.keys)))
    elif isinstance(message, Inspect):
        channel.send(_inspect(core, message.number))
    elif isinstance(message, (LoadAdapter, UnloadAdapter)):
        _change_adapters(core, channel, message, loads)
    elif isinstance(message, Control):
        try:
            orders[message.number] = core.control(message.order)
        except InvalidRequest as error:
            channel.send(Controlled(message.number, None, str(error), error.field))
    else:
        assert_never(message)


def _add(core: EngineCore, channel: CoreChannel, message: Add | AddPooling) -> None:
    try:
        core.add(message.key, message.request)
    except EngineOverloaded as error:
        channel.send(Rejected(message.key, str(error), overloaded=True))
    except InvalidRequest as error:
        channel.send(Rejected(message.key, str(error), error.field, sleeping=core.is_asleep))
    except Exception as error:
        logger.exception("Request %s could not be added", message.key)
        channel.send(RequestError(message.key, f"{type(error).__name__}: {error}"))


def _inspect(core: EngineCore, number: int) -> Inspected:
    """The answer to `Inspect`. Never raises: an error of an inspection must not end the core."""
    try:
        return Inspected(number, core.inspect())
    except Exception as error:
        logger.exception("The core could not be inspected")
        return Inspected(number, None, f"{type(error).__name__}: {error}")


def _change_adapters(
    core: EngineCore,
    channel: CoreChannel,
    message: LoadAdapter | UnloadAdapter,
    loads: AdapterLoads,
) -> None:
    """Unload an adapter, or begin to read one, for which `_add_loaded` sends the answer."""
    name, number = message.name, message.number
    if isinstance(message, UnloadAdapter):
        channel.send(_adapters_after(core, number, partial(_unload, core, loads, name)))
        return

    def begin() -> None:
        reader = core.adapter_reader(name, message.path, message.within)
        loads.begin(number, name, message.path, reader)

    refusal = _refusal(number, begin)
    if refusal is not None:
        channel.send(refusal)


def _unload(core: EngineCore, loads: AdapterLoads, name: str) -> None:
    if name in loads.names:
        raise AdapterError(f"the adapter {shown(name)} is being loaded: wait for that", "lora_name")
    core.unload_adapter(name)


def _add_loaded(core: EngineCore, channel: CoreChannel, loads: AdapterLoads) -> None:
    """Add the adapters that were read meanwhile, and answer their orders."""
    for load in loads.take_ended():

        def add(load: AdapterLoad = load) -> None:
            core.add_adapter(load.name, load.path, load.take())

        channel.send(_adapters_after(core, load.number, add))


def _refuse_loads(channel: CoreChannel, loads: AdapterLoads) -> None:
    """Answer the orders to load adapters: what is read is for a model that goes."""
    for load in loads.drop_all():
        reason = (
            f"the adapter {shown(load.name)} was not loaded, since the engine changed its model"
        )
        channel.send(AdaptersChanged(load.number, error=f"{reason} or slept: load it again"))


def _adapters_after(core: EngineCore, number: int, change: Callable[[], object]) -> AdaptersChanged:
    """Change the adapters; returns the answer. Never raises: the core goes on."""
    refusal = _refusal(number, change)
    return refusal or AdaptersChanged(number, tuple(adapter.info for adapter in core.adapters))


def _refusal(number: int, change: Callable[[], object]) -> AdaptersChanged | None:
    """Why a change of the adapters was rejected, if it was."""
    try:
        change()
    except InvalidRequest as error:
        return AdaptersChanged(number, error=str(error), field=error.field)
    except Exception as error:
        logger.exception("An adapter could not be changed")
        return AdaptersChanged(number, error=f"{type(error).__name__}: {error}", is_internal=True)
    return None


def _change_model(
    core: EngineCore, switcher: ModelSwitcher, message: Reconfigure | Sleep | WakeUp
) -> Reconfigured | ReconfigureFailed | Slept:
    """Switch models, sleep or wake up; returns the answer. Raises if the core cannot go on."""
    number = message.number
    if isinstance(message, Sleep):
        return Slept(number, switcher.sleep(message.level))
    try:
        if isinstance(message, WakeUp):
            switcher.wake_up()
            return Reconfigured(number, _ready(core, 0.0))
        result = switcher.reconfigure_engine(message.config, message.stash_bytes)
    except SwitchFailedError as error:
        return ReconfigureFailed(number, error.step, str(error))
    return Reconfigured(number, _ready(core, result.warmup_s), **attrs.asdict(result))


def _refuse_orders(channel: CoreChannel, orders: _Orders) -> None:
    """Answer the orders that no step will carry out, because the scheduler is replaced."""
    for number in orders:
        channel.send(Controlled(number, None, "the engine switches models: give the order again"))
    orders.clear()


def _refuse(channel: CoreChannel, message: Undecodable) -> None:
    """Answer the sender of a message that could not be decoded, if its id could be read."""
    reason = f"the engine core cannot read this request: {message.reason}"
    if message.key is not None:
        channel.send(Rejected(message.key, reason))
    if message.number is not None:
        channel.send(Controlled(message.number, None, reason))


def _send_results(orders: _Orders, channel: CoreChannel) -> None:
    """Send the results of orders that have been carried out or rejected."""
    for number, future in tuple(orders.items()):
        if not future.done():
            continue
        del orders[number]
        error = future.exception()
        if error is None:
            channel.send(Controlled(number, future.result()))
        else:
            field = error.field if isinstance(error, ControlError) else None
            channel.send(Controlled(number, None, str(error), field))
