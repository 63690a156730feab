"""A clock that only the simulation advances."""

from __future__ import annotations


class SimulatedClock:
    """Seconds since the start. Call it to read the time."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now_s += seconds
