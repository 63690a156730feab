"""Warm-up behind traffic: executes one bucket at a time while the server already serves.

The serving loop calls `BackgroundWarmup.advance` when it is idle. It may stop at any time, because
no bucket depends on another. Each call selects the bucket that traffic most likely needs next. The
compile time does not count: it equals the stall that it avoids.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping

import attrs

from trencadis.bucketing import Bucket
from trencadis.warmup.errors import WarmupError
from trencadis.warmup.execution import RUNTIME_METHODS, execute_bucket, read_free_memory
from trencadis.warmup.log_lines import bucket_line
from trencadis.warmup.report import BucketTime, WarmupReport
from trencadis.warmup.runtime import Phase, Runtime
from trencadis.warmup.validators import (
    as_buckets,
    function,
    instance_of,
    require_methods,
    require_phase_replays,
)

logger = logging.getLogger("trencadis.warmup")


@attrs.frozen
class Progress:
    """Buckets that are ready, of all buckets.

    ``seconds_left`` is warm-up time, without the time of serving; None before the first bucket.
    """

    done: int
    total: int
    seconds_left: float | None

    @property
    def fraction(self) -> float:
        """From 0 to 1; 1 if there are no buckets."""
        return self.done / self.total if self.total else 1.0


class BackgroundWarmup:
    """Executes the buckets of both phases one by one. A bucket is cold until it is compiled.

    Not thread-safe: call it from the loop that runs the model.

    Args:
        replays: how often each bucket is expected to run, from `expected_replays`. Other buckets
            come last, small shapes first: lengths spread over orders of magnitude, so a short
            bucket serves as many requests as a long one and compiles sooner.
        clock: returns seconds.

    Raises:
        ConfigError: an argument is wrong, such as a number of replays that is not finite.
        InvalidAnswer: the runtime or the clock returns no number.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt_buckets: Iterable[Bucket],
        decode_buckets: Iterable[Bucket],
        *,
        replays: Mapping[Phase, Mapping[Bucket, float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_methods("runtime", runtime, RUNTIME_METHODS)
        function.checked("clock", clock)
        require_phase_replays(replays)
        phases = {
            Phase.PROMPT: as_buckets("prompt_buckets", prompt_buckets),
            Phase.DECODE: as_buckets("decode_buckets", decode_buckets),
        }
        self._runtime = runtime
        self._clock = clock
        self._free_at_start = read_free_memory(runtime)
        self._executed: list[BucketTime] = []
        self._cold: dict[tuple[Phase, Bucket], _Rank] = {}
        self._totals: dict[Phase, int] = {}
        self._num_ready = dict.fromkeys(Phase, 0)
        for phase, buckets in phases.items():
            expected = (replays or {}).get(phase, {})
            by_size = sorted(set(buckets), key=_size)
            self._totals[phase] = len(by_size)
            for position, bucket in enumerate(by_size):
                self._cold[phase, bucket] = _Rank(expected.get(bucket, 0.0), position)
        self._all = frozenset(self._cold)
        self._running: tuple[Phase, Bucket] | None = None

    @property
    def ready(self) -> bool:
        """Whether each phase with buckets has a ready bucket, so that requests can be served."""
        return all(self._num_ready[phase] for phase, total in self._totals.items() if total)

    @property
    def progress(self) -> Progress:
        """Progress over all buckets. Each cold bucket is estimated at the mean time so far."""
        total, num_cold = sum(self._totals.values()), len(self._cold)
        seconds = [entry.seconds for entry in self._executed]
        mean = sum(seconds) / len(seconds) if seconds else None
        return Progress(total - num_cold, total, None if mean is None else mean * num_cold)

    @property
    def report(self) -> WarmupReport:
        """The buckets executed here so far, without those that live traffic has compiled."""
        return self._report(read_free_memory(self._runtime))

    def next_bucket(self) -> tuple[Phase, Bucket] | None:
        """The bucket that `advance` would execute; None if all are ready.

        Until the server is `ready`, only buckets of a phase that has no ready bucket.
        """
        candidates = [key for key in self._cold if self.ready or not self._num_ready[key[0]]]
        return min(candidates, key=self._sort_key, default=None)

    def advance(self) -> BucketTime | None:
        """Execute the `next_bucket`; None if all are ready.

        An error of the runtime is passed on; the bucket stays cold. Raises `WarmupError` if the
        runtime itself calls it.
        """
        if self._running is not None:
            phase, bucket = self._running
            raise WarmupError(
                f"advance() was called while it executes the {phase.value} bucket {bucket}: call "
                "it from the serving loop, and not from the runtime"
            )
        self._running = selected = self.next_bucket()
        try:
            return None if selected is None else self._execute(*selected)
        finally:
            self._running = None

    def _execute(self, phase: Phase, bucket: Bucket) -> BucketTime:
        position, total = self._num_ready[phase] + 1, self._totals[phase]
        free = read_free_memory(self._runtime)
        logger.info(bucket_line(phase.value, position, total, bucket, free))
        measured = execute_bucket(self._runtime, phase, bucket, self._clock)
        self._finish(phase, bucket, measured)
        return measured

    def is_ready(self, phase: Phase, bucket: Bucket) -> bool:
        """Whether the bucket is compiled. False for a bucket of neither phase."""
        _require_key(phase, bucket)
        return (phase, bucket) in self._all and (phase, bucket) not in self._cold

    def record_miss(self, phase: Phase, bucket: Bucket) -> None:
        """Live traffic needed this cold bucket: count one more expected replay."""
        _require_key(phase, bucket)
        rank = self._cold.get((phase, bucket))
        if rank is not None:
            rank.replays += 1

    def mark_ready(self, phase: Phase, bucket: Bucket) -> None:
        """The bucket is compiled by live traffic. A ready or unknown bucket is ignored.

        So is the one that `advance` executes, which is ready once the device has finished it.
        """
        _require_key(phase, bucket)
        if (phase, bucket) in self._cold and (phase, bucket) != self._running:
            self._finish(phase, bucket)

    def _finish(self, phase: Phase, bucket: Bucket, measured: BucketTime | None = None) -> None:
        """The cold bucket is ready, unless the memory for the last log line cannot be read."""
        is_last = len(self._cold) == 1
        free = read_free_memory(self._runtime) if is_last else 0
        del self._cold[phase, bucket]
        self._num_ready[phase] += 1
        if measured is not None:
            self._executed.append(measured)
        if is_last:
            logger.info(self._report(free).describe())

    def _report(self, free_memory: int) -> WarmupReport:
        return WarmupReport(
            executed=tuple(self._executed),
            seconds=sum(entry.seconds for entry in self._executed),
            allocated=self._free_at_start - free_memory,
            complete=not self._cold,
        )

    def _sort_key(self, key: tuple[Phase, Bucket]) -> tuple[float, int]:
        rank = self._cold[key]
        return -rank.replays, rank.position


@attrs.define
class _Rank:
    """Expected replays, and the position among the phase's buckets, smallest first."""

    replays: float
    position: int


def _require_key(phase: Phase, bucket: Bucket) -> None:
    instance_of(Phase).checked("phase", phase)
    instance_of(Bucket).checked("bucket", bucket)


def _size(bucket: Bucket) -> tuple[int, tuple[int, ...]]:
    return math.prod(size or 1 for size in bucket.shape), bucket.shape
