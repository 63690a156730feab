"""The process of a rank: an `InProcessExecutor` with a part of the model, called by the core.

It ends with the core: when its connection is closed or, in whatever it does, when the pipe is
closed that only the core has the other end of.
"""

from __future__ import annotations

import datetime
import logging
import os
import queue
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from trencadis.engine.errors import EngineError, RankError
from trencadis.engine.runner.in_process import InProcessExecutor
from trencadis.engine.runner.ranks.rank_messages import (
    Answer,
    Call,
    MessageReader,
    Start,
    StepAnswer,
    digest_of,
    encode,
)

logger = logging.getLogger("trencadis.engine")


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
    calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
    threading.Thread(target=_read_calls, args=(reader, calls), daemon=True).start()
    name = f"rank {start.part.rank}"
    logging.basicConfig(
        # One rank tells what all of them do.
        level=start.log_level if start.part.rank == 0 else max(start.log_level, logging.WARNING),
        format=f"{name}: {start.log_format or '%(message)s'}",
    )
    try:
        dist.init_process_group(
            "gloo",
            init_method=store.as_uri(),
            rank=start.part.rank,
            world_size=start.part.size,
            timeout=datetime.timedelta(seconds=start.limit_s),
        )
        executor = InProcessExecutor(start.config, records=start.records, part=start.part)
        while (call := calls.get()) is not None:
            connection.sendall(_answered(executor, call, start.part.rank))
        logger.debug("%s ends with the core", name)
    except ConnectionError:
        logger.debug("%s ends with the core", name)
    except Exception:
        logger.exception("%s ends", name)
        os._exit(1)  # not after what the other ranks may never answer
    os._exit(0)


def _read_calls(reader: MessageReader, calls: queue.SimpleQueue[Call | None]) -> None:
    """Take each call at once: the core must not wait until a step before it is computed."""
    try:
        while True:
            calls.put(reader.receive())
    except (EOFError, OSError):
        calls.put(None)


def _answered(executor: InProcessExecutor, call: Call, rank: int) -> bytes:
    """Call the executor; returns the encoded answer."""
    try:
        value = _result(executor, call, rank)
        return encode(Answer(call.number, value))
    except Exception as error:
        if not isinstance(error, EngineError):
            logger.exception("Rank %d has failed in %s", rank, call.method)
            error = RankError(f"rank {rank} has failed: {type(error).__name__}: {error}")
        return encode(Answer(call.number, error=error))


def _result(executor: InProcessExecutor, call: Call, rank: int) -> object:
    if call.method == "execute":
        (step,) = call.arguments
        result = executor.execute(step).wait()
        digest = digest_of(step.number, result)
        if rank != 0:
            return StepAnswer(digest, None, None)
        return StepAnswer(digest, result, executor.counters())
    return getattr(executor, call.method)(*call.arguments)


def _end_with_core(pipe: int, directory: Path) -> None:
    os.read(pipe, 1)  # nothing is ever written: it returns when the core has ended
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)
