"""Warms up buckets in the background, while requests are being served."""

from __future__ import annotations

import logging
import threading
import time

from trencadis.bucketing import Bucket
from trencadis.engine.runner.grids import Grids
from trencadis.warmup import BackgroundWarmup, Phase, Runtime

logger = logging.getLogger("trencadis.engine")

_MAX_DELAY_SECONDS = 30.0
"""Under continuous traffic, one bucket is warmed up at least this often."""


class BackgroundWarmupLoop:
    """Warms up one bucket at a time, most wanted first, when the core is idle.

    ``in_thread``: in a thread beside the step loop, so that a request that arrives meanwhile is
    served at once. Otherwise in the step loop, for devices that only one thread may use.
    """

    def __init__(self, runtime: Runtime, grids: Grids, *, in_thread: bool) -> None:
        self._warmup = BackgroundWarmup(runtime, grids.prompt.buckets, grids.decode.buckets)
        self._in_thread = in_thread
        self._thread: threading.Thread | None = None
        self._last_started_s = time.monotonic()
        self._failed = False

    @property
    def is_running(self) -> bool:
        """Whether buckets are left to warm up."""
        # The thread may be at work: `progress` reads counters only, never a changing collection.
        progress = self._warmup.progress
        return not self._failed and progress.done < progress.total

    def warm_up_first(self) -> None:
        """Warm up the first bucket of each phase. Requests can be served from then on."""
        while not self._warmup.ready:
            self._warmup.advance()

    def advance(self, *, idle: bool) -> None:
        """Start to warm up the next bucket.

        While the core is not ``idle``, only if none was started for half a minute.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        if not self.is_running or not (idle or self._is_overdue()):
            return
        self._last_started_s = time.monotonic()
        if self._in_thread:
            # A daemon thread, so that stopping the server does not wait for a compiler.
            self._thread = threading.Thread(target=self._advance, name="warm-up", daemon=True)
            self._thread.start()
        else:
            self._advance()

    def record_miss(self, phase: Phase, bucket: Bucket) -> None:
        """Count a bucket that live traffic needed before it was warmed up, to raise its rank."""
        self._warmup.record_miss(phase, bucket)

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._last_started_s > _MAX_DELAY_SECONDS

    def _advance(self) -> None:
        try:
            self._warmup.advance()
        except Exception:
            logger.exception("Background warm-up failed and stops; requests are still served")
            self._failed = True
