"""Executes one bucket and measures the time; reads the free memory and the clock of the host."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.bucketing import Bucket
from trencadis.warmup.errors import InvalidAnswer
from trencadis.warmup.report import BucketTime
from trencadis.warmup.runtime import Phase, Runtime
from trencadis.warmup.validators import is_finite

RUNTIME_METHODS = ("execute", "synchronize", "free_memory")
"""The methods of a `Runtime`."""

MAX_FREE_BYTES = 1 << 61
"""Differences of two such numbers are within 64 bits."""

MAX_SECONDS = 1e12
"""Differences and sums of such times are finite and exact to a millisecond."""


def execute_bucket(
    runtime: Runtime, phase: Phase, bucket: Bucket, clock: Callable[[], float]
) -> BucketTime:
    """Execute the bucket and wait for the device. The time of a cold bucket includes compiling.

    Raises `InvalidAnswer` for a clock that returns no number.
    """
    before = read_clock(clock)
    runtime.execute(phase, bucket)
    runtime.synchronize()
    return BucketTime(phase, bucket, read_clock(clock) - before)


def read_free_memory(runtime: Runtime) -> int:
    """Free device memory in bytes. Raises `InvalidAnswer` if the host returns no such number."""
    free = runtime.free_memory()
    if not is_finite(free) or abs(free) > MAX_FREE_BYTES:
        raise InvalidAnswer(
            f"free_memory() of {type(runtime).__name__} returned {free!r}: "
            "return the number of free bytes"
        )
    return int(free)


def read_clock(clock: Callable[[], float]) -> float:
    """Seconds. Raises `InvalidAnswer` if the clock returns no such number."""
    seconds = clock()
    if not is_finite(seconds) or abs(seconds) > MAX_SECONDS:
        raise InvalidAnswer(f"clock() returned {seconds!r}: return seconds as a number")
    return float(seconds)
