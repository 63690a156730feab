"""Running one bucket to its end and taking its time."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.bucketing import Bucket
from trencadis.warmup.report import BucketTime
from trencadis.warmup.runtime import Phase, Runtime


def execute_bucket(
    runtime: Runtime, phase: Phase, bucket: Bucket, clock: Callable[[], float]
) -> BucketTime:
    """Execute and wait; the time is that of a compilation where the bucket was cold."""
    before = clock()
    runtime.execute(phase, bucket)
    runtime.synchronize()
    return BucketTime(phase, bucket, clock() - before)
