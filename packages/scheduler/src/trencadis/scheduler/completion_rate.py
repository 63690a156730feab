"""The completion rate of sequences, which predicts how long a new request waits to start."""

from __future__ import annotations

from trencadis.scheduler.moving_average import moving_average


class CompletionRate:
    """Averages the interval between finished sequences, in seconds."""

    def __init__(self) -> None:
        self._num_finished = 0
        self._last_finished_s = 0.0
        self._interval_s: float | None = None

    def update(self, num_finished: int, now: float) -> None:
        """Take the number of sequences that have finished since the start, at ``now`` (seconds)."""
        num_new = num_finished - self._num_finished
        if not num_new:
            return
        interval_s = (now - self._last_finished_s) / num_new
        average_s = interval_s if self._interval_s is None else self._interval_s
        self._interval_s = moving_average(average_s, interval_s)
        self._last_finished_s = now
        self._num_finished = num_finished

    def expected_wait_s(self, now: float) -> float:
        """Seconds that a new request waits until a sequence finishes.

        This is never less than the time since the last sequence finished.
        """
        return max(now - self._last_finished_s, self._interval_s or 0.0)
