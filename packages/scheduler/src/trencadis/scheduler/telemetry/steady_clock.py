"""A clock that never runs backwards, around one that might."""

from __future__ import annotations

import threading

from trencadis.scheduler.telemetry.config import Clock


class SteadyClock:
    """Seconds that never decrease. A step back of the inner clock counts as no time at all.

    `time.monotonic` does not step back, but a host may hand in another clock, and a migrated
    virtual machine has surprised people before. How long the step took is unknown, so whoever
    compares times across one must doubt them: ``steps`` counts how many there were.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last_s = clock()
        self._offset_s = 0.0
        self._steps = 0

    def now(self) -> tuple[float, int]:
        """The time, in seconds, and how many steps back have been seen so far."""
        with self._lock:
            raw_s = self._clock()
            if raw_s < self._last_s:
                self._offset_s += self._last_s - raw_s
                self._steps += 1
            self._last_s = raw_s
            return raw_s + self._offset_s, self._steps
