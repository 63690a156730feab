"""Time that passes only when somebody says so."""

from __future__ import annotations


class SimulatedClock:
    """Seconds since the start; call it to read it."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds
