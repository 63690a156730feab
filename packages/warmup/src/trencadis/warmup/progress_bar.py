"""A progress bar with the remaining time on a terminal; no output elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], total: int, description: str) -> Iterator[T]:
    """Yield ``items`` and draw a progress bar if standard error is a terminal.

    The bar needs ``rich`` (extra ``progress``); without it there is no bar. Log lines that go to
    the terminal meanwhile appear above the bar.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        from rich.console import Console  # noqa: PLC0415  (optional, and only for a terminal)
        from rich.progress import Progress  # noqa: PLC0415
    except ImportError:
        yield from items
        return
    terminal = sys.stderr
    with Progress(console=Console(stderr=True), transient=True) as bar, _logs_above(terminal):
        yield from bar.track(items, total=total, description=description)


@contextmanager
def _logs_above(terminal: object) -> Iterator[None]:
    """Redirect log handlers of the terminal to ``sys.stderr``, which prints above the bar."""
    candidates = (*logging.getLogger().handlers, *logging.getLogger("trencadis").handlers)
    redirected = [
        (handler, handler.stream)
        for handler in candidates
        if isinstance(handler, logging.StreamHandler) and handler.stream is terminal
    ]
    for handler, _ in redirected:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler, stream in redirected:
            handler.setStream(stream)
