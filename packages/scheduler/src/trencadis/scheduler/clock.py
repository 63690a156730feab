"""Time that never runs backwards, made of a clock that may."""

from __future__ import annotations

from collections.abc import Callable


class SteadyTime:
    """Seconds since the first call. A step back of ``clock`` counts as no time at all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._elapsed = 0.0

    def now(self) -> float:
        reading = self._clock()
        self._elapsed += max(0.0, reading - self._last)
        self._last = reading
        return self._elapsed
