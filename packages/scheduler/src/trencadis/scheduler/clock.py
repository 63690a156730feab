"""A clock that never runs backwards, around a clock that may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.validators import is_finite

Clock: TypeAlias = Callable[[], float]
"""Returns seconds. Only differences have a meaning, as with `time.monotonic`."""


class SteadyClock:
    """Seconds since it was made. A backward step of ``clock`` counts as no time. Thread-safe.

    `time.monotonic` does not step back, but a caller may pass another clock, and a virtual machine
    may migrate. The length of a backward step is unknown: a reader that compares two times must
    check whether the number of steps has changed between them. Raises `ConfigError` for anything
    but a function that returns a number.
    """

    def __init__(self, clock: Clock) -> None:
        now_s = clock() if callable(clock) else None
        if not is_finite(now_s):
            returned = f", which returns {now_s!r}" if callable(clock) else ""
            raise ConfigError(
                f"clock must be a function that returns seconds, got {clock!r}{returned}: pass one "
                "such as time.monotonic",
                "clock",
            )
        self._clock = clock
        self._lock = threading.Lock()
        self._last_s = now_s
        self._offset_s = -self._last_s
        self._backward_steps = 0

    def read(self) -> tuple[float, int]:
        """Seconds since the clock was made, and the number of backward steps so far."""
        with self._lock:
            raw_s = self._clock()
            if raw_s < self._last_s:
                self._offset_s += self._last_s - raw_s
                self._backward_steps += 1
            self._last_s = raw_s
            return raw_s + self._offset_s, self._backward_steps
