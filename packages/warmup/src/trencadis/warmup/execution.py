"""Executes one bucket and measures the time."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.bucketing import Bucket
from trencadis.warmup.report import BucketTime
from trencadis.warmup.runtime import Phase, Runtime


def execute_bucket(
    runtime: Runtime, phase: Phase, bucket: Bucket, clock: Callable[[], float]
) -> BucketTime:
    """Execute the bucket and wait for the device. The time of a cold bucket includes compiling."""
    before = clock()
    runtime.execute(phase, bucket)
    runtime.synchronize()
    return BucketTime(phase, bucket, clock() - before)
