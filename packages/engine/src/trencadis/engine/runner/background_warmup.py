"""Warms up buckets in the background, while requests are being served."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from trencadis.bucketing import Bucket
from trencadis.engine.runner.grids import Grids
from trencadis.warmup import BackgroundWarmup, GraphCapture, Phase, Runtime

logger = logging.getLogger("trencadis.engine")

_MAX_DELAY_SECONDS = 30.0
"""Under continuous traffic, one bucket is warmed up at least this often."""


class BackgroundWarmupLoop:
    """Warms up one bucket at a time, most wanted first, when the core is idle.

    ``in_thread``: in a thread beside the step loop, so that a request that arrives meanwhile is
    served at once. Otherwise in the step loop, for devices that only one thread may use. With a
    ``capture``, the graph of each bucket is captured after its warm-up, and in the end those that
    need what other graphs have left of the budget. Without one, buckets that are ready before, as
    of a model that was served earlier, are left out. ``on_end`` is called when nothing is left.
    """

    def __init__(
        self,
        runtime: Runtime,
        grids: Grids,
        *,
        in_thread: bool,
        capture: GraphCapture | None = None,
        is_ready: Callable[[Phase, Bucket], bool] = lambda phase, bucket: False,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._warmup = BackgroundWarmup(runtime, grids.prompt.buckets, grids.decode.buckets)
        if capture is None:
            for phase, grid in ((Phase.PROMPT, grids.prompt), (Phase.DECODE, grids.decode)):
                for bucket in grid.buckets:
                    if is_ready(phase, bucket):
                        self._warmup.mark_ready(phase, bucket)
        self._capture = capture
        self._left_graphs: Iterator[object] | None = None if capture is None else capture.steps()
        self._in_thread = in_thread
        self._on_end = on_end
        self._thread: threading.Thread | None = None
        self._last_started_s = time.monotonic()
        self._failed = False

    @property
    def is_running(self) -> bool:
        """Whether buckets are left to warm up, or graphs to capture."""
        return not self._failed and (self._has_cold_buckets or self._left_graphs is not None)

    @property
    def _has_cold_buckets(self) -> bool:
        # The thread may be at work: `progress` reads counters only, never a changing collection.
        progress = self._warmup.progress
        return progress.done < progress.total

    def warm_up_first(self) -> None:
        """Warm up the first bucket of each phase. Requests can be served from then on."""
        while not self._warmup.ready:
            self._warm_up_next()
        if not self.is_running:
            self._on_end()

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

    def wait(self) -> None:
        """Wait until the bucket that a thread warms up is ready."""
        if self._thread is not None:
            self._thread.join()

    def record_miss(self, phase: Phase, bucket: Bucket) -> None:
        """Count a bucket that live traffic needed before it was warmed up, to raise its rank."""
        self._warmup.record_miss(phase, bucket)

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._last_started_s > _MAX_DELAY_SECONDS

    def _warm_up_next(self) -> None:
        executed = self._warmup.advance()
        if executed is not None and self._capture is not None:
            self._capture.capture_bucket(executed.phase, executed.bucket)

    def _capture_next(self) -> None:
        if self._left_graphs is not None and next(self._left_graphs, None) is None:
            self._left_graphs = None

    def _advance(self) -> None:
        try:
            if self._has_cold_buckets:
                self._warm_up_next()
            else:
                self._capture_next()
        except Exception:
            logger.exception("Background warm-up failed and stops; requests are still served")
            self._failed = True
        if not self.is_running:
            self._on_end()
