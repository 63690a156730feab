"""Streams and events, in name: work on the stand-in is in one order.

Source: ``habana_frameworks/torch/hpu/streams.py`` and ``events.py``.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from gaudi_standin.bridge import BRIDGE

__all__ = ["Event", "Stream", "current_stream", "default_stream", "set_stream", "stream"]


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        BRIDGE.synchronize()


class Stream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        BRIDGE.synchronize()


_DEFAULT = Stream()
_current = [_DEFAULT]


def current_stream(device: object = None) -> Stream:
    return _current[-1]


def default_stream(device: object = None) -> Stream:
    return _DEFAULT


def set_stream(stream: Stream) -> None:
    _current[-1] = stream


@contextmanager
def stream(stream: Stream | None) -> Generator[None, None, None]:
    _current.append(stream or _current[-1])
    try:
        yield
    finally:
        _current.pop()
