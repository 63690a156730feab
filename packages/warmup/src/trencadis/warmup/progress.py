"""A progress bar on a terminal, silence elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], total: int, description: str) -> Iterator[T]:
    """Yield ``items``, drawing a bar on standard error where that is a terminal.

    The bar needs ``rich`` (extra ``progress``); without it the items just pass.
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
    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield from bar.track(items, total=total, description=description)
