"""What warm-up did: one value that can be printed, kept and compared."""

from __future__ import annotations

import attrs

from trencadis.bucketing import Bucket
from trencadis.warmup.memory import format_bytes
from trencadis.warmup.runtime import Phase


@attrs.frozen
class BucketTime:
    """Seconds that the first execution of a bucket took."""

    phase: Phase
    bucket: Bucket
    seconds: float


@attrs.frozen
class WarmupReport:
    """Result of a warm-up. ``allocated`` is device memory in bytes; negative means released."""

    executed: tuple[BucketTime, ...]
    seconds: float
    allocated: int

    def describe(self) -> str:
        """The log line of the seeds."""
        return (
            f"Warmup finished in {self.seconds:.0f} secs, "
            f"allocated {format_bytes(self.allocated)} of device memory"
        )
