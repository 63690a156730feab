"""The process of a rank: an `InProcessExecutor` with a part of the model, called by the core.

It ends with the core: when its connection is closed or, in whatever it does, when the pipe is
closed that only the core has the other end of.
"""

from __future__ import annotations

import datetime
import functools
import logging
import os
import queue
import shutil
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from trencadis.engine.errors import EngineError, RankError
from trencadis.engine.ipc.messages import BUSY_SECONDS
from trencadis.engine.runner.in_process import InProcessExecutor
from trencadis.engine.runner.ranks.rank_messages import (
    Answer,
    Call,
    Cold,
    MessageReader,
    Start,
    StepAnswer,
    digest_of,
    encode,
)
from trencadis.engine.runner.step import StepInput

logger = logging.getLogger("trencadis.engine")

_NEXT_STEP_SECONDS = 0.002
"""Longest pause between two steps of a core that schedules ahead, while the first is computed."""

Calls = queue.Queue[Call | None]
"""What the core calls, in order; None once it has ended. Not a ``SimpleQueue``: its ``get`` with a
timeout may wait for ever (CPython 3.11 and 3.12, ``Modules/_queuemodule.c``)."""


def main() -> None:
    """Entry point. Arguments: the descriptors of the connection and of the core's pipe."""
    connection, pipe = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the core to handle
    # transformers would load the parts onto an accelerator that PyTorch sees.
    torch._C._get_accelerator = lambda *_: torch.device("cpu")
    reader = MessageReader(connection)
    try:
        start: Start = reader.receive()
    except (EOFError, OSError):
        return
    store = Path(start.store)
    threading.Thread(target=_end_with_core, args=(pipe, store.parent), daemon=True).start()
    calls: Calls = queue.Queue()
    threading.Thread(target=_read_calls, args=(reader, calls), daemon=True).start()
    name = f"rank {start.part.rank}"
    logging.basicConfig(
        # One rank tells what all of them do.
        level=start.log_level if start.part.rank == 0 else max(start.log_level, logging.WARNING),
        format=f"{name}: {start.log_format or '%(message)s'}",
    )
    try:
        executor = _joined(start, store)
        if isinstance(executor, EngineError):
            _reject(executor, calls, connection)
        else:
            _serve(executor, calls, connection, start.part.rank)
        logger.debug("%s ends with the core", name)
    except ConnectionError:
        logger.debug("%s ends with the core", name)
    except Exception:
        logger.exception("%s ends", name)
        os._exit(1)  # not after what the other ranks may never answer
    os._exit(0)


def _joined(start: Start, store: Path) -> InProcessExecutor | EngineError:
    """An executor whose process is in the group of all ranks, or why its device cannot be used."""
    try:
        executor = InProcessExecutor(start.config, records=start.records, part=start.part)
    except EngineError as error:
        return error
    device = executor.device
    backends = {"cpu": "gloo", device.torch_device.type: device.collectives}
    # One rank may compile for as long as the core waits for it, while another has the program.
    limit_s = start.limit_s if device.shares_host_memory else max(start.limit_s, BUSY_SECONDS)
    dist.init_process_group(
        ",".join(f"{place}:{backend}" for place, backend in backends.items()),
        init_method=store.as_uri(),
        rank=start.part.rank,
        world_size=start.part.size,
        timeout=datetime.timedelta(seconds=limit_s),
    )
    return executor


def _read_calls(reader: MessageReader, calls: Calls) -> None:
    """Take each call at once: the core must not wait until a step before it is computed."""
    try:
        while True:
            calls.put(reader.receive())
    except (EOFError, OSError):
        calls.put(None)


def _reject(error: EngineError, calls: Calls, connection: socket.socket) -> None:
    """Answer each call with ``error``, until the core has ended."""
    while (call := calls.get()) is not None:
        connection.sendall(encode(Answer(call.number, error=error)))


def _serve(executor: InProcessExecutor, calls: Calls, connection: socket.socket, rank: int) -> None:
    """Answer each call in its order, until the core has ended.

    A step is waited for once the next one is started, so that the device has no pause, or if none
    has arrived for a moment. What computes on the host is waited for at once: it has ended.
    """
    most_started = 0 if executor.device.shares_host_memory else 1
    started: deque[tuple[int, Callable[[], object]]] = deque()
    number = 0
    executor.on_cold = lambda shape: connection.sendall(encode(Cold(number, str(shape))))

    def answer_all_but(most: int) -> None:
        while len(started) > most:
            connection.sendall(_answered(*started.popleft(), rank))

    while True:
        try:
            call = calls.get(timeout=_NEXT_STEP_SECONDS if started else None)
        except queue.Empty:
            answer_all_but(0)
            continue
        if call is None:
            return
        number = call.number
        if call.method == "execute":
            has_started, wait = _started(executor, call.arguments[0], rank)
            started.append((number, wait))
            answer_all_but(most_started if has_started else 0)
        else:
            answer_all_but(0)
            connection.sendall(
                _answered(number, functools.partial(_returned, executor, call), rank)
            )


def _started(
    executor: InProcessExecutor, step: StepInput, rank: int
) -> tuple[bool, Callable[[], StepAnswer]]:
    """Start a step; returns whether it was, and what waits for it or raises the error."""
    try:
        pending = executor.execute(step)
    except Exception as error:
        failure = error

        def fail() -> StepAnswer:
            raise failure

        return False, fail

    def wait() -> StepAnswer:
        result = pending.wait()
        digest = digest_of(step.number, result)
        if rank != 0:
            return StepAnswer(digest, None, None)
        return StepAnswer(digest, result, executor.counters())

    return True, wait


def _returned(executor: InProcessExecutor, call: Call) -> object:
    found = getattr(executor, call.method)
    return found(*call.arguments) if callable(found) else found


def _answered(number: int, compute: Callable[[], object], rank: int) -> bytes:
    """The encoded answer: what ``compute`` returns, or its error."""
    try:
        return encode(Answer(number, compute()))
    except Exception as error:
        if not isinstance(error, EngineError):
            logger.exception("Rank %d has failed", rank)
            error = RankError(f"rank {rank} has failed: {type(error).__name__}: {error}")
        return encode(Answer(number, error=error))


def _end_with_core(pipe: int, directory: Path) -> None:
    os.read(pipe, 1)  # nothing is ever written: it returns when the core has ended
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)
