"""Buckets made ready while requests are served already."""

from __future__ import annotations

import logging
import threading
import time

from trencadis.bucketing import Bucket
from trencadis.engine.grids import Grids
from trencadis.warmup import BackgroundWarmup, Phase, Progress, Runtime

logger = logging.getLogger("trencadis.engine")

_PATIENCE_SECONDS = 30.0
"""Traffic without a pause may hold a bucket up for so long; then the next one is made ready."""


class BackgroundPreparation:
    """Makes one bucket after another ready, when nothing else is to be done.

    ``in_thread``: beside the loop that serves, so that a request which arrives meanwhile is served
    at once; else in the loop, on a device that only one thread may use.
    """

    def __init__(self, runtime: Runtime, grids: Grids, *, in_thread: bool) -> None:
        self._warmup = BackgroundWarmup(runtime, grids.prompt.buckets, grids.decode.buckets)
        self._in_thread = in_thread
        self._thread: threading.Thread | None = None
        self._last_s = time.monotonic()
        self._ended = False

    @property
    def progress(self) -> Progress:
        """How many buckets are ready."""
        return self._warmup.progress

    @property
    def unfinished(self) -> bool:
        """Whether there is anything left to do."""
        # Asked while the thread works: what it changes is counted, not looked through.
        progress = self._warmup.progress
        return not self._ended and progress.done < progress.total

    def prepare_first(self) -> None:
        """Make the first bucket of each phase ready: from then on requests can be served."""
        while not self._warmup.ready:
            self._warmup.advance()

    def advance(self, *, idle: bool) -> None:
        """Make the next bucket ready, or see that the thread does.

        Where the loop is not ``idle``, that waits until no bucket has been for half a minute.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        if not self.unfinished or not (idle or self._is_overdue()):
            return
        self._last_s = time.monotonic()
        if self._in_thread:
            # A daemon, because nobody who stops a server waits for a compiler.
            self._thread = threading.Thread(target=self._advance, name="warm-up", daemon=True)
            self._thread.start()
        else:
            self._advance()

    def is_ready(self, phase: Phase, bucket: Bucket) -> bool:
        """Whether a batch of this bucket can run as it is meant to."""
        return self._warmup.is_ready(phase, bucket)

    def want(self, phase: Phase, bucket: Bucket) -> None:
        """Live traffic would have used this bucket: value it more."""
        self._warmup.record_miss(phase, bucket)

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._last_s > _PATIENCE_SECONDS

    def _advance(self) -> None:
        try:
            self._warmup.advance()
        except Exception:
            logger.exception("Background warm-up ends; requests are served as before")
            self._ended = True
