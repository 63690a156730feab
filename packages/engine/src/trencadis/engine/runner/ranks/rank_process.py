"""The process of a rank: an `InProcessExecutor` with a part of the model, called by the core.

It ends with the core: when its connection is closed or, in whatever it does, when the pipe is
closed that only the core has the other end of.
"""

from __future__ import annotations

import datetime
import functools
import logging
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from trencadis.engine.errors import EngineError, RankError
from trencadis.engine.ipc.messages import BUSY_SECONDS
from trencadis.engine.runner.executor import ExecutorCounters
from trencadis.engine.runner.in_process import InProcessExecutor
from trencadis.engine.runner.ranks.packed_steps import StepUnpacker
from trencadis.engine.runner.ranks.rank_messages import (
    Answer,
    Call,
    Cold,
    MessageReader,
    Start,
    digest_of,
    encode,
    packed_result,
)
from trencadis.engine.runner.ranks.step_board import RankBoard
from trencadis.engine.runner.step import PendingStep, StepInput, StepResult

logger = logging.getLogger("trencadis.engine")

_NEXT_STEP_SECONDS = 0.002
"""Longest pause between two steps of a core that schedules ahead, while the first is computed."""


class CallQueue:
    """What the core calls, in order: steps from the board, other calls from the connection.

    None once it has ended.
    """

    def __init__(self, board: RankBoard) -> None:
        self._board = board
        self._poll = select.poll()
        self._poll.register(board.event, select.POLLIN)
        self._arrived: deque[Call | None] = deque()
        """From the connection, by another thread."""
        self._ready: deque[Call | None] = deque()
        self._num_told = self._last_call = 0

    def put(self, call: Call | None) -> None:
        """Add what the connection has brought. For one other thread."""
        self._arrived.append(call)
        self._board.tell_of_call()

    def get(self, timeout: float | None = None) -> Call | None:
        """The next call. Raises `TimeoutError` where none comes within ``timeout`` seconds."""
        while not self._ready:
            if not self._poll.poll(None if timeout is None else 1000 * timeout):
                raise TimeoutError
            self._num_told += self._board.wait()
            while self._arrived:
                call = self._arrived.popleft()
                if call is not None:
                    self._read_steps(call.num_steps)
                    self._last_call = call.number
                self._ready.append(call)
            self._read_steps(self._num_told)
        return self._ready.popleft()

    def _read_steps(self, end: int) -> None:
        while self._board.num_read < end:
            message = self._board.read(self._last_call)
            if message is None:  # the call before it is still being received
                return
            number, packed = pickle.loads(message)  # noqa: S301  (of the core)
            self._ready.append(Call(number, "execute", (packed,)))


def main() -> None:
    """Entry point. Arguments: the descriptors of the connection and of the core's pipe."""
    connection, pipe = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the core to handle
    # transformers would load the parts onto an accelerator that PyTorch sees.
    torch._C._get_accelerator = lambda *_: torch.device("cpu")
    # Or transformers makes process groups for each model, whose threads and sockets nothing ends.
    vars(dist)["init_device_mesh"] = functools.cache(device_mesh.init_device_mesh)
    reader = MessageReader(connection)
    try:
        start: Start = reader.receive()
    except (EOFError, OSError):
        return
    store = Path(start.store)
    threading.Thread(target=_end_with_core, args=(pipe, store.parent), daemon=True).start()
    board = RankBoard(start.board, start.part.rank)
    calls = CallQueue(board)
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
            _serve(executor, calls, connection, board, start.part.rank)
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
    device.join_ranks(start.sums, start.part, limit_s)
    return executor


def _read_calls(reader: MessageReader, calls: CallQueue) -> None:
    """Take each call at once: the core must not wait until a step before it is computed."""
    try:
        while True:
            calls.put(reader.receive())
    except (EOFError, OSError):
        calls.put(None)
    except Exception:  # what comes after it cannot be told from the rest of it
        logger.exception("A call cannot be read, and this rank ends")
        os._exit(1)


def _reject(error: EngineError, calls: CallQueue, connection: socket.socket) -> None:
    """Answer each call with ``error``, until the core has ended."""
    while (call := calls.get()) is not None:
        connection.sendall(encode(Answer(call.number, error=error)))


def _serve(
    executor: InProcessExecutor,
    calls: CallQueue,
    connection: socket.socket,
    board: RankBoard,
    rank: int,
) -> None:
    """Answer each call in its order, until the core has ended.

    A step is waited for once the next one is started, so that the device has no pause, or if none
    has arrived for a moment. What computes on the host is waited for at once: it has ended.
    """
    most_started = 0 if executor.device.shares_host_memory else 1
    answers = StepAnswers(executor, connection, board, rank)
    number, steps = 0, StepUnpacker()
    executor.on_cold = lambda shape: connection.sendall(encode(Cold(number, str(shape))))
    while True:
        try:
            call = calls.get(timeout=_NEXT_STEP_SECONDS if answers.num_started else None)
        except TimeoutError:
            answers.send_all_but(0)
            continue
        if call is None:
            return
        number = call.number
        if call.method == "execute":
            has_started = answers.start(number, steps.step(call.arguments[0]))
            answers.send_all_but(most_started if has_started else 0)
        else:
            answers.send_all_but(0)
            connection.sendall(_answered(call, executor, rank))


class StepAnswers:
    """The steps that a rank has started, and their answers.

    Each rank writes the digest to the board. Rank 0 alone sends what was computed, the others
    nothing but errors.
    """

    def __init__(
        self, executor: InProcessExecutor, connection: socket.socket, board: RankBoard, rank: int
    ) -> None:
        self._executor = executor
        self._connection = connection
        self._board = board
        self._rank = rank
        self._started: deque[tuple[int, StepInput, PendingStep | Exception]] = deque()
        self._counters: ExecutorCounters | None = None
        self._num_answered = 0

    @property
    def num_started(self) -> int:
        return len(self._started)

    def start(self, number: int, step: StepInput) -> bool:
        """Start the step of the call with this number; returns whether it was."""
        pending: PendingStep | Exception
        try:
            pending = self._executor.execute(step)
        except Exception as error:
            pending = error
        self._started.append((number, step, pending))
        return not isinstance(pending, Exception)

    def send_all_but(self, most: int) -> None:
        """Wait for the steps that were started, and answer them, until ``most`` are left."""
        while len(self._started) > most:
            number, step, pending = self._started.popleft()
            self._num_answered += 1
            message = None
            try:
                if isinstance(pending, Exception):
                    raise pending
                result = pending.wait()
                if self._rank == 0:
                    message = encode(Answer(number, self._packed(result)))
            except Exception as error:
                self._connection.sendall(_failed(number, error, self._rank))
                continue
            self._board.answer(self._num_answered, digest_of(step, result))
            if message is not None:
                self._connection.sendall(message)

    def _packed(self, result: StepResult) -> tuple[Any, ...]:
        counters, before = self._executor.counters(), self._counters
        self._counters = counters
        return packed_result(result, None if counters == before else counters)


def _answered(call: Call, executor: InProcessExecutor, rank: int) -> bytes:
    """The encoded answer: what the method returns, or its error."""
    try:
        found = getattr(executor, call.method)
        return encode(Answer(call.number, found(*call.arguments) if callable(found) else found))
    except Exception as error:
        return _failed(call.number, error, rank)


def _failed(number: int, error: Exception, rank: int) -> bytes:
    if not isinstance(error, EngineError):
        logger.error("Rank %d has failed", rank, exc_info=error)
        error = RankError(f"rank {rank} has failed: {type(error).__name__}: {error}")
    return encode(Answer(number, error=error))


def _end_with_core(pipe: int, directory: Path) -> None:
    os.read(pipe, 1)  # nothing is ever written: it returns when the core has ended
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)
