"""Warm-up behind traffic: one bucket at a time, between the steps of a server that serves already.

The server's loop asks for `advance` when it has nothing better to do; in between it may stop for
good, since no bucket depends on another. Which bucket is next is decided anew each time: the one
that traffic is likeliest to ask for. Compiling it takes as long as the stall that it spares, so
that the likelihood alone orders them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping

import attrs

from trencadis.bucketing import Bucket
from trencadis.warmup.execution import execute_bucket
from trencadis.warmup.log_lines import bucket_line
from trencadis.warmup.report import BucketTime, WarmupReport
from trencadis.warmup.runtime import Phase, Runtime

logger = logging.getLogger("trencadis.warmup")


@attrs.frozen
class Progress:
    """How far a warm-up is. ``seconds_left`` is of warm-up's own time; None before the first."""

    done: int
    total: int
    seconds_left: float | None

    @property
    def fraction(self) -> float:
        """From 0 to 1; 1 where there was nothing to do."""
        return self.done / self.total if self.total else 1.0


class BackgroundWarmup:
    """The buckets of both grids, made ready by and by.

    Not safe to share between threads: the loop that runs the model runs this too.

    Args:
        replays: how often each bucket is expected to run, from `expected_replays`. What it leaves
            out is expected after all it names, small shapes before large ones: lengths spread
            over orders of magnitude, so that a short bucket catches as many as a long one and is
            there sooner.
        clock: gives seconds.
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
        self._runtime = runtime
        self._clock = clock
        self._free_at_start = runtime.free_memory()
        self._executed: list[BucketTime] = []
        self._cold: dict[tuple[Phase, Bucket], _Value] = {}
        self._totals: dict[Phase, int] = {}
        self._warm = dict.fromkeys(Phase, 0)
        for phase, buckets in ((Phase.PROMPT, prompt_buckets), (Phase.DECODE, decode_buckets)):
            expected = (replays or {}).get(phase, {})
            ranked = sorted(set(buckets), key=_elements)
            self._totals[phase] = len(ranked)
            for rank, bucket in enumerate(ranked):
                self._cold[phase, bucket] = _Value(expected.get(bucket, 0.0), rank)
        self._all = frozenset(self._cold)

    @property
    def ready(self) -> bool:
        """Whether each phase that has buckets has one that is ready: requests can be served."""
        return all(self._warm[phase] for phase, total in self._totals.items() if total)

    @property
    def progress(self) -> Progress:
        """Of all buckets; the time left is that of the mean bucket so far for each cold one."""
        total, left = sum(self._totals.values()), len(self._cold)
        seconds = [one.seconds for one in self._executed]
        mean = sum(seconds) / len(seconds) if seconds else None
        return Progress(total - left, total, None if mean is None else mean * left)

    @property
    def report(self) -> WarmupReport:
        """What it has executed until now; what live traffic has compiled is not in it."""
        return WarmupReport(
            executed=tuple(self._executed),
            seconds=sum(one.seconds for one in self._executed),
            allocated=self._free_at_start - self._runtime.free_memory(),
            complete=not self._cold,
        )

    def next(self) -> tuple[Phase, Bucket] | None:
        """The bucket to make ready now; None when all are.

        Until the server is ready, only a phase that has no bucket yet.
        """
        candidates = [key for key in self._cold if self.ready or not self._warm[key[0]]]
        return min(candidates, key=self._order, default=None)

    def advance(self) -> BucketTime | None:
        """Run the `next` bucket to its end; None when all are ready.

        An error that the runtime raises is passed on; the bucket stays cold.
        """
        chosen = self.next()
        if chosen is None:
            return None
        phase, bucket = chosen
        position, total = self._warm[phase] + 1, self._totals[phase]
        free = self._runtime.free_memory()
        logger.info(bucket_line(phase.value, position, total, bucket, free))
        spent = execute_bucket(self._runtime, phase, bucket, self._clock)
        self._executed.append(spent)
        self.mark_ready(phase, bucket)
        return spent

    def is_ready(self, phase: Phase, bucket: Bucket) -> bool:
        """Whether the bucket runs without being compiled; False for one of neither grid."""
        return (phase, bucket) in self._all and (phase, bucket) not in self._cold

    def want(self, phase: Phase, bucket: Bucket) -> None:
        """Live traffic would have used this bucket, and took another or waited: value it more."""
        value = self._cold.get((phase, bucket))
        if value is not None:
            value.replays += 1

    def mark_ready(self, phase: Phase, bucket: Bucket) -> None:
        """The bucket has been compiled, here or by live traffic."""
        if self._cold.pop((phase, bucket), None) is not None:
            self._warm[phase] += 1
            if not self._cold:
                logger.info(self.report.describe())

    def _order(self, key: tuple[Phase, Bucket]) -> tuple[float, int]:
        value = self._cold[key]
        return -value.replays, value.rank


@attrs.define
class _Value:
    """Expected replays, and the place among its phase's buckets from the smallest up."""

    replays: float
    rank: int


def _elements(bucket: Bucket) -> tuple[int, tuple[int, ...]]:
    return math.prod(size or 1 for size in bucket.shape), bucket.shape
