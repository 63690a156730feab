"""The engine core in a process of its own: receive, step, report, until told to stop."""

from __future__ import annotations

import logging
import os
import signal
from concurrent.futures import Future
from typing import TYPE_CHECKING

import attrs

from trencadis.engine.config import EngineConfig
from trencadis.engine.errors import ConfigError, EngineOverloaded, InvalidRequest, ModelError
from trencadis.engine.ipc.channel import CoreChannel
from trencadis.engine.ipc.messages import (
    Abort,
    Add,
    Control,
    Controlled,
    Failed,
    Finish,
    Ready,
    Rejected,
    StepDone,
    Stop,
    ToCore,
)
from trencadis.scheduler import BatchControlResult, ControlError

if TYPE_CHECKING:
    from trencadis.engine.core.engine_core import EngineCore

logger = logging.getLogger("trencadis.engine")

_IDLE_SECONDS = 1.0
"""How often an idle core looks whether its front is still alive, and tells it how it stands."""

_WARMING_SECONDS = 0.1
"""How often one that warms up behind traffic looks whether the next bucket can begin."""


@attrs.frozen
class LogSettings:
    """How the core's process logs: the front's level and format."""

    level: int = logging.INFO
    format: str = "%(levelname)s %(asctime)s %(name)s] %(message)s"
    datefmt: str = "%m-%d %H:%M:%S"


def run_core(config: EngineConfig, to_core: str, from_core: str, log: LogSettings) -> None:
    """Entry point of the process. Sends `Ready` or `Failed` before anything else."""
    # A group of its own: Ctrl-C in a terminal does not reach it, since the front decides when the
    # core ends, and what ends it ends the compilers that it has started, too.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=log.level, format=log.format, datefmt=log.datefmt)
    channel = CoreChannel(to_core, from_core)
    front = os.getppid()
    try:
        _serve(config, channel, front)
    except ConfigError as error:
        channel.send(Failed("config", str(error)))
    except ModelError as error:
        channel.send(Failed("model", str(error)))
    except Exception as error:
        logger.exception("The engine core stops")
        channel.send(Failed("internal", f"{type(error).__name__}: {error}"))
    finally:
        channel.close()


def _serve(config: EngineConfig, channel: CoreChannel, front: int) -> None:
    # Imported here, so that the front, which imports this module, does not wait for PyTorch.
    from trencadis.engine.core.engine_core import EngineCore  # noqa: PLC0415

    core = EngineCore(config)
    try:
        report = core.warm_up(stop=lambda: os.getppid() != front)
        channel.send(
            Ready(
                max_model_len=core.max_model_len,
                num_blocks=core.worker.num_blocks,
                block_size=config.block_size,
                dtype=str(core.worker.dtype).removeprefix("torch."),
                device=core.device.name,
                num_buckets=core.worker.num_buckets,
                warmup_seconds=report.seconds if report is not None else 0.0,
            )
        )
        _loop(core, channel, front)
    finally:
        core.close()


def _loop(core: EngineCore, channel: CoreChannel, front: int) -> None:
    orders: _Orders = {}
    while os.getppid() == front:
        for message in channel.receive(_patience(core)):
            if isinstance(message, Stop):
                return
            _apply(core, channel, message, orders)
        core.advance_warm_up()
        tokens = core.step() if core.has_work else []
        _answer(orders, channel)
        channel.send(StepDone(tuple(tokens), core.stats))
    logger.warning("The front is gone: the engine core stops")


def _patience(core: EngineCore) -> float:
    """Seconds to wait for a message."""
    if core.has_work:
        return core.pause_s
    return _WARMING_SECONDS if core.is_warming_up else _IDLE_SECONDS


_Orders = dict[int, Future[BatchControlResult]]
"""Orders that have not been answered yet, by number."""


def _apply(core: EngineCore, channel: CoreChannel, message: ToCore, orders: _Orders) -> None:
    if isinstance(message, Add):
        try:
            core.add(message.key, message.prompt_token_ids, message.params, message.priority)
        except EngineOverloaded as error:
            channel.send(Rejected(message.key, str(error), overloaded=True))
        except InvalidRequest as error:
            channel.send(Rejected(message.key, str(error), field=error.field))
    elif isinstance(message, Abort):
        for key in message.keys:
            core.abort(key)
    elif isinstance(message, Finish):
        core.finish(message.key, message.index)
    elif isinstance(message, Control):
        try:
            orders[message.number] = core.control(message.order)
        except InvalidRequest as error:
            channel.send(Controlled(message.number, None, str(error), error.field))


def _answer(orders: _Orders, channel: CoreChannel) -> None:
    """Tell the front of the orders that have been carried out, or refused."""
    for number, future in tuple(orders.items()):
        if not future.done():
            continue
        del orders[number]
        error = future.exception()
        if error is None:
            channel.send(Controlled(number, future.result()))
        else:
            field = "target_temp_c" if isinstance(error, ControlError) else "max_num_seqs"
            channel.send(Controlled(number, None, str(error), field))
