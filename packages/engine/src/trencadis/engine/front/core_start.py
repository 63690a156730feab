"""The core's process as the front sees it: waiting until it serves, and ending it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from trencadis.engine.errors import ConfigError, EngineDead, ModelError
from trencadis.engine.ipc.channel import FrontChannel
from trencadis.engine.ipc.messages import Failed, Ready

if TYPE_CHECKING:
    from trencadis.engine.front.tokenizer import Tokenizer

_START_SECONDS = 3600.0
"""Longest start: a large model with every graph to compile takes tens of minutes on Gaudi."""

POLL_SECONDS = 0.5
"""How often a silent core is looked at."""


def load_tokenizer(source: str) -> Tokenizer:
    """The model's tokenizer."""
    from trencadis.engine.front.tokenizer import Tokenizer  # noqa: PLC0415  (imports transformers)

    return Tokenizer.load(source)


async def await_ready(channel: FrontChannel, process: BaseProcess) -> Ready:
    """What the core says once it serves.

    Raises `ConfigError` or `ModelError` where it cannot serve the model, else `EngineDead`.
    """
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        message = await channel.receive(POLL_SECONDS)
        if isinstance(message, Ready):
            return message
        if isinstance(message, Failed):
            kinds = {"config": ConfigError, "model": ModelError}
            raise kinds.get(message.kind, EngineDead)(message.message)
        if message is None and not process.is_alive():
            raise EngineDead(f"the engine core ended at start with exit code {process.exitcode}")
    raise EngineDead(f"the engine core was not ready within {_START_SECONDS:.0f} s")


async def end(process: BaseProcess, patience: float = 0.0) -> None:
    """Wait for the process to end, then make it, and with it all that it has started."""
    await asyncio.to_thread(process.join, patience)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.is_alive() and process.pid is not None:
            _signal_group(process.pid, number)
            await asyncio.to_thread(process.join, 2.0)


def _signal_group(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)
    except ProcessLookupError:  # it has no group of its own yet
        os.kill(leader, number)
