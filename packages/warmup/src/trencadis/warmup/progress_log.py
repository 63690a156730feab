"""Log lines with the remaining time of a stage, for logs without a progress bar.

The line of each bucket says how many there are, but not how long they take.
"""

from __future__ import annotations

import logging

import attrs

logger = logging.getLogger("trencadis.warmup")

_SECONDS_BETWEEN = 30.0
"""A line of progress comes after this many seconds of work at the earliest: few among the lines of
the buckets, and one for each bucket where a bucket is compiled for minutes."""


@attrs.define
class ProgressLog:
    """Counts the buckets or graphs of a stage, and logs progress now and then.

    Those that are left are estimated at the mean time so far. ``what``: their name in the plural.
    """

    what: str
    total: int
    done: int = 0
    seconds: float = 0.0
    _logged_at: float = 0.0

    def advance(self, seconds: float) -> None:
        """One more is done, which took so many seconds."""
        self.done += 1
        self.seconds += seconds
        left = self.total - self.done
        if left and self.seconds - self._logged_at >= _SECONDS_BETWEEN:
            self._logged_at = self.seconds
            logger.info(
                "Warmup: %d of %d %s after %.0f secs, the others take about %.0f secs",
                self.done,
                self.total,
                self.what,
                self.seconds,
                left * self.seconds / self.done,
            )
