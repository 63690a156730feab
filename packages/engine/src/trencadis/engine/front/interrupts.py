"""Defers Ctrl-C until the end of a step, so that it never interrupts a change of state."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Generator[Callable[[], None], None, None]:
    """Inside the block, SIGINT is handled where the yielded function is called, or at the end.

    A second SIGINT before that is handled at once. Does nothing outside the main thread, which
    alone gets signals, and where the process ignores SIGINT or leaves it to the operating system.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    pending: list[tuple[int, FrameType | None]] = []

    def defer(number: int, frame: FrameType | None) -> None:
        if pending:
            handler(number, frame)
        else:
            pending.append((number, frame))

    def handle() -> None:
        if pending:
            handler(*pending.pop())

    signal.signal(signal.SIGINT, defer)
    try:
        yield handle
    finally:
        signal.signal(signal.SIGINT, handler)
        handle()
